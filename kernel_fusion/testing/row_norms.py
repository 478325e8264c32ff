"""Cases of the row norms, plain, with stages, with a gate, and modulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.testing import long_double, unfused
from kernel_fusion.testing.budget import Array, Reference
from kernel_fusion.testing.case import Case, Draw, Results, Tensors, dropout_factors, dropout_seed, seeded, wide
from kernel_fusion.testing.long_double import Activation, sum_to


def tensors(x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor) -> Tensors:
    """The tensors of a norm without stages."""
    absent = dict.fromkeys(("residual", "dh", "seed", "gate", "scale", "shift"))
    return Tensors(x=x, weight=weight, bias=bias, dy=dy, **absent)


@dataclass(frozen=True)
class RowNormCase(Case):
    """One call of a norm.

    Attributes:
        verb: The function: "layer_norm" or "rms_norm".
        num_dims: How many of the last dimensions are normalised.
        weight: The dtype of the weight, or None if there is none.
        bias: The dtype of the bias, or None if there is none.
        layout: The layout of the input and of cotangents, as in `lay_out`.
    """

    num_dims: int = 1
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    weight_offset: float = 0.0
    layout: str = "contiguous"
    mean: float = 0.5
    std: float = 2.0

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        """The sizes of the normalised dimensions."""
        return self.shape[len(self.shape) - self.num_dims :]

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of y."""
        return self.out_dtype or self.dtype

    @property
    def rms(self) -> bool:
        """Whether this is RMSNorm."""
        return self.verb.endswith("rms_norm")

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw x, weight, bias and dy."""
        draw = Draw(device, seed)

        def parameter(dtype: torch.dtype | None, mean: float) -> Tensor | None:
            return None if dtype is None else draw.normal(self.normalized_shape, dtype, mean).requires_grad_()

        x = draw.normal(self.shape, self.dtype, self.mean, self.std, self.layout).requires_grad_()
        dy = draw.normal(self.shape, self.result_dtype, layout=self.layout)
        weight, bias = parameter(self.weight, 1.0 - self.weight_offset), parameter(self.bias, 0.5)
        return tensors(x, weight, bias, dy)

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """y and, with a residual, h, by the verb."""
        with seeded(inputs.x.device):
            results = self._verb(inputs, **self._options, backend=backend)
        return {"y": results} if inputs.residual is None else {"y": results.output, "h": results.residual}

    @property
    def _options(self) -> dict[str, Any]:
        return self._fields("weight_offset", "out_dtype")

    def _fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _verb(self, inputs: Tensors, **options: Any) -> Any:
        rows = [t for t in (inputs.x, inputs.residual, inputs.gate) if t is not None]
        return getattr(kf, self.verb)(*rows, self.normalized_shape, inputs.weight, bias=inputs.bias, **options)

    def definition(self, inputs: Tensors) -> Results:
        """Return y of the operator's definition."""
        affine = inputs.weight, inputs.bias, default_eps(self), self.weight_offset, None
        return {"y": eager.row_norm(inputs.x, self.num_dims, *affine, self.rms)}

    def pytorch(self, inputs: Tensors) -> Results:
        """Return y of `F.layer_norm`, or of `F.rms_norm` and an addition."""
        return {"y": self._pytorch_norm(inputs)[0]}

    def _pytorch_norm(self, inputs: Tensors, **stages: Any) -> tuple[Tensor, Tensor]:
        affine = self.normalized_shape, inputs.weight, inputs.bias, default_eps(self)
        stages |= {"rms": self.rms, "weight_offset": self.weight_offset, "out_dtype": self.result_dtype}
        return unfused.staged_norm(inputs.x, inputs.residual, *affine, **stages)

    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients by formulas."""
        return self._by_hand(inputs, long_double.ACTIVATIONS[IDENTITY], long_double.ACTIVATIONS[IDENTITY], np.ones(()))

    def _by_hand(self, inputs: Tensors, pre: Activation, post: Activation, keep: Array) -> Reference:
        """Results and gradients by formulas, with an activation before and one after the norm.

        `keep` has the factors of dropout.
        """
        x = wide(inputs.x)
        h = keep * pre.value(x)
        if inputs.residual is not None:
            h = h + wide(inputs.residual)
        y, dh, gradients = self._norm_by_hand(h, wide(inputs.dy), inputs, post)
        results = {"y": y} | gradients
        if inputs.dh is not None:
            dh = dh + wide(inputs.dh)
            results |= {"h": h, "dresidual": dh}
        results["dx"] = dh * keep * pre.slope(x)
        return _present(results, inputs)

    def _mean(self, values: Array) -> Array:
        """The mean of each normalised group, shaped to broadcast to the values."""
        return np.asarray(values.mean(tuple(range(-self.num_dims, 0)), keepdims=True))

    def _affine(self, inputs: Tensors) -> tuple[Array, Array]:
        none = np.zeros(self.normalized_shape, np.longdouble)
        weight = none + 1 if inputs.weight is None else wide(inputs.weight) + self.weight_offset
        return weight, none if inputs.bias is None else wide(inputs.bias)

    def _affine_gradients(self, inputs: Tensors, dweight: Array, dbias: Array) -> Reference:
        """The gradients of the parameters, from those of weight and bias as if every row had its own."""
        shape = self.normalized_shape
        return {"dweight": sum_to(dweight, shape), "dbias": sum_to(dbias, shape)}

    def _norm_by_hand(self, h: Array, dy: Array, inputs: Tensors, post: Activation) -> tuple[Array, Array, Reference]:
        """y = post(norm(h)), and the gradients of h and of the parameters if `dy` arrives at y."""
        if h.size == 0:
            return h, h, self._affine_gradients(inputs, h, h)
        weight, bias = self._affine(inputs)
        centered = h if self.rms else h - self._mean(h)
        rstd = 1 / np.sqrt(self._mean(centered * centered) + np.longdouble(default_eps(self)))
        xhat = centered * rstd
        n = xhat * weight + bias
        dn = dy * post.slope(n)
        g = dn * weight
        dh = g - xhat * self._mean(g * xhat)
        if not self.rms:
            dh = dh - self._mean(g)
        return post.value(n), dh * rstd, self._affine_gradients(inputs, dn * xhat, dn)


@dataclass(frozen=True)
class StagedNormCase(RowNormCase):
    """One call of a norm with stages.

    Attributes:
        verb: The function; "add_layer_norm" and "add_rms_norm", which also return the sum h, are possible too.
        residual: The dtype of the residual of these two, or None.
    """

    pre_activation: str | None = None
    activation: str | None = None
    residual: torch.dtype | None = None
    dropout_p: float = 0.0
    rounding: str = "once"

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw x, weight, bias and dy, and if the case has them the residual, dh and the seed of dropout."""
        inputs = super().make_inputs(device, seed)
        draw = Draw(device, seed + 1)
        if self.residual is not None:
            inputs.residual = draw.normal(self.shape, self.residual, 0.2, 1.5, self.layout).requires_grad_()
            inputs.dh = draw.normal(self.shape, self.residual)
        if self.dropout_p:
            inputs.seed = dropout_seed(device)
        return inputs

    @property
    def _options(self) -> dict[str, Any]:
        names = ["pre_activation", "activation", "rounding", *(["dropout_p"] if self.residual is not None else [])]
        return super()._options | self._fields(*names)

    def definition(self, inputs: Tensors) -> Results:
        """Return y and h without rounding between stages, so that every rounding of a kernel counts as an error."""
        affine = inputs.weight, inputs.bias, default_eps(self), self.weight_offset, None
        stages = self.pre_activation or IDENTITY, self.activation or IDENTITY, self.dropout_p, inputs.seed
        y, h = eager.staged_row_norm(inputs.x, inputs.residual, self.num_dims, *affine, self.rms, *stages)
        return {"y": y} if inputs.residual is None else {"y": y, "h": h}

    def pytorch(self, inputs: Tensors) -> Results:
        """Return the results of activation, dropout, addition, norm and activation, each by PyTorch."""
        stages = self._fields("pre_activation", "activation", "rounding")
        y, h = self._pytorch_norm(inputs, dropout=partial(self._dropped, inputs), **stages)
        return {"y": y} if inputs.residual is None else {"y": y, "h": h}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients by formulas."""
        pre, post = (long_double.ACTIVATIONS[name or IDENTITY] for name in (self.pre_activation, self.activation))
        return self._by_hand(inputs, pre, post, self._kept(inputs))

    def _dropped(self, inputs: Tensors, u: Tensor) -> Tensor:
        return u * dropout_factors(u.detach().contiguous(), self.dropout_p, inputs.seed) if self.dropout_p else u

    def _kept(self, inputs: Tensors) -> Array:
        return wide(dropout_factors(inputs.x.detach().contiguous(), self.dropout_p, inputs.seed))


@dataclass(frozen=True)
class GatedNormCase(RowNormCase):
    """One call of "gated_layer_norm" or "gated_rms_norm".

    Attributes:
        gate: The dtype of the gate.
        gate_layout: The layout of the gate, as in `lay_out`; it is often half of a projection.
    """

    gate: torch.dtype = torch.float32
    gate_layout: str = "half"
    gate_activation: str | None = "silu"
    gate_first: bool = False
    group_size: int | None = None
    rounding: str = "once"

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw x, weight, bias, dy and gate."""
        inputs = super().make_inputs(device, seed)
        inputs.gate = Draw(device, seed + 1).normal(self.shape, self.gate, layout=self.gate_layout).requires_grad_()
        return inputs

    @property
    def _gating(self) -> dict[str, Any]:
        return self._fields("gate_activation", "gate_first", "group_size", "weight_offset")

    @property
    def _options(self) -> dict[str, Any]:
        return self._gating | self._fields("out_dtype", "rounding")

    def definition(self, inputs: Tensors) -> Results:
        """Return y without rounding between stages."""
        return {"y": self._verb(inputs, eps=default_eps(self), backend="eager", **self._gating)}

    def pytorch(self, inputs: Tensors) -> Results:
        """Return y of the norm, perhaps of groups of columns, the activation and the products, each by PyTorch."""
        affine = self.normalized_shape, inputs.weight, inputs.bias, default_eps(self)
        options = self._gating | {"rms": self.rms, "out_dtype": self.result_dtype, "rounding": self.rounding}
        return {"y": unfused.gated_norm(inputs.x, inputs.gate, *affine, **options)}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients by formulas."""
        x, gate, dy = wide(inputs.x), wide(inputs.gate), wide(inputs.dy)
        act, none = (long_double.ACTIVATIONS[name or IDENTITY] for name in (self.gate_activation, IDENTITY))
        factor = act.value(gate)
        if self.gate_first:
            y, du, gradients = self._norm_by_hand(x * factor, dy, inputs, none)
            results = {"y": y, "dx": du * factor, "dgate": du * x * act.slope(gate)}
        else:
            z, dx, gradients = self._norm_by_hand(x, dy * factor, inputs, none)
            results = {"y": z * factor, "dx": dx, "dgate": dy * z * act.slope(gate)}
        return _present(results | gradients, inputs)

    def _mean(self, values: Array) -> Array:
        if self.group_size is None:
            return super()._mean(values)
        groups = values.reshape(*values.shape[:-1], -1, self.group_size)
        return np.repeat(groups.mean(-1), self.group_size, axis=-1)


@dataclass(frozen=True)
class ModulatedNormCase(StagedNormCase):
    """One call of "modulated_layer_norm", "modulated_rms_norm", or of "add_modulated_*" with a residual.

    The scale, the shift and the gate are each half of a wider tensor.

    Attributes:
        scale: The dtype of the scale, or None if there is none.
        shift: The dtype of the shift, or None if there is none.
        gate: The dtype of the residual's gate, or None if there is none.
        varies: The leading dimensions of scale and gate.
        shift_varies: The leading dimensions of the shift; None for the same.
    """

    scale: torch.dtype = torch.float32
    shift: torch.dtype | None = None
    gate: torch.dtype | None = None
    varies: tuple[int, ...] = ()
    shift_varies: tuple[int, ...] | None = None

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw the tensors of a norm with stages, and scale, shift and gate."""
        inputs, draw = super().make_inputs(device, seed), Draw(device, seed + 2)
        shift_varies = self.varies if self.shift_varies is None else self.shift_varies
        leading = {"scale": self.varies, "shift": shift_varies, "gate": self.varies}
        for name, dims in leading.items():
            if (dtype := getattr(self, name)) is not None:
                values = draw.normal((*dims, *self.normalized_shape), dtype, std=0.5, layout="half")
                setattr(inputs, name, values.requires_grad_())
        return inputs

    def _verb(self, inputs: Tensors, **options: Any) -> Any:
        options.pop("rounding")
        options |= {"gate": inputs.gate} if inputs.gate is not None else {}
        rows = [t for t in (inputs.x, inputs.residual) if t is not None]
        modulation = inputs.scale, inputs.shift, inputs.weight, inputs.bias
        return getattr(kf, self.verb)(*rows, self.normalized_shape, *modulation, **options)

    def definition(self, inputs: Tensors) -> Results:
        """Return y and h without rounding between stages."""
        return replace(self, out_dtype=None).ours(inputs, "eager")

    def pytorch(self, inputs: Tensors) -> Results:
        """Return the results of the norm with its stages, the gate's product and the modulation, each by PyTorch."""
        stages = {"dropout": partial(self._dropped, inputs)} | self._fields("pre_activation", "weight_offset")
        affine = self.normalized_shape, inputs.weight, inputs.bias, default_eps(self)
        y, h = unfused.staged_norm(inputs.x, inputs.residual, *affine, rms=self.rms, **stages)
        y = unfused.modulated(y, inputs.scale, inputs.shift, self.activation).to(self.result_dtype)
        return {"y": y} if inputs.residual is None else {"y": y, "h": h}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients by formulas; a gate multiplies as the factors of dropout do."""
        if inputs.gate is None:
            return super().long_double(inputs)
        pre, post = (long_double.ACTIVATIONS[name or IDENTITY] for name in (self.pre_activation, self.activation))
        keep = self._kept(inputs)
        results = self._by_hand(inputs, pre, post, keep * wide(inputs.gate))
        products = results["dresidual"] * keep * pre.value(wide(inputs.x))
        results["dgate"] = sum_to(products, tuple(inputs.gate.shape))
        return results

    def _dropped(self, inputs: Tensors, u: Tensor) -> Tensor:
        u = super()._dropped(inputs, u)
        return u if inputs.gate is None else inputs.gate * u

    def _affine(self, inputs: Tensors) -> tuple[Array, Array]:
        weight, bias = super()._affine(inputs)
        factor = 1 + wide(inputs.scale)
        return weight * factor, bias * factor + (0 if inputs.shift is None else wide(inputs.shift))

    def _affine_gradients(self, inputs: Tensors, dweight: Array, dbias: Array) -> Reference:
        weight, bias = super()._affine(inputs)
        factor = 1 + wide(inputs.scale)
        results = super()._affine_gradients(inputs, dweight * factor, dbias * factor)
        results["dscale"] = sum_to(dweight * weight + dbias * bias, tuple(inputs.scale.shape))
        if inputs.shift is not None:
            results["dshift"] = sum_to(dbias, tuple(inputs.shift.shape))
        return results


def _present(results: Reference, inputs: Tensors) -> Reference:
    """The results without the gradients of parameters that the case does not have."""
    absent = {f"d{name}" for name in ("weight", "bias") if getattr(inputs, name) is None}
    return {name: value for name, value in results.items() if name not in absent}


def default_eps(case: RowNormCase) -> float:
    """Return PyTorch's default eps: 1e-5 for LayerNorm, and for RMSNorm the machine epsilon of the compute type."""
    return torch.finfo(compute_dtype(case.dtype)).eps if case.rms else 1e-5
