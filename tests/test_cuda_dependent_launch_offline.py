"""No CUDA kernel touches global memory before it has waited for the kernel before it (kernels/vectors.cuh).

On a GPU a wait that is missing shows now and then, and in no single test for sure; in the code it can be read.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from support import PACKAGE

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.core.other_specs import (
    GroupNormAccess,
    GroupNormSpec,
    PointwiseAccess,
    PointwiseSpec,
    QuantizeAccess,
    QuantizeSpec,
    ReduceAccess,
    ReduceSpec,
    RotaryAccess,
    RotarySpec,
    SoftmaxAccess,
    SoftmaxBwdSpec,
    SoftmaxSpec,
    TokenLogprobSpec,
)
from kernel_fusion.core.quantize import Codes
from kernel_fusion.core.spec import Access, RowNormSpec, SumPartialsSpec

_SM90 = KNOWN_DEVICES[90]


def _norm(direction: Any, cols: int, rms: bool = False, **stages: Any) -> tuple[RowNormSpec, Access]:
    spec = RowNormSpec(direction, rms, cols, "bf16", "bf16", "bf16", None if rms else "bf16", **stages)
    return spec, planner.contiguous_access(spec)


_STAGES = {"residual": "bf16", "dropout": True, "pre_activation": "gelu", "activation": "silu"}
_CHAIN = {"combine": "add", "activation": "relu", "dropout": True, "a": "bf16", "b": "bf16"}
_GRADIENTS = PointwiseSpec(**_CHAIN, dy="bf16", da="bf16", db="bf16")
# Grid rationale. Each template of native/kernels once, and those that both a bare norm and one with stages instantiate
# with the stages too, whose operands are read and whose seed is loaded elsewhere; those of a gate in groups of columns.
_GATE = {"gate": "bf16", "gate_activation": "silu", "grouped": True}
_KERNELS: dict[str, tuple[Any, Any]] = {
    "row_norm_fwd": _norm("forward", 768),
    "row_norm_fwd, stages": _norm("forward", 768, **_STAGES),
    "row_norm_fwd_streamed": _norm("forward", 65536),
    "row_norm_fwd_streamed, stages": _norm("forward", 65536, residual="bf16", activation="silu"),
    "row_norm_fwd, gate": _norm("forward", 768, **_GATE),
    "row_norm_fwd_streamed, gate": _norm("forward", 65536, gate_first=True, **_GATE),
    "row_norm_fwd_tile": _norm("forward", 255),
    "row_norm_fwd_long": _norm("forward", 24576, rms=True),
    "row_norm_bwd": _norm("backward", 64),
    "row_norm_bwd, stages": _norm("backward", 64, dh=True, dresidual=True, **_STAGES),
    "row_norm_bwd_streamed": _norm("backward", 4096),
    "row_norm_bwd_streamed, stages": _norm("backward", 4096, dh=True, dresidual=True, **_STAGES),
    "row_norm_bwd, gate": _norm("backward", 64, dresidual=True, gate_first=True, **_GATE),
    "row_norm_bwd_streamed, gate": _norm("backward", 4096, dresidual=True, **_GATE),
    "row_norm_bwd_weight, gate": _norm("backward_weight", 131072, **_GATE),
    "row_norm_bwd_weight": _norm("backward_weight", 131072),
    "sum_partials": (SumPartialsSpec(768, "f32", "bf16", "bf16"), Access()),
    "pointwise": (PointwiseSpec(**_CHAIN, y="bf16"), PointwiseAccess(1, 8)),
    "pointwise_bwd": (_GRADIENTS, PointwiseAccess(1, 8)),
    "pointwise_bwd_columns": (_GRADIENTS, PointwiseAccess(1, 8, lanes=32)),
    "group_norm": (GroupNormSpec("row", "bf16", "bf16", "bf16", add="bf16"), GroupNormAccess(8)),
    "group_norm, moments": (GroupNormSpec("moments", "bf16", channels_last=True), GroupNormAccess(8)),
    "group_norm_bwd": (GroupNormSpec("dx", "bf16", "bf16", activation="silu"), GroupNormAccess(8)),
    "reduce_rows": (ReduceSpec("square", "bf16", "f32", "f32"), ReduceAccess(capacity=128)),
    "reduce_columns": (ReduceSpec("square", "bf16", "f32", "f32"), ReduceAccess(8, lanes=16, threads=256)),
    "row_norm_fwd, codes": _norm("inference", 4096, rms=True, codes=Codes("float8_e4m3fn", "given")),
    "quantize": (QuantizeSpec(768, "bf16", "bf16", "silu", Codes("int8", "given")), QuantizeAccess()),
    "rotary": (RotarySpec(x="bf16", angles="bf16", cols=64, half=32), RotaryAccess(8, 128)),
    "rotary_norm": (RotarySpec(x="bf16", angles="bf16", cols=64, half=32, norm=True), RotaryAccess(8, 128)),
    "rotary_norm_bwd": (
        RotarySpec(x="bf16", angles="bf16", cols=64, half=32, norm=True, backward=True, sums=True),
        RotaryAccess(8, 0),
    ),
    "softmax": (SoftmaxSpec("bf16", "b8", True), SoftmaxAccess(8, 128)),
    "softmax, streamed": (SoftmaxSpec("bf16", "b8", True), SoftmaxAccess(8, 16384)),
    "softmax, twice": (SoftmaxSpec("f64", "b8", True), SoftmaxAccess(2, 49152)),
    "softmax, backward": (SoftmaxBwdSpec("bf16", "bf16", "bf16"), SoftmaxAccess(8, 128)),
    "softmax, backward, streamed": (SoftmaxBwdSpec("bf16", "bf16", "bf16"), SoftmaxAccess(8, 16384)),
    "token_logprob": (TokenLogprobSpec("bf16", masked=True, scaled=True, extra="entropy"), SoftmaxAccess(8, 16384)),
    "token_logprob, backward": (TokenLogprobSpec("bf16", True, weighted=True, extra="sum"), SoftmaxAccess(8, 16384)),
}


def _ptx(source: str) -> str:
    """NVRTC's PTX of a source."""
    from cuda.bindings import nvrtc

    def call(function: Any, *args: Any) -> Any:
        error, *result = function(*args)
        assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
        return result[0] if result else None

    options = [b"-std=c++20", b"-arch=compute_90", f"-I{PACKAGE / 'native'}".encode()]
    program = call(nvrtc.nvrtcCreateProgram, source.encode(), b"kernel.cu", 0, [], [])
    call(nvrtc.nvrtcCompileProgram, program, len(options), options)
    text = b" " * call(nvrtc.nvrtcGetPTXSize, program)
    call(nvrtc.nvrtcGetPTX, program, text)
    call(nvrtc.nvrtcDestroyProgram, program)
    return text.decode()


