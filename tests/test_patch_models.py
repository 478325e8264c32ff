"""`kf.patch` on models of transformers, diffusers and timm, and under the libraries that wrap models."""

from __future__ import annotations

import contextlib
import importlib
import resource
import time
import warnings
from typing import Any

import model_checks
import pytest
import torch
import transformers
from check_models import MODELS
from model_classes import Architecture
from support import ROOT, python
from torch import nn

import kernel_fusion as kf

pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries there are many, about their own futures

# A model of each form: rounding of both kinds, an offset, gates in all positions, groups, experts, additions before
# and after the norm, packed projections, images, two libraries more. `python tests/check_models.py` has all of them.
QUICK = ["LlamaForCausalLM", "Gemma2ForCausalLM", "BertForMaskedLM"]
SLOW = [
    "T5ForConditionalGeneration",
    "GPT2LMHeadModel",
    "Phi3ForCausalLM",
    "Mamba2ForCausalLM",
    "Qwen3NextForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "CohereForCausalLM",
    "OlmoForCausalLM",
    "DeepseekV3ForCausalLM",
    "ModernBertForMaskedLM",
    "DebertaV2ForMaskedLM",
    "ViTForImageClassification",
    "Dinov2ForImageClassification",
    "BartForConditionalGeneration",
]


def made(name: str) -> Any:
    """A small model, the same at each call."""
    torch.manual_seed(0)
    return MODELS[name].make()


def inputs(name: str, model: Any) -> dict[str, Any]:
    """Inputs for it."""
    return MODELS[name].inputs(model, 0)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_model_passes_every_check(name: str) -> None:
    """Patched, it computes the same in fp32 and bf16, generates, checkpoints, compiles, saves and loads."""
    outcome = model_checks.examine(MODELS[name], compile=name in SLOW)
    assert outcome.not_made is None
    assert outcome.checks.pop("fp32") is None
    assert not any(outcome.checks.values()), outcome.checks
    assert outcome.replaced["norms"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.library == "diffusers"])
def test_a_diffusion_model_passes_every_check(name: str) -> None:
    """Patched, it computes the same in fp32 and bf16, saves and loads."""
    outcome = model_checks.examine(MODELS[name])
    assert outcome.not_made is None
    assert outcome.agrees, outcome.checks
    assert outcome.replaced["norms"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.library == "timm"])
def test_an_image_model_passes_every_check(name: str) -> None:
    """Patched, it computes the same in fp32 and bf16."""
    pytest.importorskip("timm", exc_type=ImportError)  # it needs torchvision, in a build for this PyTorch
    outcome = model_checks.examine(MODELS[name])
    assert outcome.agrees, outcome.checks
    assert outcome.replaced["norms"]


class Doubled(nn.Module):
    """A model that a patch gets wrong, for the tests of the checks: its norm is twice what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm, doubled where it has another class than it had; a float64 run has a number too large for fp32."""
        x = torch.minimum(x, torch.tensor(torch.finfo(x.dtype).max))
        return self.norm(self.linear(x)) * (2 if hasattr(self.norm, "_kf_plans") else 1)


def test_the_checks_find_a_wrong_model() -> None:
    """A patched model that computes something else fails, and the page names it."""
    broken = Architecture("tests", "none", "Doubled", Doubled, lambda model, seed: {"x": torch.randn(4, 8)})
    outcome = model_checks.examine(broken)
    assert not outcome.agrees
    assert "results over budget" in str(outcome.checks["fp32"])
    text = model_checks.page([outcome], "python tests/check_models.py")
    assert "- Doubled, fp32: 6 of 6 results over budget" in text
    assert "0 of these (0.0 %) passed" in text
    assert "| Doubled | 1 |  |  |  | fails fp32, fails bf16 |" in text


def test_a_model_that_cannot_be_made_is_named() -> None:
    """It is neither passed nor skipped."""

    def make() -> nn.Module:
        raise ValueError("no such thing")

    outcome = model_checks.examine(Architecture("tests", "none", "Nothing", make, lambda model, seed: {}))
    assert outcome.not_made == "ValueError: no such thing"
    assert "- Nothing: `ValueError: no such thing`" in model_checks.page([outcome], "python tests/check_models.py")


def test_an_8b_llama_on_meta_takes_under_two_seconds() -> None:
    """Each kind of module is examined once, whatever their number; processor time, on one core."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    kf.patch(made("LlamaForCausalLM"))  # what the first call of a process imports
    start = time.process_time()
    report = kf.patch(model)
    assert time.process_time() - start < 2
    assert len(report.replaced) == 65 + 32 + 32 + 32 + 1


def default_classes() -> list[str]:
    """A class for each configuration of transformers: one that generates text, if there is one."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = [vars(auto)[name] for name in sorted(vars(auto)) if name.endswith("_MAPPING_NAMES")]
    names = {
        name for table in tables for value in table.values() for name in ([value] if isinstance(value, str) else value)
    }
    found: dict[Any, list[tuple[bool, str]]] = {}
    for name in names:
        with contextlib.suppress(ImportError, AttributeError):  # it needs another library, or is an alias
            config = getattr(transformers, name).config_class
            found.setdefault(config, []).append((not name.endswith(("ForCausalLM", "ForConditionalGeneration")), name))
    return sorted(min(of_one)[1] for config, of_one in found.items() if config is not None)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(8))
