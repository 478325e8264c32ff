"""Parallel styles for `parallelize_module`, for modules with two inputs or packed outputs.

PyTorch's `SequenceParallel`, `ColwiseParallel`, `RowwiseParallel` and `PrepareModuleInput` take the modules with one
input as they are. The styles here are for the others, and are subclasses of PyTorch's if there is a similar one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel
from torch.distributed.tensor.placement_types import _StridedShard


class ResidualSequenceParallel(SequenceParallel):
    r"""`SequenceParallel` for norms with two inputs: the residual, or the gate, is sharded as the input is.

    PyTorch's style hands on only the first input. Give both by position. A tensor is this rank's part. A DTensor is
    redistributed to the sequence dimension; a partial sum (the output of a rowwise linear layer with
    `output_layouts=Partial()`) by a reduce-scatter.

    Args:
        sequence_dim: The dimension that is sharded.
        use_local_output: Whether results are this rank's parts as tensors, and not DTensors.

    For :class:`kernel_fusion.FusedAddLayerNorm`, :class:`kernel_fusion.FusedAddRMSNorm` and
    :class:`kernel_fusion.FusedGatedRMSNorm`. Parameters are replicated; their gradients are partial sums.

    Source: Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198.

    Example:
        >>> from kernel_fusion.distributed import ResidualSequenceParallel
        >>> ResidualSequenceParallel()
        ResidualSequenceParallel(sequence_dim=1, use_local_output=False)
    """

    @staticmethod
    def _prepare_input_fn(
        sequence_sharding: tuple[Placement, ...], mod: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
    ) -> tuple[Any, ...]:
        prepare: Any = SequenceParallel._prepare_input_fn
        return tuple(prepare(sequence_sharding, mod, (input,), device_mesh) for input in inputs)

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh) -> Any:
        return _local(outputs) if use_local_output else outputs


class FeatureParallel(ParallelStyle):
    r"""Every input, parameter and output of a module is sharded in its last dimension.

    Use it between a columnwise and a rowwise linear layer: :class:`kernel_fusion.FusedBiasAct` and
    :class:`kernel_fusion.FusedGatedAct` of gate and value then send nothing. Norms of rows that are spread over the
    ranks send one small all-reduce in each direction.

    Args:
        use_local_output: Whether results are this rank's parts as tensors, as `ColwiseParallel` has them, and not
            DTensors.

    Give inputs by position; a tensor is this rank's part. Dropout differs between ranks even if all have the same
    seed.

    Raises:
        TypeError: An input is no tensor.

    Example:
        >>> from kernel_fusion.distributed import FeatureParallel
        >>> FeatureParallel()
        FeatureParallel(use_local_output=True)
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepare: Any = self._prepare_inputs
        output = partial(ResidualSequenceParallel._prepare_output_fn, self.use_local_output)
        return distribute_module(module, device_mesh, self._partition, prepare, output)

    def _partition(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _shard_parameters(module, device_mesh, Shard(-1), self.src_data_rank)

    @staticmethod
    def _prepare_inputs(module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:
        def prepared(input: Any) -> DTensor:
            if not isinstance(input, Tensor):
                raise TypeError(f"{type(module).__name__}: inputs must be tensors, got {type(input).__name__}")
            if not isinstance(input, DTensor):
                return DTensor.from_local(input, device_mesh, [Shard(-1)], run_check=False)
            return input.redistribute(placements=[Shard(-1)])

        return tuple(map(prepared, inputs))

    def __repr__(self) -> str:
        return f"FeatureParallel(use_local_output={self.use_local_output})"


class PackedColwiseParallel(ColwiseParallel):
    r"""`ColwiseParallel` for a linear layer whose output holds several things side by side, each sharded by itself.

    If `nn.Linear(d, 2 * n)` makes a gate and a value, each rank gets a part of the gate and the same part of the
    value; `ColwiseParallel` would give the first ranks the gate and the others the value. Keep the output a DTensor
    (`use_local_output=False`) for :class:`kernel_fusion.FusedGatedAct`, which then halves each rank's columns.

    Args:
        parts: How many things of one size the output holds: 2 for gate and value, 3 for query, key and value.
        input_layouts: As in `ColwiseParallel`.
        use_local_output: As in `ColwiseParallel`.

    The state dict has the weight in the order of `nn.Linear`, sharded by rows. Optimizer states have the order of
    the ranks' parts, and PyTorch's distributed checkpoints refuse them. Under FSDP2 state dicts need
    :func:`fsdp_placement`, which cannot serve a bias.

    Raises:
        NotImplementedError: The module is no `nn.Linear`, or PyTorch is older than 2.13 and cannot redistribute such
            parts.
        ValueError: The ranks cannot have equal parts.

    Example:
        >>> from kernel_fusion.distributed import PackedColwiseParallel
        >>> PackedColwiseParallel(parts=2).parts
        2
    """

    def __init__(self, parts: int, *, input_layouts: Placement | None = None, use_local_output: bool = True) -> None:
        super().__init__(input_layouts=input_layouts, use_local_output=use_local_output)
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise NotImplementedError(f"PackedColwiseParallel is for nn.Linear, got {type(module).__name__}")
        if torch.__version__ < "2.13":
            raise NotImplementedError(f"PackedColwiseParallel needs PyTorch 2.13 or newer, this is {torch.__version__}")
        if module.out_features % (self.parts * device_mesh.size()):
            raise ValueError(
                f"PackedColwiseParallel: `out_features` must be a multiple of {self.parts} parts times "
                f"{device_mesh.size()} ranks, got {module.out_features}"
            )
        module.register_state_dict_post_hook(_in_one_piece)
        module.register_load_state_dict_pre_hook(_in_parts)
        return super()._apply(module, device_mesh)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _shard_parameters(module, device_mesh, _StridedShard(0, split_factor=self.parts), self.src_data_rank)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: DTensor, device_mesh: DeviceMesh
    ) -> Tensor:
        return outputs.to_local() if use_local_output else outputs


def _local(outputs: Any) -> Any:
    """This rank's part of a DTensor, or of each DTensor of a tuple."""
    if isinstance(outputs, DTensor):
        return outputs.to_local()
    return type(outputs)(*map(_local, outputs))


def _shard_parameters(module: nn.Module, device_mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Shard the parameters of the module, but not those of modules in it, as rank `source` of the mesh has them."""
    for key, parameter in module.named_parameters(recurse=False):
        sharded = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=source)
        module.register_parameter(key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _in_one_piece(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the rows of each rank side by side in a state dict, as distributed checkpoints can describe them."""
    for key in ("weight", "bias"):
        if isinstance(value := state.get(prefix + key), DTensor):
            inner = value.device_mesh.ndim - 1  # the outer dimensions of the mesh are FSDP2's
            state[prefix + key] = _laid_out(value, [*value.placements[:inner], Shard(0)])


def _in_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lay the DTensors of a state dict out as the module's are; PyTorch spreads plain tensors when it loads them."""
    for key in ("weight", "bias"):
        if isinstance(value := state.get(prefix + key), DTensor):
            state[prefix + key] = _laid_out(value, getattr(module, key).placements)


def fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """Return the placement with which FSDP2 shards a parameter: packed weights by columns.

    That leaves the order of the rows of a packed weight alone.

    Give it to PyTorch's `fully_shard` as `shard_placement_fn` where layers are sharded by `PackedColwiseParallel`.
    FSDP2's own choice is rows, and it describes interleaved rows wrongly: training is right, but checkpoints would be
    wrong, so `state_dict` raises.

    Args:
        parameter: A parameter of a module that is about to be sharded.

    Returns:
        `Shard(1)` for a packed weight; None, FSDP2's own choice, for the rest.

    Example:
        >>> import torch
        >>> from kernel_fusion.distributed import fsdp_placement
        >>> fsdp_placement(torch.nn.Parameter(torch.ones(4, 4)))
    """
    packed = isinstance(parameter, DTensor) and any(isinstance(p, _StridedShard) for p in parameter.placements)
    return Shard(1) if packed and parameter.dim() > 1 else None


def _laid_out(value: DTensor, placements: Any) -> DTensor:
    """The value with these placements: gathered and then sharded, because PyTorch exchanges no interleaved parts."""
    if sum(isinstance(p, (Shard, _StridedShard)) and p.dim == 0 for p in value.placements) > 1:
        raise RuntimeError(
            "PackedColwiseParallel: the state dict of a packed weight whose rows FSDP2 shards would be in another "
            "order; `fully_shard(..., shard_placement_fn=kernel_fusion.distributed.fsdp_placement)` shards columns"
        )
    everywhere = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return everywhere.redistribute(placements=placements)
