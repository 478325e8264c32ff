"""A small run of every kernel, to be watched by NVIDIA's compute-sanitizer; also a check by the oracle.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py [FAMILY ...] [--part 1/4]

(and racecheck, initcheck); families are the keys of `FAMILIES`, all of them by default, and a part is every fourth of
their cases, for four runs beside each other. For racecheck add `--every-lane-arrives`: else it reports as races what
native/kernels/row_stream.cuh orders by a `__syncwarp` and the arrival of a warp's first lane. A case is inference,
forward and backward of a verb. Cases are chosen by the kernels they compile: each template of native/kernels, under
each kind of plan (a row to some lanes, a warp, a block, a cluster, a loop; sums of columns at once or in slabs) and
each kind of access (whole vectors, pieces of them, single elements; strides), once in one dtype. Other dtypes follow
at the shapes whose plan depends on them. For norms with stages test_sanitize.py asks the planner whether that is so.
Rows are few, because a sanitised kernel is hundreds of times slower, but more than one block of them.
`attention_scores` has no case: its product is a library's, and its softmax is the family's.

PyTorch's own kernels run under the sanitizer too, so the reference and the yardstick are computed on the CPU. Fresh
memory holds NaN, which shows in a result that depends on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from support import CUDA, Target
from torch import Tensor

from kernel_fusion.backends.cuda import compile as compiler
from kernel_fusion.operators import loader
from kernel_fusion.testing import oracle
from kernel_fusion.testing.cases import cases
from kernel_fusion.testing.group_norms import GroupNormCase
from kernel_fusion.testing.oracle import (
    Case,
    CrossEntropyCase,
    GatedNormCase,
    ModulatedNormCase,
    PointwiseCase,
    ReduceCase,
    RotaryCase,
    RowNormCase,
    SoftmaxCase,
    StagedNormCase,
    TokenLogprobCase,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_Options = dict[str, Any]


def _rows(cols: int) -> tuple[int, int]:
    """The shape of rows with this many columns: few, yet more than a block takes."""
    return (33 if cols <= 1023 else 5 if cols <= 12289 else 2), cols


def row_norms() -> Iterator[Case]:
    """Full tiles and rings of slots; family x dtype x row length, and the layouts that change how a row is loaded."""
    for shape in ((4500, 1023), (3000, 4096), (1000, 10007), (600, 32768), (300, 50257), (300, 65536)):
        yield RowNormCase("layer_norm", shape, BF16, weight=BF16, bias=BF16)
    for verb, shape, dtype in (
        ("layer_norm", (300, 49152), F32), ("layer_norm", (300, 65536), BF16), ("rms_norm", (300, 65536), BF16)
    ):  # fmt: skip
        yield RowNormCase(verb, shape, dtype, weight=F32, bias=F32)
    for verb, cols in product(
        ("layer_norm", "rms_norm"), (64, 255, 1023, 4096, 4099, 10240, 12288, 24576, 32768, 50257, 131072)
    ):
        for dtype, weight in ((F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32), (BF16, None)):
            yield RowNormCase(verb, _rows(cols), dtype, weight=weight, bias=weight)
        for layout in ("padded", "unaligned"):
            yield RowNormCase(verb, _rows(cols), BF16, weight=BF16, layout=layout)


# For each set of stages and each dtype, row lengths that give every kind of plan, on sm_80, sm_90 and sm_120, at least
# once: a greedy cover of the plans that the planner answers with, which a test asks for again.
_BOTH: _Options = {"pre_activation": "silu", "activation": "gelu_tanh"}
STAGES: tuple[tuple[str, _Options, dict[torch.dtype, tuple[int, ...]]], ...] = (
    (
        "add_layer_norm",
        {**_BOTH, "dropout_p": 0.1},
        {
            BF16: (64, 255, 256, 1023, 4096, 12289, 32768),
            F16: (255, 4096),
            F32: (256, 1000, 1023, 4096, 50257),
            F64: (64, 255, 256, 4096, 12288, 12289, 131072),
        },
    ),
    ("add_layer_norm", {"residual": F32, "dropout_p": 0.25}, {BF16: (1000, 1023, 8192, 32768)}),
    ("add_rms_norm", {}, {BF16: (64, 8192), F16: (12288,)}),
    (
        "rms_norm",
        {**_BOTH, "weight_offset": 1.0},
        {BF16: (1023, 50257), F32: (1000, 1023, 8192, 12289), F64: (4096, 8192, 12289)},
    ),
    ("layer_norm", {"activation": "relu"}, {BF16: (1000, 32768), F32: (256, 4096)}),
    ("layer_norm", {"pre_activation": "relu"}, {BF16: (255, 4096)}),
    ("add_layer_norm", {"activation": "silu", "rounding": "hf"}, {BF16: (255, 4096, 40000), F16: (1023,)}),
)


def staged_norms() -> Iterator[StagedNormCase]:
    """All stages at once, where most plans differ, and each alone; a residual in its own dtype; rows of any layout."""

    def case(verb: str, cols: int, dtype: torch.dtype, **options: Any) -> StagedNormCase:
        residual = {"residual": dtype} if verb.startswith("add_") else {}
        return StagedNormCase(verb, _rows(cols), dtype, weight=dtype, bias=dtype, **{**residual, **options})

    for verb, options, lengths in STAGES:
        for dtype, cols in ((dtype, cols) for dtype, several in lengths.items() for cols in several):
            yield case(verb, cols, dtype, **options)
    for layout in ("padded", "unaligned"):
        yield case("add_rms_norm", 1000, BF16, dropout_p=0.1, layout=layout, **_BOTH)


def modulated_norms() -> Iterator[Case]:
    """Numbers per sample, per token and by position, of rows that are whole vectors and of others."""
    for cols, varies in product((64, 255, 4099), ((3, 1), (3, 7), (7,))):
        options: dict[str, Any] = {"scale": BF16, "shift": BF16, "varies": varies}
        yield ModulatedNormCase("modulated_layer_norm", (3, 7, cols), BF16, **options)
        yield ModulatedNormCase("add_modulated_rms_norm", (3, 7, cols), BF16, residual=BF16, gate=BF16, **options)


def gated_norms() -> Iterator[Case]:
    """A strided gate, after the norm and before it, and groups; rows in a warp, a block, slots and a cluster."""
    for cols in (64, 255, 4096, 32768):
        bf16: _Options = {"dtype": BF16, "gate": BF16}
        yield GatedNormCase("gated_rms_norm", _rows(cols), weight=BF16, **bf16)
        yield GatedNormCase("gated_rms_norm", _rows(cols), weight=BF16, gate_first=True, **bf16)
        yield GatedNormCase("gated_rms_norm", _rows(cols), weight=F32, rounding="hf", **bf16)
        yield GatedNormCase("gated_rms_norm", (_rows(cols)[0], 3 * cols), weight=BF16, group_size=cols, **bf16)
    for dtype, gate in ((F16, F32), (F32, F32), (F64, F64)):
        yield GatedNormCase("gated_layer_norm", (33, 1000), dtype, weight=dtype, bias=dtype, gate=gate)


def pointwise() -> Iterator[Case]:
    """Each way to combine, in each dtype; then operands that are broadcast, unaligned or strided, by vector or not.

    The gradient of a row is summed over columns of many, of few and of single elements; with dropout, too. The last
    case has positions of dropout that are no neighbours.
    """
    for dtype in (BF16, F16, F32):
        yield PointwiseCase("add_act", (33, 127), dtype)
        yield PointwiseCase("mul_act", (33, 127), dtype, activation="tanh")
        yield PointwiseCase("act_dropout", (33, 255), dtype, activation="gelu", dropout_p=0.5)
    for dtype in (BF16, F16, F32, F64):
        yield PointwiseCase("gated_act", (33, 127), dtype, activation="silu", layout="half")
        yield PointwiseCase("bias_act", (64, 255), dtype, activation="gelu", other=(255,), dropout_p=0.25)
    for dtype in (BF16, F32):
        yield PointwiseCase("bias_act", (65, 768), dtype, activation="silu", other=(768,))
        yield PointwiseCase("bias_act", (65, 767), dtype, activation="leaky_relu", other=(767,))
        yield PointwiseCase("mul_act", (33, 765), dtype, other=(33, 1))
        yield PointwiseCase("add_act", (33, 127), dtype, layout="unaligned", other_layout="padded")
        yield PointwiseCase("add_act", (30, 100), dtype, layout="transposed", other_layout="strided")
    yield PointwiseCase("bias_act", (500, 24), BF16, other=(24,), dropout_p=0.25)
    yield PointwiseCase("mul_act", (33, 768), BF16, other=(33, 1))
    yield PointwiseCase("mul_act", (6, 1, 10, 40), BF16, other=(1, 7, 1, 40))
    yield PointwiseCase("mul_act", (6, 1, 10, 41), BF16, other=(1, 7, 1, 41))
    yield PointwiseCase("gated_act", (33, 128), BF16, activation="gelu", layout="half")
    yield PointwiseCase("add_act", (4, 6, 8, 10), BF16, layout="channels-last", other=(6, 1, 1))
    yield PointwiseCase("gated_act", (33, 127), BF16, other_dtype=F32)
    yield PointwiseCase("bias_act", (100,), BF16, other=(30, 100), other_layout="transposed", dropout_p=0.25)


def reductions() -> Iterator[Case]:
    """Rows by lanes of a warp, by a block, in several chunks; columns at once and in slabs; several steps."""
    rows: tuple[_Options, ...] = (
        {"shape": (300, 7), "dim": -1},
        {"shape": (64, 255), "dim": -1},
        {"shape": (17, 3001), "dim": -1},
        {"shape": (5, 70001), "dim": -1},
        {"shape": (64, 4099)},
    )
    columns: tuple[_Options, ...] = (
        {"shape": (64, 255), "dim": 0},
        {"shape": (640, 64), "dim": 0},
        {"shape": (16, 4096), "dim": 0},
        {"shape": (5, 33, 64), "dim": 1},
    )
    others: tuple[_Options, ...] = (
        {"shape": (16, 50, 6, 8), "dim": (0, 2)},
        {"shape": (64, 5, 6, 7), "dim": (1, 2, 3), "layout": "channels-last"},
        {"shape": (64, 100), "dim": -1, "layout": "padded"},
        {"shape": (64, 1000), "dim": -1, "layout": "unaligned"},
        {"shape": (64, 100), "dim": -1, "layout": "strided"},
    )
    for (verb, dtype), options in product((("sum_squared", BF16), ("mean_abs", F32)), rows + columns):
        yield ReduceCase(verb, dtype=dtype, **options)
    for options in others:
        yield ReduceCase("mean_abs", dtype=BF16, **options)
    yield ReduceCase("sum_squared", (64, 255), BF16, dim=-1, out_dtype=F32)
    for verb, dtype in (("mean_abs", F16), ("sum_squared", F64)):
        yield ReduceCase(verb, (64, 255), dtype, dim=-1)
        yield ReduceCase(verb, (640, 64), dtype, dim=0)
    yield ReduceCase("sum_squared", (70, 12288), BF16, dim=0)


def softmaxes() -> Iterator[Case]:
    """Rows by lanes of a warp, by a block, and looped; each kind of mask on each; masks and rows of any strides."""
    masks: tuple[_Options, ...] = (
        {},
        {"mask": "dead"},
        {"mask": "additive", "mask_dtype": F32},
        {"causal": True},
    )
    for cols, options in product((40, 4099, 50257), masks):
        yield SoftmaxCase("softmax", (2, *_rows(cols)), BF16, scale=0.5, **options)
    # Rows of most registers, and whole vectors that are looped over.
    for dtype, cols in ((BF16, 7), (BF16, 32768), (BF16, 65536), (F16, 255), (F16, 1024), (F32, 1024), (F32, 70000)):
        yield SoftmaxCase("softmax", (3, cols) if cols > 1024 else (64, cols), dtype)
    for dtype in (F32, F64):
        yield SoftmaxCase("softmax", (3, 33, 33), dtype, causal=True)
        yield SoftmaxCase("softmax", (3, 5, 4099), dtype, mask="additive", mask_shape=(5, 4099))
        yield SoftmaxCase("softmax", (2, 50257), dtype, mask="boolean")
    yield SoftmaxCase("softmax", (2, 3, 9, 40), BF16, mask="boolean", mask_shape=(2, 1, 1, 40), causal=True)
    yield SoftmaxCase("softmax", (2, 3, 9, 40), BF16, mask="additive", mask_shape=(2, 3, 9, 1))
    yield SoftmaxCase("softmax", (9, 4, 40), BF16, layout="transposed")
    yield SoftmaxCase("softmax", (4, 64, 3), F32, dim=1)
    for cols, layout in product((100, 5000), ("padded", "unaligned")):
        yield SoftmaxCase("softmax", _rows(cols), BF16, layout=layout)


def rotary() -> Iterator[Case]:
    """Both verbs, pairs of either kind, positions and weights, as `verify` has them."""
    yield from (case for case in cases(quick=True) if isinstance(case, RotaryCase) and case.dtype == BF16)


def group_norms() -> Iterator[GroupNormCase]:
    """A row in one block and rows in pieces, in both memory formats; whole vectors and single elements; all around."""
    for shape, layout in product(
        ((3, 12, 8, 8), (2, 6, 5, 7), (1, 8, 80, 128), (1, 4, 101, 211)), ("contiguous", "channels-last")
    ):
        options: dict[str, Any] = {"groups": 2, "layout": layout}
        for dtype, weight, around in ((BF16, F32, BF16), (F64, F64, F64)):
            yield GroupNormCase("group_norm", shape, dtype, weight=weight, around=around, activation="silu", **options)
        yield GroupNormCase("group_norm", shape, F32, **options)


def losses() -> Iterator[Case]:
    """Rows by lanes of a warp and by a block, with a tail of either; each option, in both directions."""
    smoothed: _Options = {"label_smoothing": 0.1, "weighted": True, "softcap": 3.0}
    for cols, dtype in product((40, 255, 4099, 50257), (BF16, F32, F64)):
        yield CrossEntropyCase("cross_entropy", _rows(cols), dtype, scale=0.5)
        yield CrossEntropyCase("cross_entropy", _rows(cols), dtype, **smoothed)
        yield TokenLogprobCase("token_logprob", _rows(cols), dtype, num_ids=3, warm=True, masked=True, softcap=3.0)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "row_norms": row_norms,
    "staged_norms": staged_norms,
    "gated_norms": gated_norms,
    "modulated_norms": modulated_norms,
    "pointwise": pointwise,
    "reductions": reductions,
    "softmaxes": softmaxes,
    "group_norms": group_norms,
    "losses": losses,
    "rotary": rotary,
}


def among_zeros(t: Tensor | None, device: str) -> Tensor | None:
    """`t` on `device`, laid out as it is, with zeros before, behind and between its rows.

    Rows are copied as the aligned units of 16 bytes that hold them, which no access can tell from the rest; `initcheck`
    would report the bytes around the tensor.
    """
    if t is None:
        return None
    memory = torch.zeros(t.untyped_storage().nbytes() // t.element_size() + 16, dtype=t.dtype, device=device)
    copy = memory.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t.detach())
    return copy.requires_grad_(t.requires_grad)


def _placed(inputs: oracle.Tensors, device: str) -> oracle.Tensors:
    return oracle.Tensors(**{name: among_zeros(t, device) for name, t in vars(inputs).items()})


def run(case: Case, target: Target) -> list[oracle.Comparison]:
    """Inference, forward and backward of `case`, judged against the CPU's reference and yardstick."""
    draws = []
    for seed in range(case.draws):
        drawn = oracle.make_inputs(case, target.device, seed)
        inputs, host = _placed(drawn, target.device), _placed(drawn, "cpu")
        with target.ran(forward=None), torch.no_grad():
            inference = case.ours(inputs, target.backend)
        with target.ran(forward=None, backward=None):
            ours = oracle.run(case, inputs, target.backend)
        assert all(torch.equal(y, ours[name]) for name, y in inference.items()), "inference and training differ"
        draws.append((ours, oracle.reference(case, host), oracle.pytorch(case, host)))
    return [
        oracle.judge(name, [(ours[name].cpu(), wide[name], theirs[name]) for ours, wide, theirs in draws])
        for name in draws[0][0]
    ]


