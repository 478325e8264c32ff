"""The models of the suite `steps`: transformers classes, made from configurations without a download, and a DiT.

Layers and vocabulary of large language models are cut in proportion, so that the head keeps its share of a step. Every
contender uses PyTorch's fused attention without a mask tensor: masks made during tracing would send compiled models to
a slower kernel than eager ones.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel_fusion.core.spec import dtype_name
from kernel_fusion_bench.workloads import Workload

_ATTENTION = "kernel_fusion_bench"
# A vocabulary of such a multiple is aligned for tensor cores.
_VOCABULARY_STEP = 128


@dataclass(frozen=True)
class Architecture:
    """A model to train.

    Attributes:
        name, title: on the command line, and in tables.
        batch, length: sequences of a step, and tokens of each.
        hidden: the row length of its norms.
        make: makes the model; True for a small one of the same kind, for CPUs.
        inputs: makes random keyword arguments of a step, given whether the model is the small one.
        small_length: tokens of a sequence of the small one.
        liger: the name in `liger_kernel.transformers.apply_liger_kernel_to_*`, or None.
    """

    name: str
    title: str
    batch: int
    length: int
    hidden: int
    make: Callable[[bool], nn.Module]
    inputs: Callable[[Architecture, bool], dict[str, Tensor]]
    loss: Callable[[Any], Tensor] = lambda output: output.loss
    liger: str | None = None
    small_length: int = 16

    def sizes(self, small: bool) -> tuple[int, int]:
        """Sequences of a step and tokens of each."""
        return (2, self.small_length) if small else (self.batch, self.length)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, with its masks left out."""
    assert mask is None
    attended = F.scaled_dot_product_attention(
        *(query, key, value),
        dropout_p=options.get("dropout", 0.0),
        is_causal=bool(getattr(module, "is_causal", False)),
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2), None


def hugging_face(
    model: str, config: str, sizes: Mapping[str, Any], small: Mapping[str, Any] | None = None, is_small: bool = False
) -> Any:
    """A transformers model with random weights, by the names of its class and its configuration's class.

    `sizes` are fields of the configuration; `small` overrides them if `is_small`.
    """
    transformers: Any = importlib.import_module("transformers")
    transformers.AttentionInterface.register(_ATTENTION, _attention)
    values = {**sizes, **(small or {})} if is_small else sizes
    made = getattr(transformers, config)(**values, attn_implementation=_ATTENTION)
    made.use_cache = False
    return getattr(transformers, model)(made)


def _tokens(vocabulary: int, architecture: Architecture, small: bool) -> dict[str, Tensor]:
    text = torch.randint(_SMALL["vocab_size"] if small else vocabulary, architecture.sizes(small))
    return {"input_ids": text, "labels": text}


_LAYERS = 6  # of large language models


def _vocabulary(whole: int, layers: int) -> int:
    return round(whole * _LAYERS / layers / _VOCABULARY_STEP) * _VOCABULARY_STEP


def _sizes(hidden: int, inner: int, layers: int = _LAYERS) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}


def _heads(queries: int, keys: int, columns: int | None = None) -> dict[str, Any]:
    counts = {"num_attention_heads": queries, "num_key_value_heads": keys}
    return counts if columns is None else counts | {"head_dim": columns}


_SMALL = {"vocab_size": 128} | _sizes(64, 96, 2) | _heads(4, 2, 16)
_LLAMA = {"vocab_size": _vocabulary(128256, 32), "rms_norm_eps": 1e-5} | _sizes(4096, 14336) | _heads(32, 8)
# Small enough that a step waits for launches.
_LAUNCH_BOUND = _LLAMA | {"vocab_size": 8192} | _sizes(1024, 3584) | _heads(16, 4)
_QWEN = {"vocab_size": _vocabulary(151936, 36)} | _sizes(4096, 12288) | _heads(32, 8, 128)
# Its window is as long as the text, so that every layer attends to all of it.
_GEMMA = {"vocab_size": _vocabulary(262144, 34), "sliding_window": 4096} | _sizes(2560, 10240) | _heads(8, 4, 256)
_VIT = _sizes(1024, 4096, 24) | {"num_attention_heads": 16}
_BERT = _VIT | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
# For encoders; ViT's images have 16 patches.
_SMALL_ENCODER = _sizes(64, 96, 2) | {"num_attention_heads": 4}
_BERT_VOCABULARY, _CLASSES = 30522, 1000


def _images(architecture: Architecture, small: bool) -> dict[str, Tensor]:
    batch, side = (2, 32) if small else (architecture.batch, 224)
    return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(_CLASSES, (batch,))}


