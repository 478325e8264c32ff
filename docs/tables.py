"""Tables of the documentation that are made of result files, or of plans. `python docs/tables.py` writes them anew.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. tests/test_documents.py finds those that differ from
their sources.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import dist
from statistics import geometric_mean
from typing import Any

import table_combinations as combinations
import table_operations as operations
import table_published as published
from table_bits import other_orders
from table_faults import planted
from table_parts import H200, RESULTS, ROOT, Cell, best_peer, cells_of, digits, over_floor, sources, table
from table_plans import PLANNED_LENGTHS, plans
from table_results import costs, first_calls, first_kernel, kept

_DTYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
_VERBS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


def _norms(file: str, dtypes: Sequence[str], providers: dict[str, str], first: str) -> Iterator[str]:
    """A table for each norm and direction: the floor in µs, and each provider's time divided by it."""
    cells = cells_of(file, "verb", "direction", "dtype", "rows", "cols")
    shapes = sorted({key[3:] for key in cells}, key=lambda shape: shape[1])
    for verb, title in _VERBS.items():
        for direction in ("forward", "backward"):
            rows = []
            for shape in shapes:
                row = [f"{shape[1]}" if first == "N" else f"{shape[0]}×{shape[1]}"]
                for dtype in dtypes:
                    key = (verb, direction, _DTYPES[dtype], *shape)
                    cell = cells[key]
                    row.append(f"{cell['floor']['median_ms'] * 1e3:.1f}")
                    row += [over_floor(cell, provider) for provider in providers]
                rows.append(row)
            head = [name for dtype in dtypes for name in (f"{dtype}: floor, µs", *providers.values())]
            yield f"{title}, {direction}:"
            yield ""
            yield from table([first, *head], rows)


_OURS = {"kf-triton": "Triton, ours", "kf-cuda": "CUDA, ours"}
_PEERS = {"liger": "Liger", "flash-attn": "flash-attn"}


def triton_sweep() -> Iterator[str]:
    """Every length, beside PyTorch and its peers."""
    providers = {"pytorch": "PyTorch", "torch.compile": "torch.compile", **_PEERS, **_OURS}
    return _norms("sweep.json", ["bf16", "fp32"], providers, "N")


def triton_large() -> Iterator[str]:
    """More rows, beside the other Triton libraries."""
    return _norms("triton/large.json", list(_DTYPES), {**_PEERS, "kf-triton": "ours"}, "rows × N")


_CPU_RUNS = {  # by file: how many threads, and what is to be said of it
    "amd-epyc-zen5-2-cores/cpu.json": (
        (1, 2),
        "by `kernel-fusion bench cpu --threads 1,2 --directions forward,backward --peers torch.compile`: AMD EPYC"
        " (family 26, model 2), 2 cores of a virtual machine, torch 2.13.0+cpu, AVX-512.",
    ),
    "intel-xeon-16-cores/cpu-quick.json": (
        (16,),
        "by `kernel-fusion bench cpu --quick --device cpu --threads 16 --dtypes fp32,bf16,fp16 --verbs"
        " layer_norm,rms_norm --directions forward,backward --peers torch.compile` with the nine shapes: Intel Xeon"
        " (family 6, model 207), 16 cores of a virtual machine, torch 2.11.0.",
    ),
}


def cpu_norms(other: str, wanted: Sequence[int]) -> Iterator[str]:
    """The time of another over ours at these numbers of threads, in every shape and dtype that was measured."""
    for file, (measured, words) in _CPU_RUNS.items():
        thread_counts = [threads for threads in measured if threads in wanted]
        if not thread_counts:
            continue
        cells = cells_of(file, "threads", "verb", "dtype", "direction", "configuration", folder=RESULTS)
        shapes = list(dict.fromkeys(key[4] for key in cells))
        for threads in thread_counts:
            rows = []
            for verb, title in _VERBS.items():
                for name, dtype in (("fp32", "f32"), ("bf16", "bf16"), ("fp16", "f16")):
                    for direction in ("forward", "backward"):
                        if (threads, verb, dtype, direction, shapes[0]) not in cells:
                            continue
                        row = [cells[threads, verb, dtype, direction, shape] for shape in shapes]
                        speedups = [cell[other]["median_ms"] / cell["kf-cpu"]["median_ms"] for cell in row]
                        figures = [f"{speedup:.2f}" for speedup in speedups]
                        rows.append([f"{title} {name}, {direction}", *figures, f"**{geometric_mean(speedups):.2f}**"])
            head = f"{threads} thread{'s' if threads > 1 else ''}"
            yield from table([head, *(shape.replace("x", "×") for shape in shapes), "geometric mean"], rows)
        yield f"[`{file}`](../benchmarks/results/{file}), {words}"
        yield ""


