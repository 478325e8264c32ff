"""`kf.explain`: for every verb the backend that a call takes, why not another, and nothing computed."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from support import EAGER, Target
from test_interop import CALLS

import kernel_fusion as kf
from kernel_fusion.backends.cuda import explain as cuda_explain
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.core import checks
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.functional.modulated_norm import as_norm

# The module, not the function of the same name that the package exports.
explain = importlib.import_module("kernel_fusion.functional.explain")
VERBS = [name for name in kf.functional.__all__ if name != "NormOutput"]


def arguments(verb: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that a kernel serves."""
    x, y = torch.randn(2, 4, 8, device=device)
    if verb in ("layer_norm", "rms_norm"):
        return (x, 8), {"weight": torch.ones(8, device=device)}
    if verb.startswith("gated_") and verb.endswith("norm"):
        return (x, y, (8,)), {"group_size": 4}
    if verb.startswith("add_modulated_"):
        return (x, y, (8,), y[:, :1]), {"gate": y}
    if verb.startswith("modulated_"):
        return (x, (8,), y[:, :1]), {"weight": y[0, 0]}
    if verb == "group_norm":
        return (x, 2), {"weight": y[0]}
    if verb.endswith("norm"):
        return (x, y, (8,)), {"dropout_p": 0.1}
    if verb in ("add_act", "mul_act", "bias_act", "gated_act"):
        return (x, y, "relu"), {}
    if verb == "act_dropout":
        return (x, "relu"), {}
    if verb == "softmax":
        return (x,), {"mask": torch.ones(4, 8, dtype=torch.bool, device=device)}
    if verb in ("cross_entropy", "token_logprob"):
        return (x[0], torch.zeros(4, dtype=torch.int64, device=device)), {}
    if verb == "linear_cross_entropy":
        return (x, y, torch.zeros(4, dtype=torch.int64, device=device)), {"z_loss": 0.1}
    if verb == "rope":
        return (x[:, None], y[:, :4], y[:, 4:]), {"positions": torch.zeros(4, dtype=torch.int64, device=device)}
    if verb == "qk_norm_rope":
        return (x[:, None], y[:, None], x[0], y[0], x[:, :4], y[:, :4]), {}
    if verb == "attention_scores":
        return (x, y), {"normalize": True}
    return (x,), {}


def test_what_a_notebook_shows_is_the_text() -> None:
    """A report that is a cell's last expression shows its text, not its fields."""
    linear, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    shown = [
        repr(kf.patch(torch.nn.Sequential(linear, torch.nn.LayerNorm(4)))),
        repr(kf.explain(kf.layer_norm, x, (4,))),
        repr(kf.bench.compare({"linear": linear, "again": linear}, x, quick=True)),
    ]
    starts = ("Sequential: 1 modules replaced, 0 left\n", "backend: ", "linear, forward: ")
    assert all(text.startswith(start) for text, start in zip(shown, starts, strict=True)), shown


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb(verb: str, target: Target) -> None:
    """A call with nothing unusual takes the kernels; a request for the definition takes that."""
    args, kwargs = arguments(verb, target.device)
    with target.ran(forward=0):
        explanation = kf.explain(getattr(kf, verb), *args, **kwargs)
        requested = kf.explain(getattr(kf, verb), *args, **kwargs, backend="eager")
        with kf.use_backend("eager"):
            assert kf.explain(getattr(kf, verb), *args, **kwargs) == requested
    expected = "eager" if checks.without_kernels(verb, target.backend) else target.backend
    assert explanation.backend == expected
    assert set(explanation.reasons) == {"cuda", "triton", "cpu", "eager"} - {expected}
    assert requested.backend == "eager"
    assert target.backend != expected or requested.reasons[target.backend] == "'eager' was requested"


@pytest.mark.parametrize("name", kf.ops.__all__)
def test_functions_under_fixed_names(name: str, target: Target) -> None:
    """The verb that each calls is explained, with the arguments that it passes; nothing runs."""
    x, y = torch.randn(2, 4, 8, device=target.device)
    pairs = name.startswith("elementwise") or name in ("fused_bias_gelu", "fused_attention_score")
    arguments = (x, (8,)) if "layer_norm" in name else (x, y) if pairs else (x,)
    with target.ran(forward=0):
        explanation = kf.explain(getattr(kf.ops, name), *arguments)
    assert explanation.backend == ("eager" if name == "fused_attention_score" else target.backend)


def test_modules_are_explained_with_what_they_hold(target: Target) -> None:
    """As their verb with their parameters and stages; those of others are refused."""
    x, y = torch.randn(2, 4, 8, device=target.device)
    norm = kf.FusedAddRMSNorm(8, activation="relu", device=target.device)
    verb = kf.explain(kf.add_rms_norm, x, y, (8,), norm.weight, activation="relu")
    assert kf.explain(norm, x, y) == verb
    assert kf.explain(kf.FusedSoftmax(causal=True), x) == kf.explain(kf.softmax, x, causal=True)
    long = kf.FusedLayerNorm((4, 8), dtype=torch.float64, device=target.device)
    assert kf.explain(long, x) == kf.explain(kf.layer_norm, x, (4, 8), long.weight, long.bias)
    with pytest.raises(TypeError, match=r"expected a verb of kernel_fusion, .*, got LayerNorm"):
        kf.explain(torch.nn.LayerNorm(8), x)


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_unusual_about_any_argument(verb: str) -> None:
    """Integers take the definition, and so does a call whose second tensor holds integers."""
    args, kwargs = arguments(verb, "cpu")
    for index in [i for i, value in enumerate(args) if isinstance(value, torch.Tensor) and value.is_floating_point()]:
        changed = list(args)
        changed[index] = changed[index].int()
        with EAGER.ran():
            explanation = kf.explain(getattr(kf, verb), *changed, **kwargs)
            with pytest.raises(BackendUnavailableError, match=rf"^`{verb}`: backend 'cpu' was requested, but its ker"):
                kf.explain(getattr(kf, verb), *changed, **kwargs, backend="cpu")
        assert explanation.backend == "eager"
        assert "the input is torch.int32" in explanation.reasons["cpu"]