class _DiTBlock(nn.Module):
    """A block of a diffusion transformer with adaLN-Zero (Peebles, Xie: arXiv:2212.09748)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(batch, length, width) and (batch, width) → (batch, length, width)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1)
        mixed: Tensor = x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return mixed

    def attend(self, x: Tensor) -> Tensor:
        """Attention among all patches."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        projected: Tensor = self.projection(attended)
        return projected


class _DiT(nn.Module):
    """The blocks alone, which predict noise; the loss is the mean squared error."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(blocks))

    def forward(self, x: Tensor, condition: Tensor, noise: Tensor) -> Tensor:
        """The loss."""
        for block in self.blocks:
            x = block(x, condition)
        return F.mse_loss(x.float(), noise.float())


def _latents(architecture: Architecture, small: bool) -> dict[str, Tensor]:
    batch, length = architecture.sizes(small)
    width = _SMALL["hidden_size"] if small else architecture.hidden
    x, noise = torch.randn(2, batch, length, width)
    return {"x": x, "condition": torch.randn(batch, width), "noise": noise}


def _causal(
    name: str, title: str, family: str, sizes: dict[str, Any], liger: str, text: tuple[int, int] = (2, 4096)
) -> Architecture:
    """A transformers language model, trained on two texts of 4096 tokens unless `text` says otherwise."""
    model, config = f"{family}ForCausalLM", "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    make = partial(hugging_face, model, config, sizes, _SMALL)
    inputs = partial(_tokens, sizes["vocab_size"])
    return Architecture(name, title, *text, sizes["hidden_size"], make, inputs, liger=liger)


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        _causal("llama-3-8b", "Llama 3 8B, 6 layers", "Llama", _LLAMA, "llama"),
        _causal("llama-1024", "Llama of 1024, 512 tokens", "Llama", _LAUNCH_BOUND, "llama", (1, 512)),
        _causal("qwen3-8b", "Qwen3 8B, 6 layers", "Qwen3", _QWEN, "qwen3"),
        _causal("gemma-3-4b", "Gemma 3 4B, 6 layers", "Gemma3", _GEMMA, "gemma3_text"),
        Architecture(
            *("bert-large", "BERT-Large", 16, 512, 1024),
            partial(hugging_face, "BertForMaskedLM", "BertConfig", _BERT, _SMALL_ENCODER | {"vocab_size": 128}),
            partial(_tokens, _BERT_VOCABULARY),
        ),
        Architecture(
            *("vit-large", "ViT-L/16", 64, 197, 1024),
            partial(
                hugging_face,
                *("ViTForImageClassification", "ViTConfig"),
                _VIT | {"num_labels": _CLASSES},
                _SMALL_ENCODER | {"image_size": 32, "patch_size": 8},
            ),
            _images,
            small_length=17,
        ),
        Architecture(
            *("dit-xl", "DiT-XL/2, blocks", 32, 256, 1152),
            lambda small: _DiT(_SMALL["hidden_size"], 4, 2) if small else _DiT(1152, 16, 28),
            _latents,
            loss=lambda output: output,
        ),
    )
}


@dataclass(frozen=True)
class Step:
    """A model in one dtype, with the part of `Workload` that needs no comparison by element."""

    architecture: Architecture
    dtype: torch.dtype
    small: bool

    verb = "training step"

    @property
    def name(self) -> str:
        """See `Workload`."""
        return self.architecture.title + (" (small)" if self.small else "")

    @property
    def facts(self) -> dict[str, Any]:
        """See `Workload`."""
        dtype = dtype_name(self.dtype)
        hidden = 64 if self.small else self.architecture.hidden
        return {
            **{"configuration": self.name, "verb": self.verb, "operation": None, "layout": "contiguous"},
            **{"rows": math.prod(self.architecture.sizes(self.small)), "cols": hidden},
            **{"dtype": dtype, "weight_dtype": dtype, "bias_dtype": dtype},
        }

    def __str__(self) -> str:
        return f"{self.name}, {dtype_name(self.dtype)}"


@dataclass(frozen=True)
class Steps:
    """A `Part` of a suite whose verbs are the architectures."""

    small: bool = False
    verbs = tuple(ARCHITECTURES)

    def with_shapes(self, sizes: Sequence[tuple[int, int]]) -> Steps:
        """See `Part`. Raises ValueError, since a model has its shapes."""
        raise ValueError("training steps have the shapes of their models")

    def workloads(self, device: str, dtype: torch.dtype, verb: str, weights: torch.dtype | None) -> list[Workload]:
        """See `Part`."""
        return [cast("Workload", Step(ARCHITECTURES[verb], dtype, self.small))]
