"""Whole models before and after patching: do they compute the same, and does everything users do with them work?

A patched model is judged as a kernel is. Against a float64 run, the error of its logits, its loss and every gradient is
at most twice the sum of the unpatched model's and one rounding. Errors are 2-norms of whole tensors. The rounding is
that of the tensor's elements, or of an average gradient if that is larger.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from model_classes import Architecture
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import kernel_fusion as kf
from kernel_fusion.cli import machine
from kernel_fusion.cli.model_calls import default_dtype
from kernel_fusion_bench import results
from kernel_fusion_bench.tables import rows_of
from kernel_fusion_bench.timing import num_threads

DRAWS = 16  # one draw says little about a scalar's error
_COUNTS = ("norms", "gates", "additions", "others")
_CHECKS = ("fp32", "bf16", "save and load", "generate", "checkpointing", "compile")


class NotApplicable(Exception):
    """The unpatched model already fails the check."""


class InFloat64(TorchFunctionMode):
    """Makes code that asks for fp32 compute in fp64, so that the float64 run is float64 throughout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with float64 for float32."""
        if getattr(func, "__name__", "") == "float" and isinstance(args[0], Tensor):
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


Results = dict[str, Tensor]


@dataclass
class Outcome:
    """How one model was patched, and for each check None or the reason why it failed."""

    library: str
    task: str
    name: str
    replaced: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    checks: dict[str, str | None] = field(default_factory=dict)
    not_made: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether every check passed."""
        return not any(self.checks.values())


def run(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype) -> Results:
    """Logits, loss, and the gradients of all parameters that affect the loss."""
    given = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)
    model.zero_grad(set_to_none=True)
    # In float64, Python's numbers may be too large for float32.
    with default_dtype(dtype) if dtype == torch.float64 else nullcontext():
        logits = _logits(model(**given))
    random = torch.Generator().manual_seed(5)
    weights = torch.randn(logits.shape, generator=random).to(logits.dtype)
    loss = (logits.float() if dtype != torch.float64 else logits).mul(weights).sum() / logits.shape[0]
    loss.backward()
    gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


