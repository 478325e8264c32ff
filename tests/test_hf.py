"""Hugging Face `kernels`: our layers in models of transformers, with the real packages and no download."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from support import CPU, python
from test_modules import randomize
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2CLS
from transformers.integrations import hub_kernels
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated
from transformers.utils import import_utils

import kernel_fusion as kf

# `kernels` warns about layers that are in no mapping.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*No kernel mapping found for layer:UserWarning")

_CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_NORMS = [LlamaRMSNorm, GptOssRMSNorm, Olmo3RMSNorm, Qwen3_5RMSNorm]
_GATED = [Qwen3_5RMSNormGated, KimiLinearRMSNormGated]
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu"}


@pytest.fixture(autouse=True)
def own_mapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test's registrations end with it. Where transformers takes other versions of `kernels`, only that is tested."""
    if (
        not import_utils.is_kernels_available()
        and request.function is not test_a_version_that_would_do_nothing_is_an_error
    ):
        pytest.skip("the installed transformers does not take the installed version of kernels")
    monkeypatch.setattr(hub_kernels, "_KERNEL_MAPPING_CACHE", None, raising=False)
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        yield


def llama() -> LlamaForCausalLM:
    """A tiny model in bfloat16 whose norms have weights."""
    model = LlamaForCausalLM(LlamaConfig(**_CONFIG, num_key_value_heads=2, vocab_size=128)).bfloat16()
    randomize(nn.ModuleList(m for m in model.modules() if isinstance(m, LlamaRMSNorm)))
    return model.eval()


def tokens() -> Tensor:
    """Two rows of tokens."""
    return torch.randint(0, 128, (2, 16))


def mismatches(ours: Tensor, theirs: Tensor) -> float:
    """The share of elements that differ."""
    assert ours.dtype == theirs.dtype
    assert ours.isfinite().all()
    return float((ours != theirs).double().mean())


def test_from_pretrained_with_kernels(tmp_path: Path) -> None:
    """After `register`, a saved model that is loaded with `use_kernels=True` runs our kernels and computes the same."""
    llama().save_pretrained(tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kf.hf.register()
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, use_kernels=True)
    ids = tokens()
    with CPU.ran(forward=7):  # five norms, two activations
        logits = model(ids).logits
    torch.testing.assert_close(logits, plain(ids).logits)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_the_defaults_of_transformers_do_not_come_back() -> None:
    """The registrations that `use_kernels=True` repeats leave our layers on all their devices."""
    kf.hf.register()
    hub_kernels.register_kernel_mapping_transformers()
    defaults = hub_kernels.get_kernel_mapping_transformers()
    for device in ("cpu", "cuda", "rocm", "xpu"):
        assert defaults["RMSNorm"][device] == kf.hf.Layer("RMSNorm")
    assert set(defaults["RMSNorm"]) > {"cpu", "cuda", "rocm", "xpu"}  # the others stay


def test_kernelize_names_what_it_served() -> None:
    """A model that is there gets our layers, trains to the same loss, and the names are returned."""
    plain, model = llama().train(), llama().train()
    model.load_state_dict(plain.state_dict())
    served = kf.hf.kernelize(model)
    assert {"model.norm", "model.layers.1.input_layernorm", "model.layers.0.mlp.act_fn"} <= set(served)
    ids = tokens()
    losses = [m(ids, labels=ids).loss for m in (model, plain)]
    with CPU.ran(forward=0, backward=None):
        losses[0].backward()
    losses[1].backward()
    torch.testing.assert_close(*losses)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.05 * theirs.grad.abs().max().item())


@pytest.mark.parametrize("training", [False, True])
def test_a_kernelized_model_compiles(training: bool) -> None:
    """With our layers a model is one graph, in the modes of `kernels` for compilation."""
    mode = (kernels.Mode.TRAINING if training else kernels.Mode.INFERENCE) | kernels.Mode.TORCH_COMPILE
    model = llama().train(training)
    kf.hf.kernelize(model, mode=mode)
    ids = tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [*_NORMS, *_GATED])
def test_each_rounding_is_the_class_s(kind: Any, weight_dtype: torch.dtype) -> None:
    """Classes of one name that round differently keep their results: at most one element in a hundred differs."""
    layer = kind(256).to(weight_dtype)
    randomize(layer)
    rows = torch.randn(2, 32, 256, dtype=torch.bfloat16)[: 1 + (kind in _GATED)]
    theirs = layer(*rows)
    kf.hf.kernelize(nn.ModuleList([layer]), device="cpu")
    with CPU.ran():
        ours = layer(*rows)
    assert mismatches(ours, theirs) < 0.01


