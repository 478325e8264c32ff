"""`kf.patch` and `kf.unpatch`: walk through a model, examine each kind of module once, exchange classes."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kernel_fusion.core import checks
from kernel_fusion.patching import exact, norm_fit, rewrite
from kernel_fusion.patching.activations import Known, fit_activation, fit_softmax, known_activation
from kernel_fusion.patching.confirm import confirm
from kernel_fusion.patching.examining import COMMUNICATES, Isolation, examining
from kernel_fusion.patching.norms import NormForm
from kernel_fusion.patching.report import Line, Report
from kernel_fusion.patching.rewrite import RewriteForm
from kernel_fusion.patching.rewriter import Site
from kernel_fusion.patching.rotary import ONCE, AnglesForm, confirm_rotary, fit_angles, fit_rotary
from kernel_fusion.patching.sites import Act, identity, is_dropout
from kernel_fusion.patching.stand_in import buffers, settings, too_large
from kernel_fusion.patching.swap import Plan, change, holders, holds_own, is_changed, original_class, plan_of, restore

_TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_BETWEEN = "code between this and what it would join may write to what it reads"
_LIGER = "Liger-Kernel computes it; apply Liger without it (`rms_norm=False`, `rope=False`, `swiglu=False`), then patch"
T = TypeVar("T")


def patch(
    model: nn.Module,
    *,
    norms: bool = True,
    mlps: bool = True,
    activations: bool = True,
    residuals: bool = True,
    dropouts: bool = True,
    rotary: bool = True,
    rounding: str = "match",
) -> Report:
    r"""Make the modules of a model call this library's kernels where they compute the same.

    A module is recognised by what it computes, not by its name. Each kind is called with random tensors in fp32, bf16
    and fp16, forward and backward, and compared with our operations and float64. If ours is no less exact, the module
    gets a subclass of its class whose forward calls ours. Parameters, names, state dict, hooks and `isinstance` stay,
    and `kf.unpatch` undoes it. Modules that do not agree are left and listed in the report.

    .. math:: \mathrm{act}(g) \cdot v, \quad \mathrm{norm}(x) \cdot w + b, \quad h = r + x,\; \mathrm{norm}(h)

    Args:
        model: any module on any device, `meta` too, before or after `.to()`. It is changed in place.
        norms: LayerNorm and RMSNorm of any class, with a weight offset, with a gate, in groups.
        mlps: gated products, `act(gate) * value`, in any method of a module.
        activations: activations written as formulas, and `nn.Softmax` over the last dimension. Those that PyTorch
            computes in one kernel are left.
        residuals: additions whose sum the same method gives to a patched norm, and modulations of its result,
            `norm(h) * (1 + scale) + shift`, if the norm has no weight.
        dropouts: `nn.Dropout` and `F.dropout` of a term of such a sum. An active one then draws other numbers than
            PyTorch's from the same generator, with the same distribution; its p and mode are read at each call.
        rotary: functions called as `f(query, key, cos, sin)` that turn heads, where a module of the model makes the
            angles.
        rounding: "match" rounds each norm as the module does; "once" or "hf" (see :func:`kernel_fusion.layer_norm`)
            applies to all norms.

    Returns:
        A :class:`Report` to print. A second call changes nothing. `torch.compile` and `torch.export`
            see the model as it was.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown `rounding`.
        RuntimeError: FSDP1 has wrapped the model or a part of it; nothing is changed then, on any rank.

    Dtypes: any pair of fp32, bf16 and fp16 (input, weight) that was found to agree, and fp64 if the module computes in
    it; other calls run the module's own forward. Norms accumulate in fp32 (fp64 for fp64).

    Source: the models themselves; the forms are those of :func:`rms_norm`, :func:`gated_rms_norm`, :func:`gated_act`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> print(kf.patch(model))  # doctest: +NORMALIZE_WHITESPACE
        Sequential: 1 modules replaced, 0 left
          replaced    1 LayerNorm: layer_norm (1)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`patch`: `model` must be a torch.nn.Module, got {type(model).__name__}")
    checks.rounding("patch", rounding, "match")
    _refuse_flat(model)
    start = time.perf_counter()
    with examining() as isolation, (walk := _Walk(rounding, isolation)).undo:
        named = [(name, module) for name, module in model.named_modules() if not _is_ours(module)]
        walk.report.model = type(model).__name__
        walk.report.already = sum(plan_of(module) is not None for _, module in named)
        walk.exact = exact.kept([module for _, module in named])
        for name, module in named:
            if next(module.children(), None) is None:
                walk.leaf(name, module, norms, activations)
                if rotary:
                    walk.angles(name, module)
        for name, module in named:
            walk.expressions(name, module, mlps, residuals, dropouts, rotary)
        walk.mark_angles()
        walk.exchange(named)
        walk.undo.pop_all()
    walk.report.seconds = time.perf_counter() - start
    return walk.report