def headline() -> Iterator[str]:
    """LayerNorm in bf16 at six sizes: how many times as long others take, and how near ours is to a copy."""
    rows = []
    for file, name in (
        *(("models.json", model) for model in ("BERT-Base", "GPT-3 Medium", "GPT-3 175B")),
        *(("peers/large.json", shape) for shape in ("65536x1024", "32768x4096", "4096x32768")),
    ):
        cells = cells_of(file, "verb", "dtype", "configuration", "direction")
        row = []
        for direction in ("forward", "backward"):
            cell = cells["layer_norm", "bf16", name, direction]
            ours = cell["kf-cuda"]["median_ms"]
            best = best_peer(cell)
            row += [f"**{cell['pytorch']['median_ms'] / ours:.1f}×**"]
            row += [f"{cell[best]['median_ms'] / ours:.2f}× {best}" if best else "–"]
            row += [f"{100 * cell['floor']['median_ms'] / ours:.0f} %"]
        shape = f"{cell['floor']['rows']}×{cell['floor']['cols']}"
        rows.append([f"{shape} ({name})" if file == "models.json" else shape, *row])
    head = ["over best peer", "of copy speed"]
    first, *others = [f"{d}: over PyTorch" for d in ("forward", "backward")]
    yield from table(["rows × N", first, *head, *others, *head], rows)
    yield sources("models.json", "peers/large.json", root="")
    yield ""


_SHAPE_TITLES = {"large": "rows × N", "models": "model, rows × N", "odd": "N", "few-rows": "rows × N"}


def norms(suite: str, direction: str) -> Iterator[str]:
    """Ours over the floor in every shape of a suite, and who comes next in bf16."""
    keys = "verb", "dtype", "direction", "configuration"
    cells = cells_of(f"{suite}.json", *keys)
    files, peers = [f"{suite}.json"], dict[tuple[Any, ...], Cell]()
    if suite == "large":
        files += ["peers/large.json"]
        peers = cells_of(files[1], *keys)
    columns = [
        [cell for key, cell in cells.items() if key[:3] == (verb, dtype, direction)]
        for verb in _VERBS
        for dtype in _DTYPES.values()
    ]
    rows = []
    for shape in zip(*columns, strict=True):
        floor = shape[0]["floor"]
        row = [_shape(suite, floor), digits(floor["median_ms"] * 1e3)]
        row += [over_floor(cell, "kf-cuda") for cell in shape]
        for verb in _VERBS:
            key = verb, "bf16", direction, floor["configuration"]
            if peers:
                best = best_peer(peers.get(key, {}))
                row.append(f"{over_floor(peers[key], best)} {best}" if best else "–")
            else:
                row.append(over_floor(cells[key], "pytorch"))
        rows.append(row)
    means = (geometric_mean(cell["kf-cuda"]["median_ms"] / cell["floor"]["median_ms"] for cell in c) for c in columns)
    rows.append(["geometric mean", "", *(f"{mean:.2f}" for mean in means), "", ""])
    titles = [f"{_VERBS[verb]} {named}" for verb in _VERBS for named in _DTYPES]
    others = [f"{title} bf16, {'best peer' if peers else 'PyTorch'}" for title in _VERBS.values()]
    yield from table([_SHAPE_TITLES[suite], "floor µs, bf16", *titles, *others], rows)
    yield sources(*files)
    yield ""


def _shape(suite: str, measured: dict[str, Any]) -> str:
    """The name of a table's row."""
    name, shape = measured["configuration"], f"{measured['rows']}×{measured['cols']}"
    if suite == "odd":  # by the length, and the stride where there is one
        return str(name).partition("x")[2]
    return f"{name}, {shape}" if suite == "models" else shape


def host() -> Iterator[str]:
    """Host time per call, ours beside PyTorch's."""
    directions = ("inference", "training forward", "forward+backward")
    cells = cells_of("host.json", "verb", "configuration", "dtype", "direction")
    rows = []
    for verb, call, dtype in dict.fromkeys(key[:3] for key in cells):
        row = [f"{_VERBS[verb]}, {call.replace('x', '×')} {dtype}"]
        for direction in directions:
            cell = cells[verb, call, dtype, direction]
            ours, theirs = (digits(1e3 * cell[name]["median_ms"]) for name in ("kf-cuda", "pytorch"))
            row.append(f"{ours} / {theirs}")
        rows.append(row)
    yield from table(["call", *(f"{direction}: ours / PyTorch µs" for direction in directions)], rows)
    yield sources("host.json")
    yield ""