@pytest.mark.parametrize("name", [*_ACTIVATIONS, "silu", "gelu_pytorch_tanh"])
def test_activations(name: str) -> None:
    """Activation modules of transformers run our kernel."""
    entry = ACT2CLS[name]
    layer = entry[0](**entry[1]) if isinstance(entry, tuple) else entry()
    x = torch.randn(64, 64)
    theirs = layer(x)
    kf.hf.kernelize(nn.ModuleList([layer]), device="cpu")
    with CPU.ran():
        ours = layer(x)
    torch.testing.assert_close(ours, theirs)


def test_a_version_that_would_do_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If transformers does not accept the installed `kernels`, and so opens no layer, an error says so."""
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    for call in (kf.hf.register, lambda: kf.hf.kernelize(llama())):
        with pytest.raises(
            ImportError, match=r"would leave every layer as it is .* it takes 0\.\d+\.\d+ <= version < "
        ):
            call()


def test_a_model_without_a_layer_is_an_error() -> None:
    """A model of which nothing was served is no success."""
    with pytest.raises(RuntimeError, match="no layer of this Sequential took one of ours"):
        kf.hf.kernelize(nn.Sequential(nn.Linear(8, 8)), device="cpu")


def test_another_norm_under_the_name_is_an_error() -> None:
    """A class that is open under a name of ours, and computes something else, is refused by its name."""

    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    layer = Doubled(8)
    kf.hf.kernelize(nn.ModuleList([layer]), device="cpu")
    with pytest.raises(RuntimeError, match="Doubled computes another norm than the layer that is to serve it"):
        layer(torch.randn(2, 8))


def test_the_folder_is_a_local_repository(tmp_path: Path) -> None:
    """`kernels` loads the folder, and its layers serve a model, forward and backward, by the definition on a CPU."""
    folder = kf.hf.write_folder(tmp_path / "kernel", backends=("cpu", "cuda"))
    model, plain = llama(), llama()
    model.load_state_dict(plain.state_dict())
    repository = kernels.LocalLayerRepository(folder, layer_name="RMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": repository}}):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")
    ids = tokens()
    with pytest.warns(UserWarning, match="this build has the Triton kernels alone"):
        loss = model(ids, labels=ids).loss
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"
    assert model.model.norm.forward.__func__.__module__.startswith("_kernel_fusion_cpu_")
    torch.testing.assert_close(loss, plain(ids, labels=ids).loss)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_folder_keeps_the_rules(tmp_path: Path) -> None:
    """Python alone, an own name for package and operators in each build, metadata, a card; never into an old folder."""
    folder = kf.hf.write_folder(tmp_path / "kernel")
    builds = sorted(path.name for path in (folder / "build").iterdir())
    assert builds == ["torch-cuda", "torch-rocm", "torch-xpu"]
    for build in builds:
        files = [path for path in (folder / "build" / build).rglob("*") if path.is_file()]
        assert {path.suffix for path in files} == {".py", ".json"}
        assert not [path for path in files if re.search(r"\bkernel_fusion\b", path.read_text())]
        metadata = json.loads((folder / "build" / build / "metadata.json").read_text())
        assert metadata["backend"]["type"] == build.removeprefix("torch-")
        assert metadata["id"].startswith(f"_kernel_fusion_{metadata['backend']['type']}_")
    assert "tags:\n- kernels" in (folder / "README.md").read_text()
    with pytest.raises(FileExistsError, match="write to a new folder"):
        kf.hf.write_folder(folder)


def test_the_folder_runs_triton(tmp_path: Path) -> None:
    """In a process of its own the folder's Triton kernels compute its norm, beside the package itself."""
    folder = kf.hf.write_folder(tmp_path / "kernel", backends=("cpu",))
    code = """
        import sys, torch, kernels, kernel_fusion as kf
        from pathlib import Path
        layers = kernels.get_local_kernel(Path(sys.argv[1])).layers
        x, w = torch.randn(4, 64), torch.randn(64)
        ours = layers.rms_norm(x, 64, w, 1e-6, backend="triton")
        launches = [m for name, m in sys.modules.items() if name.endswith("backends.triton.launch")]
        print(len(launches), sum(launches[0].launches.values()), torch.allclose(ours, kf.rms_norm(x, 64, w, 1e-6)))
    """
    assert python(code, folder, env={"TRITON_INTERPRET": "1"}).stdout.split() == ["1", "1", "True"]
