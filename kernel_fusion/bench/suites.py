"""The suites, as data; to add one, add an entry to `SUITES`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernel_fusion.bench import operations, quantised, rotary, stages
from kernel_fusion.bench.operations import NORMS
from kernel_fusion.bench.step_models import Steps
from kernel_fusion.bench.suite import Kind, Norms, Operations, Shape, Shapes, Suite, always, plain
from kernel_fusion.bench.transformer_block import BLOCK, BLOCK_WITH_DROPOUT

# Bytes of a tensor of the suite `odd`: too large for any cache.
_ODD_BYTES = 128_000_000


def _odd(device: str, dtype: torch.dtype) -> list[Shape]:
    """Row lengths that no vector or power of two divides, and unaligned rows."""

    def rows(cols: int) -> int:
        return round(_ODD_BYTES / (cols * dtype.itemsize))

    shapes = [plain(rows(cols), cols) for cols in (255, 1000, 1023, 3000, 5000, 7168, 14336, 50257)]
    return [*shapes, Shape(f"{rows(4096)}x4096, stride 4097", (rows(4096), 4096), "padded")]


def _host(device: str, dtype: torch.dtype) -> list[Shape]:
    """Shapes so small that only the host's time is left."""
    return [plain(64, 1024) if device == "cuda" else plain(1, 64)]


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
_BLOCK_BATCHES, _BLOCK_COLS = (32, 64, 128), 4096


def _blocks(device: str, dtype: torch.dtype) -> list[Shape]:
    """Sequences of 128 tokens, as published; of one token on a CPU, where only bytes are counted."""
    tokens = 128 if device == "cuda" else 1
    return [Shape(f"batch {batch}", (batch * tokens, _BLOCK_COLS)) for batch in _BLOCK_BATCHES]


def _scores(device: str, dtype: torch.dtype) -> list[Shape]:
    """The published size, or a fraction of it on a CPU, where one product takes long."""
    return [plain(operations.SCORES_BATCH if device == "cuda" else 2, 2048, 2048)]


def _sweep(lengths: Sequence[int]) -> Shapes:
    """4096 rows of every length, as published; fewer on a CPU, to save time."""
    return lambda device, dtype: [plain(4096 if device == "cuda" else 512, cols) for cols in lengths]


# The device types for which several of our backends have kernels.
ALL_BACKENDS = {"cuda": ("cuda", "triton")}

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_DTYPES = {"cuda": (_BF16, _FP16, _FP32), "cpu": (_FP32, _BF16)}
_QUICK_DTYPES = {"cuda": (_BF16, _FP32), "cpu": (_FP32,)}
_HOST_DTYPES = {"cuda": (_BF16,), "cpu": (_FP32,)}
_CPU_DTYPES = {"cuda": (_FP32, _BF16, _FP16), "cpu": (_FP32, _BF16, _FP16)}
_FP32_AND_BF16 = {"cuda": (_FP32, _BF16), "cpu": (_FP32, _BF16)}
_FP32_ONLY = {"cuda": (_FP32,), "cpu": (_FP32,)}


def _fixed(*sizes: tuple[int, ...]) -> Shapes:
    return always([plain(*s) for s in sizes])


def _norms(name: str, title: str, about: str, shapes: Shapes, kind: Kind = "kernels") -> Suite:
    """A suite of bare norms."""
    host = kind == "host"
    dtypes, quick_dtypes = (_HOST_DTYPES, _HOST_DTYPES) if host else (_DTYPES, _QUICK_DTYPES)
    return Suite(name, title, kind, (Norms(shapes),), dtypes, quick_dtypes, quick_verbs=NORMS[:1], about=about)


def _cpu() -> Suite:
    """Bare norms at sizes that CPUs meet, beside the portable build of our CPU kernels."""
    return Suite(
        "cpu",
        "Norms on the CPU",
        "kernels",
        (Norms(_fixed(*_CPU)),),
        _CPU_DTYPES,
        _FP32_ONLY,
        quick_verbs=NORMS[:1],
        quick_parts=(Norms(_fixed(*_CPU_QUICK)),),
        peers=("torch.compile", "portable"),
        quick_peers=("portable",),
        single_thread=True,
        settles_memory=True,
        about="norms of nine shapes with one thread and with all, beside a build without vector instructions",
    )


def _sweep_suite() -> Suite:
    """Bandwidth over row length, for all our backends with kernels for a device."""
    return Suite(
        "sweep",
        "Sweep of row lengths",
        "kernels",
        (Norms(_sweep(_SWEEP)),),
        _FP32_AND_BF16,
        _QUICK_DTYPES,
        quick_verbs=NORMS[:1],
        quick_parts=(Norms(_sweep(_SWEEP_QUICK)),),
        directions=("forward", "backward"),
        peers=("torch.compile",),
        backends=ALL_BACKENDS,
        plots=("speedup", "bandwidth"),
        settles_memory=True,
        about="bandwidth of norms over row lengths from 256 to 32768, by every backend of ours",
    )


