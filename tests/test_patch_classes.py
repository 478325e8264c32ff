"""`kf.patch` and the classes of a model: wrappers of methods, lists of one class, and code that asks for a class."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import functools
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_support import texts
from support import python
from torch import Tensor, nn

import kernel_fusion as kf


class Checkpointing(nn.Module):
    """Wraps the forward of each subclass in a checkpoint, which only the outermost wrapper makes, as transformers."""

    checkpointing = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forward = cls.forward

        @functools.wraps(forward)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(self).forward is wrapper and self.checkpointing:
                run = functools.partial(forward, self, **kwargs)
                return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
            return forward(self, *args, **kwargs)

        cls.forward = wrapper  # type: ignore[method-assign]


class Layer(Checkpointing):
    """norm(h) + h after an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(x)
        return self.norm(h) + h  # type: ignore[no-any-return]


class Extended(Layer):
    """The same, wrapped a second time, as FSDP2 extends a class."""


def runs(model: nn.Module, layer: nn.Module) -> int:
    """How often a layer runs in forward and backward."""
    count = []
    handle = layer.register_forward_hook(lambda *_: count.append(1))
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    handle.remove()
    return len(count)


def test_a_copied_wrapper_sees_itself() -> None:
    """A wrapper that works only as its class's method still checkpoints when the method is rewritten."""
    for kind in (Layer, Extended):
        model = kind()
        assert runs(model, model.mix) == 2
        assert texts(kf.patch(model))[kind.__name__] == "addition before self.norm"
        assert runs(model, model.mix) == 2
        model.checkpointing = False
        assert runs(model, model.mix) == 1


class Adapter(nn.LayerNorm):
    """LayerNorm with something after it that no form of ours has."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).sin()


class Sized(nn.Module):
    """RMSNorm of any size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: model])
def test_modules_of_one_class_keep_one_class(how: Any) -> None:
    """Wrapping by class name finds them all, though they have several plans, or none; each computes by its own."""
    model = nn.Sequential(*(Layer() for _ in range(4)), Sized(16), nn.Unflatten(-1, (2, 8)), Sized(8))
    model[1].norm, model[2].norm = Adapter(16), nn.LayerNorm(16, bias=False)
    x = torch.randn(4, 16)
    expected = model(x)
    kf.patch(model)
    twin = how(model)
    torch.testing.assert_close(twin(x), expected)
    for kind in (Layer, Sized, nn.LayerNorm):
        own = {type(m) for m in twin.modules() if isinstance(m, kind) and not isinstance(m, Adapter)}
        assert len(own) == 1
    assert runs(nn.Sequential(twin[1]), twin[1].mix) == runs(nn.Sequential(twin[2]), twin[2].mix) == 2
    kf.unpatch(twin)
    assert {type(m) for m in twin.modules()} >= {Layer, Sized, nn.LayerNorm, Adapter}
    assert not any("_kf_place" in vars(m) for m in twin.modules())


def test_caches_of_diffusers_know_a_patched_block() -> None:
    """Their registry is asked for the exact class of a block; a changed class is entered like its original."""
    helpers = pytest.importorskip("diffusers.hooks._helpers", reason="diffusers keeps its registry elsewhere")

    class Block(Layer):
        """A block of its own."""

    helpers.TransformerBlockRegistry.register(Block, helpers.TransformerBlockMetadata(return_hidden_states_index=3))
    model = nn.Sequential(Block())
    kf.patch(model)
    assert type(model[0]) is not Block
    assert helpers.TransformerBlockRegistry.get(type(model[0])).return_hidden_states_index == 3
    assert helpers.TransformerBlockRegistry.get(Block)._cls is Block


def _flux() -> Any:
    """A small transformer of diffusers."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 4, 8)}
    widths = {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    return diffusers.FluxTransformer2DModel(patch_size=1, num_layers=2, num_single_layers=2, **sizes, **widths).eval()


def _denoised(model: Any) -> Tensor:
    """The results of three steps, between which the input hardly changes."""
    found = []
    for step in range(3):
        torch.manual_seed(1)
        x, text, pooled = torch.randn(1, 16, 4) + 1e-3 * step, torch.randn(1, 8, 32), torch.randn(1, 32)
        places = {
            "img_ids": torch.randn(16, 3),
            "txt_ids": torch.randn(8, 3),
            "timestep": torch.tensor([1 - step / 100]),
        }
        with torch.no_grad(), model.cache_context("cond"):
            found.append(model(x, encoder_hidden_states=text, pooled_projections=pooled, **places).sample)
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FirstBlockCacheConfig", {"threshold": 10.0}),
        ("MagCacheConfig", {"num_inference_steps": 3, "retention_ratio": 0.3, "mag_ratios": [1.0] * 3}),
    ],
)
def test_caches_of_diffusers_serve_a_patched_model(name: str, options: Any) -> None:
    """`enable_cache` before or after the patch skips the same blocks, and can be undone in either order."""
    model = _flux()
    config = getattr(pytest.importorskip("diffusers"), name)(**options)
    whole = _denoised(model)
    model.enable_cache(config)
    cached = _denoised(model)
    assert not torch.equal(cached, whole)
    for first in (kf.patch, lambda patched: patched.enable_cache(config)):
        patched = _flux()
        first(patched)
        kf.patch(patched)
        if not patched.is_cache_enabled:
            patched.enable_cache(config)
        torch.testing.assert_close(_denoised(patched), cached)
        patched.disable_cache()
        torch.testing.assert_close(_denoised(patched), whole)
        assert kf.unpatch(patched).left == []
        assert torch.equal(_denoised(patched), whole)


def test_what_wraps_a_patched_method_is_named_and_found_again() -> None:
    """diffusers' hooks keep the bound method of a module: it stays patched, and is restored once the hook is gone."""
    model = nn.Sequential(Layer(), Layer())
    kf.patch(model)
    model[0].forward = functools.partial(lambda forward, x: forward(x) + 1, model[0].forward)  # type: ignore[method-assign]
    report = kf.unpatch(model)
    assert [(line.name, line.text) for line in report.left] == [
        ("0", "something holds its patched `forward`, such as a hook that wraps it")
    ]
    assert type(model[1]) is Layer
    assert type(model[0]) is not Layer
    del model[0].forward
    report = kf.unpatch(model)
    assert report.left == []
    assert [line.name for line in report.replaced] == ["0"]


