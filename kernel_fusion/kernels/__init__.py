"""The direct layer: the kernel of the tensors' device, or an error that says what it demands.

No copies, no type promotion of what it cannot read, no fallback, no autograd graph. `kernel_fusion.ops` has the same
operations with all of that.

Every function here takes tensors that are

- `torch.Tensor` (parameters too, and tensors that require grad: the result is detached), no subclass with rules of its
  own, and not inside a transform of `torch.func`;
- float16, bfloat16, float32 or float64;
- contiguous, and aligned to their element;
- on one device, for which this library has kernels that can run.

Raises:
    TypeError: something that is no such tensor, or of another dtype.
    ValueError: tensors that are not contiguous, not aligned or not on one device.
    BackendUnavailableError: no kernels of ours for this device, on this machine or inside this transform.
    RuntimeError, IndexError: shapes and dimensions that don't fit, in PyTorch's words.
"""

from __future__ import annotations

from kernel_fusion.kernels import elementwise, fusion, reduction

__all__ = ["elementwise", "fusion", "reduction"]