_STEPS = {
    "pytorch": "PyTorch",
    "kf-patch": "patched",
    "kf-graph": "graph pass",
    "liger": "Liger, same scope",
    "liger-full": "Liger, whole",
    "torch.compile": "torch.compile",
    "kf-compile": "torch.compile with ours",
}
_STEP_PAIRS = ("pytorch", "kf-patch"), ("torch.compile", "kf-compile")


def steps() -> Iterator[str]:
    """Training steps: ms of each contender, and PyTorch's and the compiler's over ours."""
    cells = {name: cell for (name,), cell in cells_of("steps.json", "configuration").items()}
    measured = [provider for provider in _STEPS if any(provider in cell for cell in cells.values())]
    rows = []
    for name, cell in cells.items():
        times = {provider: cell[provider]["median_ms"] for provider in measured if provider in cell}
        columns = (digits(times[provider]) if provider in times else "–" for provider in measured)
        gains = (f"{times[a] / times[b]:.2f}" if a in times else "–" for a, b in _STEP_PAIRS)
        rows.append([name, *columns, *gains])
    pairs = (f"{_STEPS[theirs]} ÷ {_STEPS[ours]}" for theirs, ours in _STEP_PAIRS)
    yield from table(["model", *(f"{_STEPS[provider]}, ms" for provider in measured), *pairs], rows)
    yield sources("steps.json")
    yield ""


_SHORT = ("pytorch", "kf-patch", "liger-full", "torch.compile")
_SHORT_MODELS = ("Llama 3 8B, 6 layers", "Qwen3 8B, 6 layers", "Gemma 3 4B, 6 layers", "DiT-XL/2, blocks")


def steps_in_short() -> Iterator[str]:
    """Training steps of four models: ms and the peak of the memory, for those who read one table."""
    cells = {name: cell for (name,), cell in cells_of("steps.json", "configuration").items()}

    def shown(measured: dict[str, Any] | None) -> str:
        return (
            f"{digits(measured['median_ms'])} ms, {measured['training_memory_bytes'] / 1e9:.1f} GB" if measured else "–"
        )

    rows = [[name, *(shown(cells[name].get(provider)) for provider in _SHORT)] for name in _SHORT_MODELS]
    yield from table(["model", *(_STEPS[provider] for provider in _SHORT)], rows)
    yield sources("steps.json", root="")
    yield ""


def step_memory() -> Iterator[str]:
    """Training steps: the peak of the memory and what autograd keeps, in GB, and how far losses are off PyTorch's."""
    rows, off = [], Counter[str]()
    for (name,), cell in cells_of("steps.json", "configuration").items():
        memory = {
            provider: " / ".join(f"{m[kind] / 1e9:.1f}" for kind in ("training_memory_bytes", "saved_bytes"))
            for provider, m in cell.items()
        }
        rows.append([name, *(memory.get(provider, "–") for provider in _STEPS)])
        for provider, m in cell.items():
            off[provider] = max(off[provider], m["max_abs_error_loss"] / m["loss"])
    yield from table(["model", *_STEPS.values()], rows)
    yield sources("steps.json")
    yield ""
    worst = ", ".join(f"{name} {100 * off[provider]:.3f} %" for provider, name in _STEPS.items() if off[provider])
    yield f"Losses of the first step are off PyTorch's by at most: {worst}."
    yield ""


_PROFILE = "step-profile-llama-3-8b.json"
_LEFT = ("additions", "copies, conversions", "loss", "embedding", "other")


def step_profile() -> Iterator[str]:
    """The time of a training step's kernels by kind, what could be fused last."""
    kernels = json.loads((H200 / _PROFILE).read_text())["kernels"]
    spent = Counter[tuple[str, str]]()
    for kernel in kernels:
        for kind in (kernel["kind"], "all"):
            spent[kind, kernel["contender"]] += kernel["ms"]
    kinds = sorted({kernel["kind"] for kernel in kernels} - {*_LEFT}, key=lambda kind: -spent[kind, "pytorch"])
    contenders = [name for name in _STEPS if ("all", name) in spent]
    rows = [[kind, *(digits(spent[kind, name]) for name in contenders)] for kind in (*kinds, *_LEFT, "all")]
    yield from table(["kernels", *(f"{_STEPS[name]}, ms" for name in contenders)], rows)
    yield sources(_PROFILE)
    yield ""


