"""The suites, as data; to add one, add an entry to `SUITES`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernel_fusion_bench import images, losses, operations, quantised, stages
from kernel_fusion_bench.operations import NORMS
from kernel_fusion_bench.step_models import Steps
from kernel_fusion_bench.suite import Operations, Shape, Shapes, Suite, fixed, plain
from kernel_fusion_bench.workloads import Direction

# Bytes of a tensor of the suite `odd`: too large for any cache.
_ODD_BYTES = 128_000_000


def _odd(device: str, dtype: torch.dtype) -> list[Shape]:
    """Row lengths that no vector or power of two divides, and unaligned rows."""

    def rows(cols: int) -> int:
        return round(_ODD_BYTES / (cols * dtype.itemsize))

    shapes = [plain(rows(cols), cols) for cols in (255, 1000, 1023, 3000, 5000, 7168, 14336, 50257)]
    return [*shapes, Shape(f"{rows(4096)}x4096, stride 4097", (rows(4096), 4096), "padded")]


def _by_device(on_gpu: list[Shape], elsewhere: list[Shape]) -> Shapes:
    """Fewer rows on a CPU, to save time."""
    return lambda device, dtype: on_gpu if device == "cuda" else elsewhere


_MODELS = {  # (batch, sequence, hidden)
    "BERT-Base": (32, 512, 768),
    "BERT-Large": (32, 512, 1024),
    "GPT-2 Medium": (16, 512, 1024),
    "GPT-2 Large": (8, 512, 1280),
    "GPT-2 XL": (4, 512, 1600),
    "GPT-3 Small": (4, 512, 2048),
    "GPT-3 Medium": (2, 1024, 4096),
    "GPT-3 XL": (2, 1024, 5120),
    "GPT-3 Large": (2, 1024, 6144),
    "GPT-3 XXL": (1, 1024, 8192),
    "GPT-3 175B": (1, 512, 12288),
}
_LARGE = (
    *((131072, 256), (65536, 1024), (32768, 2048), (32768, 4096), (16384, 5120), (16384, 8192)),
    *((8192, 12288), (8192, 16384), (4096, 32768), (2048, 65536), (1024, 131072)),
)
_FEW_ROWS = (
    *((rows, cols) for cols in (4096, 8192) for rows in (4, 16, 64, 128, 512)),
    *((1_000_000, cols) for cols in (64, 128)),
)
# The four published shapes first; then rows of BERT, a square, few long rows and many short ones.
_CPU = (
    *((100, 512), (1000, 1024), (5000, 256), (10000, 10000)),
    *((32768, 768), (4096, 4096), (64, 16384), (8, 131072), (200_000, 64)),
)
_CPU_QUICK = ((100, 512), (1000, 1024), (5000, 256), (4096, 4096))
# Powers of two and their midpoints.
_SWEEP_QUICK = tuple(256 << power for power in range(8))
_SWEEP = tuple(cols for power_of_2 in _SWEEP_QUICK for cols in (power_of_2, power_of_2 * 3 // 2))[:-1]
_MEMORY = tuple((4096, cols) for cols in (1024, 4096, 16384))
# So small that only the host's time is left.
_HOST = _by_device([plain(64, 1024)], [plain(1, 64)])
# The published size, or a fraction of it on a CPU, where one product takes long.
_SCORES_SHAPES = _by_device([plain(operations.SCORES_BATCH, 2048, 2048)], [plain(2, 2048, 2048)])
# Sequences of 128 tokens, as published; of one token on a CPU, where only bytes are counted.
_BLOCKS = _by_device(
    *([Shape(f"batch {batch}", (batch * tokens, 4096)) for batch in (32, 64, 128)] for tokens in (128, 1))
)


def _sweep(lengths: Sequence[int]) -> Shapes:
    """4096 rows of every length, as published."""
    return _by_device(*([plain(rows, cols) for cols in lengths] for rows in (4096, 512)))


# The device types for which several of our backends have kernels.
ALL_BACKENDS = {"cuda": ("cuda", "triton")}

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_ALL_THREE = (_FP32, _BF16, _FP16)
_FP32_AND_BF16 = {"cuda": (_FP32, _BF16), "cpu": (_FP32, _BF16)}
_FP32_ONLY = {"cuda": (_FP32,), "cpu": (_FP32,)}
_BF16_ONLY = {"cuda": (_BF16,), "cpu": (_BF16,)}
_ONE_EACH = {"cuda": (_BF16,), "cpu": (_FP32,)}
_PASSES: tuple[Direction, ...] = ("forward", "backward")


def _bare(shapes: Shapes) -> Operations:
    return Operations(tuple(operations.BARE_NORMS.values()), shapes, grouped=False)


def _norms(name: str, title: str, about: str, shapes: Shapes, **options: Any) -> Suite:
    return Suite(name, title, about, (_bare(shapes),), quick_verbs=NORMS[:1], **options)


def _tokens(*sizes: tuple[int, int], batch: tuple[int, ...] = ()) -> Shapes:
    """Rows and columns, of each sample of a batch."""
    return _by_device(*([plain(*batch, rows // share, cols) for rows, cols in sizes] for share in (1, 32)))


_CPU_SUITE = _norms(
    "cpu",
    "Norms on the CPU",
    "norms of nine shapes with one thread and with all, beside a build without vector instructions",
    fixed(*_CPU),
    dtypes={"cuda": _ALL_THREE, "cpu": _ALL_THREE},
    quick_dtypes=_FP32_ONLY,
    quick_parts=(_bare(fixed(*_CPU_QUICK)),),
    peers=("torch.compile", "portable"),
    quick_peers=("portable",),
    single_thread=True,
    settles_memory=True,
)

_SWEEP_SUITE = _norms(
    "sweep",
    "Sweep of row lengths",
    "bandwidth of norms over row lengths from 256 to 32768, by every backend of ours",
    _sweep(_SWEEP),
    dtypes=_FP32_AND_BF16,
    quick_parts=(_bare(_sweep(_SWEEP_QUICK)),),
    directions=_PASSES,
    peers=("torch.compile",),
    backends=ALL_BACKENDS,
    plots=("speedup", "bandwidth"),
    settles_memory=True,
)

_OPERATIONS, _SCORES = tuple(operations.OPERATIONS), tuple(operations.SCORES)
_BATCH = (operations.SCORES_BATCH,)
_BATCHES = Operations(_SCORES, _SCORES_SHAPES, batch=_BATCH)

_FUSED_OPS = Suite(
    "fused-ops",
    "Fused operations",
    "every verb with its variants at 2048x2048 and 8192x8192, against chains of PyTorch's calls",
    (Operations(_OPERATIONS, fixed((2048, 2048), (8192, 8192))), _BATCHES),
    dtypes=_FP32_AND_BF16,
    quick_parts=(Operations(_OPERATIONS, fixed((2048, 2048))), _BATCHES),
    directions=_PASSES,
    peers=("torch.compile",),
)

_MEMORY_SUITE = Suite(
    "memory",
    "Memory in training",
    "bytes saved for backward and peak of a training step, of every verb and of a transformer block",
    (
        _bare(fixed(*_MEMORY)),
        Operations(_OPERATIONS, fixed((4096, 4096))),
        Operations(_SCORES, fixed((*_BATCH, 1024, 1024)), batch=_BATCH),
        Operations((stages.BLOCK, stages.BLOCK_WITH_DROPOUT), _BLOCKS, grouped=False),
    ),
    "memory",
    plots=("memory",),
)

_SAMPLES = (stages.BATCH,)
_STAGES = Suite(
    "stages",
    "Norms with a gate, and modulated",
    "norms with a gate, or a scale and a shift for each sample, at the sizes of diffusion transformers",
    tuple(
        Operations(of, _tokens(*sizes, batch=batch), batch=batch)
        for of, sizes, batch in (
            (stages.GATED, stages.GATED_SIZES, ()),
            (stages.MODULATED, stages.SIZES, _SAMPLES),
            (stages.MODULATED_RMS, stages.SIZES[1:2], _SAMPLES),
        )
    ),
    dtypes={"cuda": (_BF16,), "cpu": (_FP32, _BF16)},
    directions=_PASSES,
    peers=("torch.compile", "liger", "fla"),
    quick_parts=(
        Operations(stages.GATED, fixed((256, 1024))),
        Operations((*stages.MODULATED, *stages.MODULATED_RMS), fixed((*_SAMPLES, 256, 1024)), batch=_SAMPLES),
    ),
)

_ROPE = Suite(
    "rope",
    "Rotary embedding",
    "the rotary embedding, alone and after the norm of each head",
    tuple(Operations(of, _tokens(s)) for s, of in stages.ROTARY.items()),
    directions=_PASSES,
    peers=("torch.compile", "liger", "quack", "fla", "flashinfer"),
    backends=ALL_BACKENDS,
)

_RELU_LAYER_NORM = Suite(
    "relu-layernorm",
    "ReLU and LayerNorm",
    "LayerNorm of ReLU in one kernel against PyTorch's and CuPy's unfused calls",
    (Operations((operations.RELU_LAYER_NORM,), fixed((4096, 1024))),),
    dtypes=_FP32_ONLY,
    quick_dtypes=_FP32_ONLY,
    directions=("forward",),
    peers=("cupy",),
    plots=("time",),
)

_QUANTISED = Suite(
    "quantised",
    "Quantised results",
    "norms and gates whose results are float8, by every kind of scale, against chains of PyTorch's calls",
    (Operations(quantised.NORMS, fixed((16384, 4096))), Operations(quantised.GATES, fixed((16384, 14336)))),
    dtypes=_BF16_ONLY,
    quick_dtypes=_BF16_ONLY,
    quick_parts=(Operations((*quantised.NORMS, *quantised.GATES), fixed((2048, 4096))),),
    directions=("forward",),
    peers=("torch.compile", "flashinfer"),
)

_IMAGE = (1, images.GROUPS)
_IMAGES = Suite(
    "images",
    "Norms of images",
    "GroupNorm alone and with SiLU, at the sizes of autoencoders and diffusion models, contiguous and channels last",
    (Operations(images.OPERATIONS, _by_device(images.shapes(1), images.shapes(16)), batch=_IMAGE),),
    dtypes=_ONE_EACH,
    quick_parts=(Operations(images.OPERATIONS, fixed((*_IMAGE, 64, 64)), batch=_IMAGE),),
    peers=("torch.compile", "liger"),
)

_LOSSES = Suite(
    "losses",
    "Losses over a vocabulary",
    "cross entropy, and the log-probability and entropy of tokens, at the vocabularies of five language models",
    (Operations(losses.OPERATIONS, _tokens(*losses.SIZES)),),
    dtypes=_ONE_EACH,
    quick_parts=(Operations(losses.OPERATIONS, _tokens((8192, 32000))),),
    peers=("torch.compile", "liger", "quack"),
)

_STEPS = Suite(
    "steps",
    "Training steps",
    "forward, backward and AdamW of whole models: PyTorch, ours, torch.compile and Liger-Kernel",
    (Steps(),),
    "steps",
    dtypes=_ONE_EACH,
    quick_dtypes=_FP32_ONLY,
    quick_parts=(Steps(small=True),),
    peers=("torch.compile", "liger"),
)

SUITES = {
    suite.name: suite
    for suite in (
        _norms(
            "models",
            "Eleven transformer models",
            "norms at the sizes of eleven models, BERT-Base to GPT-3 175B",
            lambda device, dtype: [Shape(name, sizes) for name, sizes in _MODELS.items()],
        ),
        _norms("large", "Large inputs", "norms of tensors that fill a GPU, rows of 256 to 131072", fixed(*_LARGE)),
        _norms("odd", "Odd row lengths and strides", "norms whose rows no vector divides or aligns with", _odd),
        _norms(
            "few-rows", "Few rows, and many short ones", "norms of 4 to 512 rows, and of a million", fixed(*_FEW_ROWS)
        ),
        _SWEEP_SUITE,
        _norms(
            "host",
            "Host time per call",
            "what a call costs before the device has done anything",
            _HOST,
            kind="host",
            dtypes=_ONE_EACH,
            quick_dtypes=_ONE_EACH,
        ),
        _CPU_SUITE,
        _FUSED_OPS,
        _STAGES,
        _ROPE,
        _RELU_LAYER_NORM,
        _QUANTISED,
        _IMAGES,
        _LOSSES,
        _MEMORY_SUITE,
        _STEPS,
    )
}
# The verbs of all suites.
VERBS = tuple(dict.fromkeys(verb for suite in SUITES.values() for verb in suite.verbs))
