"""The verbs: what a user calls. Each checks its arguments and hands over to one operator of `torch.ops.kernel_fusion`.

The automatic choice of backend costs nothing here: PyTorch's dispatcher makes it, by the tensor's device. Only an
explicit `backend=` (or `use_backend`), and inputs that are not plain tensors, leave the straight line.

The first argument of a verb may be an array of another library (NumPy, CuPy, JAX, anything with `__dlpack__`); the
others may then be arrays or tensors, and the result is an array of the first one's kind. No memory is copied. If it is
a proxy of `torch.fx`, the graph gets a call of the verb.
"""

from __future__ import annotations

from torch.utils import _pytree as pytree

from kernel_fusion.functional import attention, interop, linear_losses, losses, wording
from kernel_fusion.functional.attention import *  # noqa: F403 - its `__all__` says what
from kernel_fusion.functional.gated_norm import gated_layer_norm, gated_rms_norm
from kernel_fusion.functional.group_norm import group_norm
from kernel_fusion.functional.linear_losses import *  # noqa: F403
from kernel_fusion.functional.losses import *  # noqa: F403
from kernel_fusion.functional.modulated_norm import (
    add_modulated_layer_norm,
    add_modulated_rms_norm,
    modulated_layer_norm,
    modulated_rms_norm,
)
from kernel_fusion.functional.pointwise import act_dropout, add_act, bias_act, gated_act, mul_act
from kernel_fusion.functional.reductions import mean_abs, sum_squared
from kernel_fusion.functional.results import CrossEntropyOutput, NormOutput, Quantized, TokenLogprobOutput
from kernel_fusion.functional.rotary import qk_norm_rope, rope
from kernel_fusion.functional.row_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = [
    "NormOutput",
    "act_dropout",
    "add_act",
    "add_layer_norm",
    "add_modulated_layer_norm",
    "add_modulated_rms_norm",
    "add_rms_norm",
    "bias_act",
    "gated_act",
    "gated_layer_norm",
    "gated_rms_norm",
    "group_norm",
    "layer_norm",
    "mean_abs",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "mul_act",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "sum_squared",
]
__all__ += attention.__all__ + linear_losses.__all__ + losses.__all__

interop.keep_from_scripts(globals())
wording.spell_out(globals(), __all__)

# Named tuples are trees to PyTorch; with a name, programs that return one, or pass it between modules, can be saved.
for _result in (CrossEntropyOutput, NormOutput, Quantized, TokenLogprobOutput):
    pytree._register_namedtuple(_result, serialized_type_name=f"kernel_fusion.{_result.__name__}")