def test_any_default_size_on_meta_takes_under_five_seconds_and_a_gigabyte(share: int) -> None:
    """Whatever a model's leaves are and however large their weights; processor time, on one core."""
    over, tried = [], 0
    for name in default_classes()[share::8]:
        try:
            with torch.device("meta"):
                model = getattr(transformers, name)(getattr(transformers, name).config_class())
        except Exception:  # the defaults of some configurations make no model
            continue
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        kf.patch(model)
        seconds, kilobytes = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        tried += 1
        if seconds > 5 or kilobytes > 1e6:
            over.append((name, seconds, kilobytes))
    assert over == []
    assert tried > 50


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "LlamaForCausalLM"])
def test_initialisation_finds_its_norms(name: str) -> None:
    """transformers initialises norms by their class and name: zeros for Gemma's, ones for Llama's, patched or not."""
    model, patched = made(name), made(name)
    kf.patch(patched)
    for one in (model, patched):
        for module in one.modules():
            if "RMSNorm" in type(module).__name__:
                one._init_weights(module)
    weights = dict(patched.named_parameters())
    for parameter, other in ((p, weights[n]) for n, p in model.named_parameters() if "norm" in n):
        assert torch.equal(parameter, other)
        assert set(parameter.unique().tolist()) == {0.0 if name.startswith("Gemma") else 1.0}


@pytest.mark.parametrize("first", ["patch", "offload"])
def test_offloaded_weights_come_back_for_each_call(first: str) -> None:
    """accelerate keeps weights elsewhere between calls: nothing reads the weight of a submodule from outside."""
    import accelerate

    model = made("LlamaForCausalLM")
    tokens = inputs("LlamaForCausalLM", model)
    with torch.no_grad():
        expected = model(**tokens).logits
        for step in (first, "patch" if first == "offload" else "offload"):
            if step == "patch":
                kf.patch(model)
            else:
                accelerate.cpu_offload(model, execution_device="cpu")
        assert model.model.norm.weight.is_meta
        torch.testing.assert_close(model(**tokens).logits, expected)


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_lora_trains_and_merges(first: str) -> None:
    """PEFT's layers are kept, before or after: gradients reach them, and merging gives the plain model."""
    import peft

    model = made("LlamaForCausalLM")
    tokens = inputs("LlamaForCausalLM", model)
    config = peft.LoraConfig(target_modules=["q_proj", "gate_proj"], r=4, init_lora_weights=False)
    other = made("LlamaForCausalLM")
    torch.manual_seed(1)
    plain = peft.get_peft_model(other, config)
    if first == "patch":
        kf.patch(model)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config)
    kf.patch(wrapped)
    results = []
    for one in (plain, wrapped):
        loss = one(**tokens, labels=tokens["input_ids"]).loss
        loss.backward()
        results.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None} | {"loss": loss})
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        expected = wrapped(**tokens).logits
        torch.testing.assert_close(wrapped.merge_and_unload()(**tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_quantised_linears_stay() -> None:
    """Linear layers that PyTorch has quantised are called as before."""
    model = made("LlamaForCausalLM")
    tokens = inputs("LlamaForCausalLM", model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        expected = model(**tokens).logits
        assert kf.patch(model).replaced
        actual = model(**tokens).logits
    # An fp32 rounding may move a value by one of 255 steps.
    assert (actual - expected).norm() <= expected.norm() / 255


_SHARDED = """
    import sys, torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    import kernel_fusion as kf
    from kernel_fusion.patching.swap import plan_of
    sys.path.insert(0, sys.argv[1])
    import model_classes
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    architecture = next(a for a in model_classes.architectures() if a.name == "LlamaForCausalLM")
    torch.manual_seed(0)
    model = architecture.make()
    tokens = architecture.inputs(model, 0)
    def gradients():
        model.zero_grad()
        model(**tokens, labels=tokens["input_ids"]).loss.backward()
        full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
        return {name: full(p.grad) for name, p in model.named_parameters()}
    expected = gradients()
    if FIRST == "patch":
        kf.patch(model)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer.input_layernorm, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if FIRST == "shard":
        assert kf.patch(model).replaced
    actual = gradients()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6)
    print("same", plan_of(model.model.layers[0].post_attention_layernorm))
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["patch", "shard"])
def test_fully_sharded(first: str) -> None:
    """FSDP2 gathers the weights of patched modules as of others, whichever came first."""
    done = python(_SHARDED.replace("FIRST", repr(first)), ROOT / "tests")
    assert done.stdout.startswith("same rms_norm, rounding='hf'")