def training() -> Iterator[str]:
    """A training run: losses on the way and afterwards, whether a second run had the same, how far runs lie apart."""
    file = "training-run.json"
    runs = {(run["seed"], run["variant"]): run for run in json.loads((H200 / file).read_text())["runs"]}
    rows = []
    for (seed, variant), run in sorted(runs.items(), key=lambda item: (item[0][0], item[0][1] == "patched")):
        curve, ends = run["curve"], range(len(run["curve"]) // 4, len(run["curve"]) + 1, len(run["curve"]) // 4)
        losses = (f"{loss:.4f}" for loss in (*(curve[end - 1] for end in ends), run["held_out"]))
        rows.append([f"{variant}, seed {seed}", *losses, "the same bits" if run["repeats"] else "other bits"])
    head = [f"step {end * run['steps'] // len(curve)}" for end in ends]
    yield from table(["run", *head, "other text", "second run"], rows)

    def apart(*pair: tuple[int, str]) -> str:
        a, b = (runs[each]["curve"] for each in pair)
        return f"{dist(a, b) / len(a) ** 0.5:.4f}"

    ours = " and ".join(apart((seed, "patched"), (seed, "unpatched")) for seed in (0, 1))
    yield f"The two seeds lie {apart((0, 'unpatched'), (1, 'unpatched'))} apart, patched and unpatched runs {ours}."
    yield ""
    yield sources(file)
    yield ""


TABLES: dict[tuple[str, str], Callable[[], Iterator[str]]] = {  # by page and name
    ("README.md", "headline"): headline,
    ("docs/cpu.md", "cpu norms"): partial(cpu_norms, "pytorch", [2]),
    ("docs/cpu.md", "cpu costs"): costs,
    ("docs/triton.md", "Triton, large"): triton_large,
    ("docs/published.md", "published A"): published.a,
    ("docs/published.md", "published B"): published.b,
    ("docs/published.md", "published C"): published.c,
    ("docs/published.md", "published D"): published.d,
    ("docs/published.md", "published E"): operations.published_e,
    ("docs/mental_model.md", "bytes"): operations.bytes_moved,
    **{(f"docs/{page}.md", f"fused-ops {page}"): partial(operations.fused, page) for page in operations.PAGES},
    **{("docs/combinations.md", name): getattr(combinations, name) for name in ("options", "conditions", "backends")},
    **{(f"docs/{page}.md", name): partial(operations.newest, name) for name, (page, _) in operations.NEWEST.items()},
    ("docs/faults.md", "faults"): planted,
    ("docs/bits.md", "other orders"): other_orders,
    ("docs/results.md", "results"): kept,
    ("docs/stability.md", "first calls"): first_calls,
    ("docs/stability.md", "first kernel"): first_kernel,
    **{("docs/plans.md", f"plans {direction}"): partial(plans, direction) for direction in PLANNED_LENGTHS},
    **{
        ("docs/measured.md", f"{suite} {direction}"): partial(norms, suite, direction)
        for suite in _SHAPE_TITLES
        for direction in ("forward", "backward")
    },
    ("docs/measured.md", "host"): host,
    ("README.md", "steps in short"): steps_in_short,
    ("docs/models.md", "steps"): steps,
    ("docs/training.md", "step memory"): step_memory,
    ("docs/models.md", "step profile"): step_profile,
    ("docs/training.md", "training"): training,
    ("docs/measured.md", "Triton, sweep"): triton_sweep,
    ("docs/measured.md", "cpu norms, all"): partial(cpu_norms, "pytorch", [1, 16]),
    ("docs/measured.md", "cpu norms, torch.compile"): partial(cpu_norms, "torch.compile", [1, 2, 16]),
}


@cache
def _lines(document: str, name: str) -> tuple[str, ...]:
    """The lines of a table, made once per process, because the compiler counts registers for the table of plans."""
    return tuple(TABLES[document, name]())


def written_anew(document: str, text: str) -> str:
    """A document with its tables as their files have them."""
    for place, name in TABLES:
        if place == document:
            before, _, rest = text.partition(f"<!-- table: {name} -->\n")
            _, _, after = rest.partition("<!-- end -->")
            assert rest, f"{document} has no table {name}"
            text = "\n".join([f"{before}<!-- table: {name} -->", "", *_lines(place, name), f"<!-- end -->{after}"])
    return text


if __name__ == "__main__":
    for name in {document for document, _ in TABLES}:
        path = ROOT / name
        path.write_text(written_anew(name, path.read_text()))