def test_scores_are_the_vendors() -> None:
    """Without `normalize` no kernel of ours runs, whatever is requested, and the explanation says so."""
    q = torch.randn(4, 8)
    with EAGER.ran():
        for options in ({}, {"backend": "cpu"}):
            explanation = kf.explain(kf.attention_scores, q, q, **options)
            assert explanation.backend == "eager"
            assert "vendor library's" in explanation.reasons["cpu"]


def test_arrays() -> None:
    """An array is explained as the tensor that it becomes."""
    with EAGER.ran():
        assert kf.explain(kf.layer_norm, np.ones((4, 8), np.float32), 8, backend="eager").backend == "eager"
        assert kf.explain(kf.sum_squared, np.ones(3, np.int64)).backend == "eager"


@pytest.mark.parametrize(
    "function", [torch.relu, torch.nn.functional.layer_norm, kf.kernels.reduction.mean_abs, kf.explain, 3]
)
def test_what_is_no_verb(function: Any) -> None:
    """Anything but a verb is a TypeError."""
    with pytest.raises(
        TypeError, match=r"^`explain`: expected a verb of kernel_fusion, such as kf\.layer_norm, .*, got"
    ):
        kf.explain(function, torch.randn(4, 8))


def test_arguments_that_do_not_fit() -> None:
    """Missing and unknown arguments are the TypeErrors of a call."""
    with pytest.raises(TypeError, match="missing a required argument: 'activation'"):
        kf.explain(kf.add_act, torch.ones(2), torch.ones(2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'activaton'"):
        kf.explain(kf.layer_norm, torch.ones(2), 2, activaton="relu")


def test_plans_of_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the plan of a plain norm is a line per direction."""
    monkeypatch.setattr(Device, "of", lambda index: KNOWN_DEVICES[90])
    half = torch.ones(4, 1024, dtype=torch.bfloat16)
    _, call = explain._bound(kf.layer_norm, (half, 1024, half[0]), {})
    lines = cuda_explain.plan_lines("layer_norm", call)
    assert [line.partition(":")[0] for line in lines] == ["forward", "backward"]
    assert all("8-element vectors" in line for line in lines)
    wider = cuda_explain.plan_lines("layer_norm", call | {"out_dtype": torch.float32})
    assert all("4-element vectors" in line for line in wider)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert cuda_explain.plan_lines("layer_norm", call) == wider


def test_plans_of_gated_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is planned as a row of its own length, and a gate as another row that is read."""
    monkeypatch.setattr(Device, "of", lambda index: KNOWN_DEVICES[90])
    x = torch.ones(4, 1024, dtype=torch.bfloat16)
    _, whole = explain._bound(kf.gated_rms_norm, (x, x, 1024, x[0]), {})
    _, grouped = explain._bound(kf.gated_rms_norm, (x, x, 1024, x[0]), {"group_size": 64})
    lines = [cuda_explain.plan_lines("gated_rms_norm", call) for call in (whole, grouped)]
    assert [line.partition(":")[0] for line in lines[0]] == ["forward", "backward"]
    assert lines[0] != lines[1]


def test_plans_of_modulated_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A modulated norm is planned as the norm that it is: with a gate of the residual, and with groups of rows."""
    monkeypatch.setattr(Device, "of", lambda index: KNOWN_DEVICES[90])
    x = torch.ones(2, 4, 1024, dtype=torch.bfloat16)
    _, call = explain._bound(kf.add_modulated_rms_norm, (x, x.float(), 1024, x[:, :1]), {"gate": x[:, 1:2]})
    of_sum = explain._plan_lines("cuda", "add_modulated_rms_norm", call)
    found = as_norm("add_modulated_rms_norm", call)
    assert (found["gate"], found["residual_gate"].shape, found["groups"]) == (None, (2, 1, 1024), 2)
    _, norm = explain._bound(kf.modulated_rms_norm, (x.float(), 1024, x[:, :1]), {"out_dtype": torch.bfloat16})
    assert [line.partition(":")[0] for line in of_sum] == ["forward", "backward"]
    assert "of 2 groups" in " ".join(explain._plan_lines("triton", "modulated_rms_norm", norm))


def test_the_calls_of_the_interop_tests_are_all_verbs() -> None:
    """No verb is missing there, except those that take other shapes (test_rotary.py)."""
    assert {name.replace("weights", "scores") for name in CALLS} >= set(VERBS) - {"rope", "qk_norm_rope", "group_norm"}
