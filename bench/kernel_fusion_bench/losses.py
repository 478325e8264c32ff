"""The operations of the suite `losses`: losses over a vocabulary, and PyTorch's chains beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion_bench.workloads import Argument, Dropout, Operation

SOFTCAP = 30.0  # that of Gemma's logits
# Rows and columns: tokens of a step, and the vocabularies of Llama 3, Qwen3, Gemma 3, Llama 2 and GPT-2. No vector
# divides the last one.
SIZES = ((8192, 128256), (8192, 151936), (4096, 262144), (32768, 32000), (8192, 50257))


def _arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
    ids = Argument("ids", shape[:-1], torch.int64, values="ids", below=shape[-1], gradient=False)
    return [Argument("x", shape, dtype), ids]


def _cross_entropy(name: str, change: Callable[[Tensor], Tensor] = lambda x: x, **options: Any) -> Operation:
    """The mean over rows; `change` is what PyTorch's users do to the logits where we take `options`."""

    def pytorch(_: Dropout, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(change(x.to(torch.promote_types(x.dtype, torch.float32))), ids)

    def fused(x: Tensor, ids: Tensor, p: float, backend: str | None) -> Any:
        return kf.cross_entropy(x, ids, backend=backend, **options)

    return Operation(name, "cross_entropy", _arguments, pytorch, fused, reduces_rows=True)


def _logprob_and_entropy() -> Operation:
    """The results of each row that a step of a policy gradient needs."""

    def pytorch(_: Dropout, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(x, -1, dtype=torch.promote_types(x.dtype, torch.float32))
        return log_p.gather(-1, ids[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def fused(x: Tensor, ids: Tensor, p: float, backend: str | None) -> tuple[Tensor, ...]:
        return tuple(kf.token_logprob(x, ids, entropy=True, backend=backend))

    results = "y", "entropy"
    return Operation("log-probability, entropy", "token_logprob", _arguments, pytorch, fused, results=results)


OPERATIONS = (
    _cross_entropy("cross_entropy"),
    _cross_entropy("cross_entropy, softcap", lambda x: SOFTCAP * torch.tanh(x / SOFTCAP), softcap=SOFTCAP),
    _logprob_and_entropy(),
)