def _fused_ops() -> Suite:
    plain, scores = tuple(operations.OPERATIONS), tuple(operations.SCORES)
    batches = Operations(scores, _scores, batch=(operations.SCORES_BATCH,))
    parts = Operations(plain, _fixed((2048, 2048), (8192, 8192))), batches
    return Suite(
        "fused-ops",
        "Fused operations",
        "kernels",
        parts,
        _FP32_AND_BF16,
        _QUICK_DTYPES,
        quick_parts=(Operations(plain, _fixed((2048, 2048))), batches),
        directions=("forward", "backward"),
        peers=("torch.compile",),
        about="every verb with its variants at 2048x2048 and 8192x8192, against chains of PyTorch's calls",
    )


def _memory() -> Suite:
    plain, scores = tuple(operations.OPERATIONS), tuple(operations.SCORES)
    parts = (
        Norms(_fixed(*_MEMORY)),
        Operations(plain, _fixed((4096, 4096))),
        Operations(scores, _fixed((operations.SCORES_BATCH, 1024, 1024)), batch=(operations.SCORES_BATCH,)),
        Operations((BLOCK, BLOCK_WITH_DROPOUT), _blocks, grouped=False),
    )
    about = "bytes saved for backward and peak of a training step, of every verb and of a transformer block"
    return Suite(
        "memory", "Memory in training", "memory", parts, _DTYPES, _QUICK_DTYPES, plots=("memory",), about=about
    )


def _samples(sizes: Sequence[tuple[int, int]]) -> Shapes:
    return _fixed(*((stages.BATCH, *s) for s in sizes))


_STAGES = Suite(
    "stages",
    "Norms with a gate, and modulated",
    "kernels",
    (
        Operations(stages.GATED, _fixed(*stages.GATED_SIZES)),
        Operations(stages.MODULATED, _samples(stages.SIZES), batch=(stages.BATCH,)),
    ),
    _DTYPES,
    _QUICK_DTYPES,
    directions=("forward", "backward"),
    peers=("torch.compile", "liger", "fla"),
    quick_parts=(
        Operations(stages.GATED, _fixed(*stages.QUICK_SIZES)),
        Operations(stages.MODULATED, _samples(stages.QUICK_SIZES)),
    ),
    about="norms with a gate, or a scale and a shift for each sample, at the sizes of diffusion transformers",
)


def _tokens(tokens: int, columns: int) -> Shapes:  # fewer of them on a CPU
    return lambda device, dtype: [plain(tokens if device == "cuda" else tokens // 32, columns)]


_ROPE = Suite(
    "rope",
    "Rotary embedding",
    "kernels",
    tuple(Operations(of, _tokens(*s)) for s, of in rotary.OPERATIONS.items()),
    _DTYPES,
    _QUICK_DTYPES,
    directions=("forward", "backward"),
    peers=("torch.compile", "liger", "quack", "fla", "flashinfer"),
    backends=ALL_BACKENDS,
    about="the rotary embedding, alone and after the norm of each head",
)

_RELU_LAYER_NORM = Suite(
    "relu-layernorm",
    "ReLU and LayerNorm",
    "kernels",
    (Operations((operations.RELU_LAYER_NORM,), _fixed((4096, 1024))),),
    _FP32_ONLY,
    _FP32_ONLY,
    directions=("forward",),
    peers=("cupy",),
    plots=("time",),
    about="LayerNorm of ReLU in one kernel against PyTorch's and CuPy's unfused calls",
)

_QUANTISED = Suite(
    "quantised",
    "Quantised results",
    "kernels",
    (Operations(quantised.NORMS, _fixed((16384, 4096))), Operations(quantised.GATES, _fixed((16384, 14336)))),
    *({"cuda": (_BF16,), "cpu": (_BF16,)},) * 2,
    quick_parts=(Operations((*quantised.NORMS, *quantised.GATES), _fixed((2048, 4096))),),
    directions=("forward",),
    peers=("torch.compile", "flashinfer"),
    about="norms and gates whose results are float8, by every kind of scale, against chains of PyTorch's calls",
)

_STEPS = Suite(
    "steps",
    "Training steps",
    "steps",
    (Steps(),),
    {"cuda": (_BF16,), "cpu": (_FP32,)},
    _FP32_ONLY,
    quick_parts=(Steps(small=True),),
    peers=("torch.compile", "liger"),
    about="forward, backward and AdamW of whole models: PyTorch, ours, torch.compile and Liger-Kernel",
)

SUITES = {
    suite.name: suite
    for suite in (
        _norms(
            "models",
            "Eleven transformer models",
            "norms at the sizes of eleven models, BERT-Base to GPT-3 175B",
            always([Shape(name, sizes) for name, sizes in _MODELS.items()]),
        ),
        _norms("large", "Large inputs", "norms of tensors that fill a GPU, rows of 256 to 131072", _fixed(*_LARGE)),
        _norms("odd", "Odd row lengths and strides", "norms whose rows no vector divides or aligns with", _odd),
        _norms(
            "few-rows", "Few rows, and many short ones", "norms of 4 to 512 rows, and of a million", _fixed(*_FEW_ROWS)
        ),
        _sweep_suite(),
        _norms("host", "Host time per call", "what a call costs before the device has done anything", _host, "host"),
        _cpu(),
        _fused_ops(),
        _STAGES,
        _ROPE,
        _RELU_LAYER_NORM,
        _QUANTISED,
        _memory(),
        _STEPS,
    )
}
# The verbs of all suites.
VERBS = tuple(dict.fromkeys(verb for suite in SUITES.values() for verb in suite.verbs))