def _logits(output: Any) -> Tensor:
    """The result that the model's task is about."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "cls_logits", "last_hidden_state", "sample"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    raise ValueError(f"{type(output).__name__} has no logits")


def over_budget(draws: list[tuple[Results, Results, Results]]) -> list[str]:
    """Names of results over budget, judged over all draws of (exact, unpatched, patched)."""
    bad = []
    elements = sum(t.numel() for t in draws[0][0].values()) * len(draws)
    average = (sum(float(t.double().square().sum()) for exact, _, _ in draws for t in exact.values()) / elements) ** 0.5
    for name in draws[0][0]:
        theirs, ours, size, unit = 0.0, 0.0, 0.0, 0.0
        for exact, unpatched, patched in draws:
            if patched[name].dtype != unpatched[name].dtype or not patched[name].isfinite().all():
                return [f"{name} has another dtype or is not finite"]
            true = exact[name].double()
            theirs += float((unpatched[name].double() - true).square().sum())
            ours += float((patched[name].double() - true).square().sum())
            size += max(float(true.square().sum()), average**2 * true.numel())
            unit = torch.finfo(patched[name].dtype).eps / 2
        if not ours**0.5 <= 2 * (theirs**0.5 + unit * size**0.5):
            bad.append(f"{name} {ours**0.5 / (theirs**0.5 + unit * size**0.5):.1f}")
    return bad


def compare(architecture: Architecture, model: nn.Module, dtype: torch.dtype) -> str | None:
    """Why a patched copy disagrees with the model in a dtype, or None."""
    model = copy.deepcopy(model).to(dtype)
    patched, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    for module in exact.modules():  # the grouped product of experts takes no fp64
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    kf.patch(patched)
    draws: list[tuple[Results, Results, Results]] = []
    bad: list[str] = []
    for seed in range(DRAWS):
        inputs = architecture.inputs(model, seed)
        with _original():
            theirs = run(model, inputs, dtype)
        draws.append((_exact(exact, inputs), theirs, run(patched, inputs, dtype)))
        if draws[-1][1].keys() != draws[-1][2].keys():
            return "other parameters have gradients"
        bad = over_budget(draws)
        if not bad:
            return None
    return f"{len(bad)} of {len(draws[0][0])} results over budget: {', '.join(bad[:3])}"


def _exact(model: nn.Module, inputs: dict[str, Any]) -> Results:
    try:
        with InFloat64():
            return run(model, inputs, torch.float64)
    except RuntimeError as error:
        raise RuntimeError(f"nothing judges it, since its own code cannot run in float64: {error}") from error


def generates(architecture: Architecture, model: Any) -> str | None:
    """Whether greedy decoding with a cache gives the same tokens."""
    inputs = architecture.inputs(model, 0)
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    patched = copy.deepcopy(model)
    kf.patch(patched)
    with _original():
        expected = model.generate(**inputs, **options)
    return None if torch.equal(patched.generate(**inputs, **options), expected) else "other tokens"


def checkpoints(architecture: Architecture, model: Any) -> str | None:
    """Whether gradient checkpointing, if it changes no bit of the unpatched model, changes none of the patched one.

    It must run the layers of the patched model as often as those of the unpatched one: without checkpoints the bits
    are the same, too.
    """
    inputs = architecture.inputs(model, 0)

    def differing(model: Any) -> list[str]:
        plain = run(model, inputs, torch.float32)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again = run(model, inputs, torch.float32)
        return [name for name in plain if not torch.equal(plain[name], again[name])]

    unpatched, patched = (copy.deepcopy(model).train() for _ in range(2))
    with _original():
        expected = _runs(unpatched)
        if differing(unpatched):
            raise NotApplicable
    kf.patch(patched)
    found = _runs(patched)
    if bad := differing(patched):
        return f"{len(bad)} results differ: {', '.join(bad[:3])}"
    other = [name for name in found if found[name] != expected[name]]
    return f"{len(other)} layers run another number of times: {', '.join(other[:3])}" if other else None


def _runs(model: nn.Module) -> Counter[str]:
    """Counts from now on how often each layer with parameters that no patch replaces, such as a linear one, runs."""
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd) or type(module).__name__ == "Conv1D":
            module.register_forward_hook(lambda *_, name=name: counts.update([name]))
    return counts


def saves(architecture: Architecture, model: Any) -> str | None:
    """Whether a patched model saves, loads as an unpatched one, and copies and pickles as a patched one."""
    inputs = architecture.inputs(model, 0)
    patched = copy.deepcopy(model)
    kf.patch(patched)
    with torch.no_grad():
        expected, ours = _logits(model(**inputs)), _logits(patched(**inputs))
        with _original():
            if not torch.equal(_loaded(model, inputs), expected):
                raise NotApplicable
        if not torch.equal(_loaded(patched, inputs), expected):
            return "what was saved computes something else"
        if _pickles(model) and not torch.equal(_logits(pickle.loads(pickle.dumps(patched))(**inputs)), ours):
            return "a pickled copy computes something else"
        kf.unpatch(patched)
        return None if torch.equal(_logits(patched(**inputs)), expected) else "unpatching changes the result"


def _pickles(model: Any) -> bool:
    try:
        pickle.dumps(model)
    except Exception:  # whatever it holds that cannot be
        return False
    return True


def _loaded(model: Any, inputs: dict[str, Any]) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _logits(type(model).from_pretrained(folder).eval()(**inputs))


def compiles(architecture: Architecture, model: Any) -> str | None:
    """Whether a patched model compiles in one graph if the unpatched one does, to the same bits."""
    inputs = architecture.inputs(model, 0)
    patched = copy.deepcopy(model)
    kf.patch(patched)

    def compiled(model: Any) -> Tensor:
        torch.compiler.reset()
        return _logits(torch.compile(model, backend="eager", fullgraph=True)(**inputs))  # type: ignore[no-untyped-call]

    with torch.no_grad():
        with _original():
            expected = compiled(model)
        return None if torch.equal(compiled(patched), expected) else "compiled, it computes another result"


@contextmanager
def _original() -> Iterator[None]:
    """Blames a failure inside on the unpatched model."""
    try:
        yield
    except Exception as error:
        raise NotApplicable from error


def examine(architecture: Architecture, compile: bool = False) -> Outcome:
    """Make a model, patch it, and check it."""
    outcome = Outcome(architecture.library, architecture.task, architecture.name)
    # One thread is faster for such small tensors.
    with num_threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            model = architecture.make()
            run(copy.deepcopy(model), architecture.inputs(model, 0), torch.float32)  # some models keep state
        except Exception as error:  # the model itself cannot be made or trained
            outcome.not_made = _line(error)
            return outcome
        patched = copy.deepcopy(model)
        report = kf.patch(patched)
        outcome.replaced = _counts(report)
        outcome.left = sorted({f"{line.kind}: {line.text}" for line in report.left})
        for name, check in _checks(architecture, model, compile).items():
            try:
                outcome.checks[name] = check()
            except NotApplicable:
                continue
            except Exception as error:  # a check may fail in any way
                outcome.checks[name] = _line(error)
    return outcome


def _counts(report: kf.Report) -> dict[str, int]:
    counts = dict.fromkeys(_COUNTS, 0)
    for text in (part for line in report.replaced for part in line.text.split("; ")):
        kind = "gates" if text.startswith("gated_act") else "additions" if "addition before" in text else "others"
        counts["norms" if text.split(",")[0].endswith("_norm") and kind == "others" else kind] += 1
    return counts


def _checks(architecture: Architecture, model: Any, compile: bool) -> dict[str, Callable[[], str | None]]:
    def of_a_copy(check: Callable[[Architecture, Any], str | None]) -> Callable[[], str | None]:
        return lambda: check(architecture, copy.deepcopy(model))

    checks = {
        "fp32": lambda: compare(architecture, model, torch.float32),
        "bf16": lambda: compare(architecture, model, torch.bfloat16),
    }
    if hasattr(model, "save_pretrained"):
        checks["save and load"] = of_a_copy(saves)
    if architecture.task in ("causal", "text to text") and getattr(model, "can_generate", lambda: False)():
        checks["generate"] = of_a_copy(generates)
    if getattr(model, "supports_gradient_checkpointing", False):
        checks["checkpointing"] = of_a_copy(checkpoints)
    if compile:
        checks["compile"] = of_a_copy(compiles)
    return checks


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:150]}"


TITLE = "# Models that were patched"


def page(outcomes: Iterable[Outcome], command: str) -> str:
    """The page on the models that were patched, how they were checked, and what failed, as Markdown."""
    found = list(outcomes)
    made = [outcome for outcome in found if outcome.not_made is None]
    agreeing = [outcome for outcome in made if outcome.agrees]
    facts = results.machine(torch.device("cpu"))
    lines = [
        TITLE,
        "",
        f"`{command}` wrote this page on {facts['cpu']} ({facts['os']}), with {_versions()}.",
        "",
        f"Small models of {len(found)} classes were tried; {len(made)} could be made and trained without a download, "
        f"and {len(agreeing)} of these ({100 * len(agreeing) / max(1, len(made)):.1f} %) passed every check when "
        "patched.",
        "",
        "Others are activations, softmaxes, modulations, rotary embeddings and what makes their angles. The page "
        "[Your model in one line](models.md#how-it-was-checked) says what the checks are. Each model passed those "
        "above its table, except where it says otherwise: `no` is a check that the unpatched model fails, or has no "
        "method for.",
        "",
    ]
    if failed := [outcome for outcome in made if not outcome.agrees]:
        lines += ["## Failed", ""]
        lines += [f"- {o.name}, {name}: {reason}" for o in failed for name, reason in o.checks.items() if reason]
        lines.append("")
    for library, task in dict.fromkeys((outcome.library, outcome.task) for outcome in made):
        same = [outcome for outcome in made if (outcome.library, outcome.task) == (library, task)]
        lines += [f"## Checked: {library}, {task}", "", *_section(same), ""]
    lines += ["## Left as they are", "", *_left(made), ""]
    lines += ["## Not made", "", "These fail unpatched, with the small sizes that were tried.", ""]
    lines += [f"- {o.name}: `{o.not_made.replace('`', '')}`" for o in found if o.not_made is not None]
    lines.append("")
    return "\n".join(lines)


def _versions() -> str:
    wanted = machine.versions() | {name: machine.installed(name) for name in ("transformers", "diffusers", "timm")}
    names = ("python", "torch", "transformers", "diffusers", "timm")
    return ", ".join(f"{name} {wanted[name]}" for name in names if wanted.get(name))


def _section(outcomes: list[Outcome]) -> list[str]:
    """The checks of a task's models, and a row for each model."""
    checks = [name for name in _CHECKS if any(name in o.checks for o in outcomes)]
    rows = []
    for o in outcomes:
        counts = [str(o.replaced.get(name) or "") for name in _COUNTS]
        exceptions = [f"no {name}" for name in checks if name not in o.checks]
        exceptions += [f"fails {name}" for name, reason in o.checks.items() if reason]
        rows.append((o.name, *counts, ", ".join(exceptions)))
    columns = ("model", *_COUNTS, "except")
    return [", ".join(checks), "", *rows_of(columns, rows, ("model", "except"))]


def _left(outcomes: list[Outcome]) -> list[str]:
    """Each reason, with the classes of modules that were not patched because of it."""
    by_reason: dict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        for line in outcome.left:
            kind, _, reason = line.partition(": ")
            by_reason[reason].add(kind)
    return [f"- {reason}: {', '.join(sorted(kinds))}" for reason, kinds in sorted(by_reason.items())]