_FLAT = """
    import torch, torch.distributed as dist, warnings
    warnings.simplefilter("ignore")
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    import kernel_fusion as kf
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for original in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
        for one in (wrapped, model, nn.Sequential(nn.LayerNorm(8), wrapped)):
            try:
                kf.patch(one)
            except RuntimeError as error:
                print("FullyShardedDataParallel" in str(error))
                print(not any("_kf_plans" in vars(type(m)) for m in one.modules()))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_model_that_fsdp1_has_wrapped_is_refused() -> None:
    """The error names the part, with both kinds of parameters, and nothing was touched."""
    assert python(_FLAT).stdout.split() == ["True"] * 12


_ASKING = """
import torch
from torch import nn

class Norm(nn.LayerNorm):
    pass

def asks(module):
    return type(module) is {kind}

class Block(nn.Module):
    kinds = (nn.Identity, Norm)

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), Norm(16)

    def forward(self, x):
        {lines}
        h = x + self.linear(x)
        return self.norm(h) + (h if {question} else 1)

TABLE = {{Block: 0, Norm: 0}}
"""
_KEPT = "asks for its exact class"


def _asking() -> dict[str, tuple[str, str, str, str]]:
    """Every question about a module and about its norm: what it asks for, lines before it, it, and what is left."""
    found = {}
    for subject, kind in ("self", "Block"), ("self.norm", "Norm"):
        for asked in f"type({subject})", f"{subject}.__class__":
            for question in (
                f"{asked} is {kind}",
                f"{kind} is not {asked}",
                f"{asked} == torch.nn.Identity or {asked} == {kind}",
                f"{asked} in [nn.Identity, {kind}]",
                f"TABLE.get({asked})",
                f"asks({subject})",
            ):
                found[question] = kind, "pass", question, "Norm" if "TABLE" in question else kind
        found[f"a name of it, {kind}"] = kind, f"own = type({subject})", f"own is {kind}", kind
    found["of the class"] = "Norm", "pass", "type(self.norm) in self.kinds", "Norm"
    found["of all"] = "Norm", "pass", "any(type(child) is Norm for child in self.children())", "Norm"
    found["for an unknown class"] = "Norm", "kind = Norm", "any(type(c) is kind for c in self.children())", "Norm"
    return found


def test_code_that_asks_for_an_exact_class_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a class that their own model's code asks for stay as they are, however it asks; others do not."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    cases = _asking()
    harmless = ("isinstance(self.norm, Norm)", "type(self).__name__ == 'Block'", "type(x) is torch.Tensor", "TABLE")
    cases |= {question: ("int", "pass", question, "") for question in harmless}
    for place, (kind, lines, question, _) in enumerate(cases.values()):
        (tmp_path / f"asking{place}.py").write_text(_ASKING.format(kind=kind, lines=lines, question=question))
    importlib.invalidate_caches()
    model = nn.ModuleList(importlib.import_module(f"asking{place}").Block() for place in range(len(cases)))
    x = torch.randn(4, 16)
    expected = [block(x) for block in model]
    report = kf.patch(model)
    for place, (name, (*_, left)) in enumerate(cases.items()):
        torch.testing.assert_close(model[place](x), expected[place], msg=name)
        own = [line for line in report.left if line.name.split(".")[0] == str(place)]
        assert " ".join(sorted(line.kind for line in own)) == left, name
        assert all(line.text.endswith(_KEPT) for line in own), name
        replaced = {line.kind for line in report.replaced if line.name.split(".")[0] == str(place)}
        assert ("Norm" in replaced) == ("Norm" not in left), name


def test_other_code_that_asks_for_an_exact_class_sees_another() -> None:
    """A patch promises `isinstance` to code outside the model, not `type(module) is Class`; the page says so."""
    model = nn.Sequential(nn.LayerNorm(16))
    kf.patch(model)
    assert isinstance(model[0], nn.LayerNorm)
    assert type(model[0]) is not nn.LayerNorm