def unpatch(model: nn.Module) -> Report:
    """Give every module that `kf.patch` changed its own class back.

    Args:
        model: any module; it is changed in place.

    Returns:
        A :class:`Report` of the restored modules. A module that something else subclassed since, such as FSDP2, or
        whose patched method something holds, such as a hook that wraps it, keeps its class and is listed as left. Once
        that is removed, a second call restores it.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
        >>> _ = kf.patch(model)
        >>> len(kf.unpatch(model).replaced), type(model[0])
        (1, <class 'torch.nn.modules.normalization.LayerNorm'>)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`unpatch`: `model` must be a torch.nn.Module, got {type(model).__name__}")
    report = Report(type(model).__name__, done="restored")
    held = holders(module for module in model.modules() if is_changed(module))
    for name, module in model.named_modules():
        had = plan_of(module)
        if module in held:
            text = f"something holds its patched `{held[module]}`, such as a hook that wraps it"
            report.left.append(Line(type(module).__name__, text, name))
        elif is_changed(module):
            restore(module)
            if had is not None:
                report.replaced.append(Line(type(module).__name__, "its own forward", name))
        elif had is not None:
            report.left.append(Line(type(module).__name__, "its class was extended after it was patched", name))
    return report


class _Walk:
    """One walk through a model, which examines each kind of module once."""

    def __init__(self, rounding: str, isolation: Isolation) -> None:
        self.rounding, self.isolation = rounding, isolation
        self.report = Report("")
        self.known: dict[Any, Any] = {}
        self.makers: list[tuple[str, nn.Module, AnglesForm]] = []
        self.layouts = {ONCE}  # of angles that functions can be given
        self.turned: set[str] = set()  # of angles that they are given
        self.plans: dict[nn.Module, Plan] = {}
        self.exact: dict[type, str] = {}  # classes whose modules keep them, and why
        self.undo = contextlib.ExitStack()  # after an error, as of Ctrl-C

    def once(self, key: Any, examine: Callable[[], T], stopped: Callable[[str], Any] = lambda reason: None) -> T:
        """The answer for a key, examined once; that of `stopped` to the reason if some of the code was stopped."""
        if key not in self.known:
            self.isolation.stopped = None
            found = examine()
            self.known[key] = found if self.isolation.stopped is None else stopped(self.isolation.stopped)
        return self.known[key]  # type: ignore[no-any-return]

    def plan(self, module: nn.Module) -> Plan | None:
        """The plan that a module has or will get."""
        return self.plans.get(module) or plan_of(module)

    def hands_off(self, module: nn.Module) -> str | None:
        """Why a module keeps its class, or None."""
        return self.exact.get(original_class(type(module))) or _hands_off(module)

    def leaf(self, name: str, module: nn.Module, norms: bool, activations: bool) -> None:
        """Patch a norm or an activation."""
        if self.plan(module) is not None or not (answer := self._form(module, norms, activations)):
            return
        if not isinstance(answer, str) and (reason := self.hands_off(module)):
            answer = reason
        if isinstance(answer, NormForm):
            form = answer
            key = form, _kind(module), _place(module)
            answer = self.once(key, lambda: confirm(module, form), lambda reason: reason) or form
        self._settle(name, module, answer)

    def _settle(self, name: str, module: nn.Module, answer: Plan | str) -> None:
        if isinstance(answer, str) and _of_liger(type(module), vars(module).get("forward")):
            answer = _LIGER
        if not isinstance(answer, str):
            self.plans[module] = answer
        lines = self.report.left if isinstance(answer, str) else self.report.replaced
        lines.append(Line(type(module).__name__, str(answer), name))

    def exchange(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        """Exchange the classes. Modules that had one class get one class, even if some have other plans, or none."""
        groups: dict[Any, list[tuple[str, nn.Module]]] = {}
        for name, module in named:
            groups.setdefault(original_class(type(module)), []).append((name, module))
        for group in groups.values():
            if any(module in self.plans for _, module in group):
                try:
                    change([(module, self.plan(module)) for _, module in group], self.undo.callback)
                except TypeError as error:
                    names = {name for name, module in group if module in self.plans}
                    reason = f"its class allows no subclass: {error}"
                    lines = self.report.replaced
                    self.report.left += [Line(line.kind, reason, line.name) for line in lines if line.name in names]
                    self.report.replaced = [line for line in lines if line.name not in names]

    def _form(self, module: nn.Module, norms: bool, activations: bool) -> Any:
        """The form of a module without submodules, the reason why it has none, or None if nobody would expect one."""
        if isinstance(module, nn.Softmax):
            return self.once(_kind(module), lambda: fit_softmax(module), str) if activations else None
        if not _may_be_ours(module):
            return None
        expected = "norm" in type(module).__name__.lower()

        def examine() -> Any:
            if too_large(module):
                return norm_fit.TOO_LONG if expected else None
            form: Any = None
            if norms and not type(module).__module__.startswith("torch.nn.modules.activation"):
                form = norm_fit.fit(module, self.rounding)
            if isinstance(form, NormForm):
                return form
            return (fit_activation(module) if activations else None) or (form if expected else None)

        return self.once(_kind(module), examine, lambda reason: reason if expected or reason is COMMUNICATES else None)

    def angles(self, name: str, module: nn.Module) -> None:
        """Note a module that makes cos and sin."""
        form: Any = self.plan(module)
        if form is None and _may_be_ours(module) and not too_large(module) and not self.hands_off(module):
            form = self.once(("angles", _kind(module)), lambda: fit_angles(module))
            if form is not None:
                self.makers.append((name, module, form))
        if isinstance(form, AnglesForm):
            self.layouts.add(form.layout)

    def mark_angles(self) -> None:
        """Make the noted modules mark their angles, if some function is to be given such."""
        for name, module, form in self.makers:
            if form.layout in self.turned:
                self._settle(name, module, form)

    def expressions(
        self, name: str, module: nn.Module, mlps: bool, residuals: bool, dropouts: bool, rotary: bool
    ) -> None:
        """Rewrite gated products, additions before norms and rotations in a module's methods."""
        if self.plan(module) is not None:
            return
        kind = original_class(type(module))
        found = self.once(("search", kind), lambda: rewrite.search(kind))
        acts = (
            [a for f in found.values() for text in sorted(f.acts) if (a := self._act(module, f, text))] if mlps else []
        )
        allowed = {
            site
            for f in found.values()
            for site in f.sites
            if residuals
            and (not site.dropout or (dropouts and is_dropout(rewrite.value_of(site.dropout, f.function, module))))
            and self._joins(name, site, rewrite.value_of(site.norm, f.function, module))
        }
        sites = {site for f in found.values() if f.sites & allowed for site in rewrite.taken(f, allowed)}
        turning = {key for f in found.values() for key in f.rotary if rotary and self._turns(name, module, f, *key)}
        self._refuse(name, module, found, mlps, residuals)
        if acts or sites or turning:
            form = RewriteForm(tuple(dict.fromkeys(acts)), frozenset(sites), frozenset(turning))
            self._settle(name, module, self.hands_off(module) or form)
        elif (
            (mlps or residuals or rotary)
            and next(module.children(), None) is not None
            and (method := self.once(("text", kind), lambda: rewrite.without_text(kind))) is not None
        ):
            self._settle(name, module, f"the text of its method `{method}` is missing")

    def _refuse(
        self, name: str, module: nn.Module, found: dict[str, rewrite.Found], mlps: bool, residuals: bool
    ) -> None:
        """Say what the order of evaluation forbids."""
        for f in found.values():
            for each in sorted(f.refused, key=str):
                if isinstance(each, str):
                    known = mlps and self._act(module, f, each) is not None
                else:
                    known = residuals and self._joins(name, each, rewrite.value_of(each.norm, f.function, module))
                if known:
                    self.report.left.append(Line(type(module).__name__, f"{each}: {_BETWEEN}", name))

    def _joins(self, name: str, site: Site, norm: Any) -> bool:
        """Whether what stands around a patched norm may become one pass with it; why not, the report says."""
        if (
            not isinstance(norm, nn.Module)
            or not isinstance(form := self.plan(norm), NormForm)
            or form.gate is not None
        ):
            return False
        if (site.modulated and not form.modulates) or not _only_forward(norm):
            return False
        key = "site", site.adds, site.modulated, form, _kind(norm), _place(norm)
        reason = self.once(key, lambda: confirm(norm, form, site.adds, site.modulated), lambda reason: reason)
        if reason is not None:
            text = f"{site._replace(norm='it', dropout='')}: {reason}"
            line = Line(type(norm).__name__, text, f"{name}.{site.norm}")
            self.report.left += [line] if line not in self.report.left else []
        return reason is None

    def _turns(self, name: str, module: nn.Module, found: rewrite.Found, text: str, count: int) -> bool:
        """Whether a function of angles may become our operator; why not, the report says."""
        function = rewrite.value_of(text, found.function, module)
        if not isinstance(function, types.FunctionType | nn.Module):
            return False
        form = self.once(("rotary", function, count), lambda: fit_rotary(function, count))
        reason: str | None = _LIGER if _of_liger(function) else "its rotary layout is not supported"
        if form is not None and form.layout not in self.layouts:
            reason = "no module here makes its angles"
        elif form is not None:
            parameter = next(module.parameters(), None)
            place = (torch.device("cpu"), torch.float32) if parameter is None else (parameter.device, parameter.dtype)
            reason = self.once(("rotary", function, *place), lambda: confirm_rotary(function, count, form, *place))
        if reason is not None:
            self.report.left.append(Line(type(module).__name__, f"{text}: {reason}", name))
            return False
        assert form is not None
        self.turned.add(form.layout)
        return True

    def _act(self, module: nn.Module, found: rewrite.Found, text: str) -> Act | None:
        """The activation that a text in a method refers to."""
        act = rewrite.value_of(text, found.function, module)
        if isinstance(act, nn.Module):
            if next(act.children(), None) is not None or act._parameters or act._buffers or not _only_forward(act):
                return None
            if too_large(act):
                return None
            key: Any = _kind(act)
        elif isinstance(act, _FUNCTIONS) and not isinstance(getattr(act, "__self__", None), nn.Module):
            key = act
        else:
            return None
        known = self.once(("act", key), lambda: known_activation(act))
        return Act(text, identity(act), *known) if isinstance(known, Known) else None