@pytest.mark.parametrize("name", _KERNELS)
def test_no_access_before_the_wait(name: str) -> None:
    """Code before `griddepcontrol.wait` reads only arguments and shared memory."""
    spec, access = _KERNELS[name]
    source = planner.source_of(spec, access, planner.plan_for(spec, access, _SM90))
    assert source.header == name.partition(",")[0]
    before, wait, after = _ptx(source.text()).partition("griddepcontrol.wait;")
    assert wait, "the kernel does not wait"
    accesses = [
        [
            word
            for word in re.findall(r"\b(?:ld|st|atom|red|cp)\.[\w.:]+", text)
            if not re.search(r"\.(param|shared)\b", word)
        ]
        for text in (before, after)
    ]
    assert accesses[0] == []
    assert accesses[1], "no access is recognised"


def test_every_kernel_is_looked_at() -> None:
    """A template that the planner can name is in the list above, with each kind of arguments that it takes."""
    headers = (PACKAGE / "native" / "kernels").glob("*.cuh")
    templates = {
        (path.stem, args)
        for path in headers
        for args in re.findall(rf" void {path.stem}\(const (\w+Args)&", path.read_text())
    }
    sources = (planner.source_of(spec, at, planner.plan_for(spec, at, _SM90)) for spec, at in _KERNELS.values())
    assert {(source.header, source.args) for source in sources} == templates