def main(arguments: Sequence[str], target: Target = CUDA) -> int:
    """Run the cases of the families that `arguments` name; 1 if any failed."""
    parser = argparse.ArgumentParser(description="A small run of every kernel, for compute-sanitizer.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the Ith of N parts of the cases")
    parser.add_argument("--every-lane-arrives", action="store_true", help="compile kernels that racecheck can follow")
    options = parser.parse_args(arguments)
    families = options.families or [*FAMILIES]
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"unknown families: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if options.every_lane_arrives:
        cubin = compiler.cubin
        compiler.cubin = lambda source, *rest: cubin(f"#define KF_EVERY_LANE_ARRIVES\n{source}", *rest)
    loader.load()  # a wheel's library is tried with a norm when it is loaded, and that must not count as a case's
    part, parts = map(int, options.part.split("/"))
    failures = 0
    for case in [case for family in families for case in FAMILIES[family]()][part - 1 :: parts]:
        failed = [c for c in run(case, target) if not c.ok]
        failures += bool(failed)
        print(f"{case}: {failed or 'ok'}", flush=True)
    if target.device == "cuda":
        torch.cuda.synchronize()
    print(f"{failures} cases failed")
    return min(failures, 1)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # fills fresh memory
    sys.exit(main(sys.argv[1:]))