def _refuse_flat(model: nn.Module) -> None:
    """Raise if FSDP1 holds a module's parameters: pieces of rows, empty on some ranks, or views of freed memory."""
    for name, module in model.named_modules():
        flat = any(getattr(p, "_fsdp_flattened", False) for p in module._parameters.values())
        if flat or vars(module).get("_fsdp_use_orig_params") is False:
            raise RuntimeError(
                f"`patch`: {name or 'the model'} is wrapped by FullyShardedDataParallel, which keeps pieces of its "
                "parameters; call `patch` before it is wrapped, or use `fully_shard`, before or after"
            )


def _of_liger(*objects: Any) -> bool:
    """Whether a class or a function comes from Liger-Kernel, which puts its own in the place of transformers'."""
    return any((getattr(each, "__module__", None) or "").split(".")[0] == "liger_kernel" for each in objects)


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("kernel_fusion.nn.", "kernel_fusion.hf."))


def _may_be_ours(module: nn.Module) -> bool:
    """Whether a module without submodules may be a norm or an activation; PyTorch's other layers are not."""
    kind = type(module)
    if kind.__module__.startswith("torch."):
        return original_class(kind) in _TORCH_NORMS or kind.__module__ == "torch.nn.modules.activation"
    if any(p is not None and nn.parameter.is_lazy(p) for p in module._parameters.values()):
        return False
    return not isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd)


def _only_forward(module: nn.Module) -> bool:
    """Whether calling a module runs its hooks and its forward, and nothing else."""
    return type(module).__call__ is nn.Module.__call__


def _hands_off(module: nn.Module) -> str | None:
    """Why a module that somebody has changed is left alone, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    if "forward" in vars(module) and not holds_own(module, module.forward):
        return "its forward was replaced on the instance"
    return None


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """The key of modules that compute alike."""
    members = [(name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items()]
    return original_class(type(module)), settings(module), tuple(members), buffers(module)


def _place(module: nn.Module) -> tuple[Any, ...]:
    """The devices and dtypes of its parameters."""
    tensors: list[Tensor] = [p for p in module._parameters.values() if p is not None]
    return tuple((t.device, t.dtype, type(t)) for t in tensors)
