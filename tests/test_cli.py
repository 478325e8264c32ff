"""The command line: what each command prints, and that its exit code tells success from failure."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import measured
from bench_support import run as results_of
from support import ROOT, python
from torch import Tensor
from typer.testing import CliRunner

import kernel_fusion as kf
from kernel_fusion import functional
from kernel_fusion.cli import machine
from kernel_fusion.cli.app import BENCH, app, main
from kernel_fusion.cli.common import shown_dtype
from kernel_fusion.config import BACKENDS
from kernel_fusion.core import cache, checks
from kernel_fusion.native import build
from kernel_fusion.operators import loader
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import RowNormCase, Tensors
from kernel_fusion_bench import commands, plot, report, trace

# The modules, not the commands of the same names that the package exports.
verify_module = importlib.import_module("kernel_fusion.cli.verify")
bench_module = importlib.import_module("kernel_fusion_bench.commands.bench")
FP32 = torch.float32
CASES = [RowNormCase(verb, (16, 100), FP32, weight=FP32, bias=FP32) for verb in ("layer_norm", "rms_norm")]


def run(*arguments: str) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `verify` of two cases and one training step."""
    monkeypatch.setattr(verify_module, "cases", lambda quick: CASES)
    monkeypatch.setattr(verify_module, "training_cases", lambda quick: CASES[:1])


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet. The extension is loaded before, so that nothing builds it anew."""
    assert loader.load(), loader.error()
    folder = tmp_path / "cache"
    monkeypatch.setenv("KERNEL_FUSION_CACHE_DIR", str(folder))
    return folder


def test_module_and_console_script_are_the_same() -> None:
    """`python -m kernel_fusion` calls itself kernel-fusion and lists every command."""
    command = [sys.executable, "-m", "kernel_fusion", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Usage: kernel-fusion" in result.stdout
    commands = ["info", "verify", "bench", "compare", "plot", "report", "profile", "tune", "warmup", "cache"]
    for name in (*commands, "hf-kernel"):
        assert re.search(rf"\b{name}\b", result.stdout), name


_ABSENT = """
    import sys
    class Absent:
        def find_spec(self, name, *_):
            if name.split(".")[0] in NAMES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Absent())
    from kernel_fusion.__main__ import main
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


def without(packages: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line where packages are not installed; the last line is its exit code, or what it said last."""
    return python(_ABSENT.replace("NAMES", repr(packages)), *arguments)


@pytest.mark.parametrize("command", ["bench", "compare", "plot", "report", "profile", "tune"])
def test_commands_that_are_not_installed_say_how_to_get_them(command: str) -> None:
    """In one line, whatever their arguments are; without kernel-fusion-bench the others work."""
    result = without(["kernel_fusion_bench"], command, "anything", "--quick", "--help")
    line = f"`kernel-fusion {command}` needs kernel-fusion-bench (in a checkout: pip install ./bench)\n"
    assert (result.stderr, result.stdout) == (line, "1\n")


def test_the_library_works_without_the_benchmarks() -> None:
    """Its own commands do, and `kf.bench` says what it needs; other names of the package are there."""
    assert "folder" in without(["kernel_fusion_bench", "matplotlib", "jinja2"], "cache").stdout
    code = """
        import sys
        sys.modules["kernel_fusion_bench"] = None
        import kernel_fusion as kf
        try:
            kf.bench.compare
        except ModuleNotFoundError as error:
            print(error)
    """
    words = "`kernel_fusion.bench` needs kernel-fusion-bench (in a checkout: pip install ./bench)\n"
    assert python(code).stdout == words


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_line_says_what_it_needs(package: str) -> None:
    """Without the libraries of the extra `cli` there is one line with how to install them, and no traceback."""
    result = without([package], "info")
    assert result.stdout == f"kernel-fusion needs {package}: pip install 'kernel-fusion[cli]'\n"
    assert result.stderr == ""


def test_every_command_of_the_benchmarks_is_an_entry_point() -> None:
    """The commands that the library expects, the distribution's entry points, and its functions are the same."""
    text = (ROOT / "bench" / "pyproject.toml").read_text()
    listed = re.findall(r'^(\w+) = "kernel_fusion_bench.commands:\1"$', text, re.MULTILINE)
    assert sorted(listed) == sorted(BENCH) == commands.__all__
    assert f'version = "{kf.__version__}"' in text
    assert f"kernel-fusion[cli]=={kf.__version__}" in text


def test_version_and_short_help() -> None:
    """The program and each command have them."""
    assert run("--version").stdout == f"kernel-fusion {kf.__version__}\n"
    for command in ([], ["bench"], ["verify"]):
        assert "Usage: " in run(*command, "-h").stdout


def test_info_builds_nothing(tmp_path: Path) -> None:
    """With an empty cache it says that the extension is not built, and leaves it so."""
    command = "from kernel_fusion.__main__ import main; main()"
    result = python(command, "info", env={"KERNEL_FUSION_CACHE_DIR": str(tmp_path / "cache")})
    assert "not built; the first call or `info --build` builds it" in result.stdout
    assert not (tmp_path / "cache").exists()


def test_info_explains_every_backend() -> None:
    """Each backend is available, or there is a reason; versions, extension and caches are there."""
    assert loader.load(), loader.error()
    result = run("info", "--build")
    assert result.exit_code == 0, result.output
    for name in BACKENDS:
        assert re.search(rf"^\s+{name}\s+(available|not available: \w+)", result.stdout, re.MULTILINE), name
    assert torch.__version__ in result.stdout
    assert re.search(r"state\s+loaded", result.stdout)
    assert re.search(r"extension\s+\d+ entries, [\d.]+ [MG]B", result.stdout)


@pytest.mark.slow
def test_verify_passes_on_the_cpu() -> None:
    """A line for every verb and dtype, kernels of ours ran, and the last line counts all comparisons."""
    assert loader.load(), loader.error()
    before = loader.launches("cpu_forward")
    result = run("verify", "--quick", "--device", "cpu")
    assert result.exit_code == 0, result.output
    last = result.stdout.strip().splitlines()[-1]
    assert int(re.fullmatch(r"(\d+) passed, 0 failed", last)[1]) > 1000
    of_cpu = [case for case in verify_module.cases(True) if not checks.without_kernels(case.verb, "cpu")]
    grid = {(case.verb, shown_dtype(case.dtype)) for case in of_cpu}
    lines = re.findall(r"^ (\w+) +(\w+) +\d+ +0\.\d{3} +\w+ +pass", result.stdout, re.MULTILINE)
    assert set(lines) == grid
    assert len(lines) == len(grid)
    assert len(result.stdout.splitlines()) < len(grid) + 20
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert loader.launches("cpu_forward") - before >= len(verify_module.cases(True)) / 2


def test_verify_grid_of_the_norms_covers_what_it_promises() -> None:
    """Both norms, five dtype mixes, and the shapes that the command is documented to check."""
    for quick in (True, False):
        grid = [case for case in verify_module.cases(quick) if type(case) is RowNormCase]
        mixes = {(case.verb, case.dtype, case.weight) for case in grid if case.weight is not None}
        assert len(mixes) == 2 * 5
        for verb, dtype in {(case.verb, case.dtype) for case in grid}:
            own = [case for case in grid if case.verb == verb and case.dtype == dtype]
            lengths = {case.shape[-1] for case in own}
            assert {1, 255, 32768} <= lengths
            assert any(case.shape[0] == 0 for case in own)
            assert any(case.layout == "padded" for case in own)
            assert any(case.mean / case.std == 1e4 for case in own)
            assert any(case.weight is None for case in own)


def test_verify_grid_covers_every_verb_and_dtype() -> None:
    """Every verb of the library in every dtype, every activation in its value and its slope, dropout and masks."""
    verbs = set(functional.__all__) - {"NormOutput"}
    for quick in (True, False):
        grid = verify_module.cases(quick)
        assert {(c.verb, c.dtype) for c in grid} == set(product(verbs, checks.FLOATING))
        for dtype in checks.FLOATING:
            own = [case for case in grid if case.dtype == dtype]
            assert {c.activation for c in own if c.verb == "add_act"} == {*kf.ACTIVATIONS, None}
            assert {c.verb for c in own if getattr(c, "dropout_p", 0.0)} == {
                *("add_layer_norm", "add_rms_norm", "bias_act", "act_dropout")
            }
            assert {"dead", "additive"} <= {c.mask for c in own if c.verb == "softmax"}
    assert len(verify_module.cases(False)) > len(verify_module.cases(True))


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("wrong", ["y", "dx", "dweight", "dbias"])
def test_verify_fails_when_one_result_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one tensor off by a few roundings: exactly that tensor fails, in each case."""
    honest = oracle.run

    def perturbed(case: RowNormCase, inputs: Tensors, backend: str | None) -> dict[str, Tensor]:
        results = honest(case, inputs, backend)
        results[wrong].flatten()[5].add_(1e-3)
        return results

    monkeypatch.setattr(oracle, "run", perturbed)
    result = run("verify", "--device", "cpu", "--backend", "eager")
    assert result.exit_code == 1
    # 2 cases of 4 tensors and 5 results of the training step
    assert result.stdout.strip().endswith("11 passed, 2 failed")
    assert len(re.findall(rf"^FAIL \w+-16x100-f32\S* {wrong}: error", result.stdout, re.MULTILINE)) == 2
    assert len(re.findall(r"^ \w+ +fp32 +4 +[\d.]+ +\w+ +1 FAIL", result.stdout, re.MULTILINE)) == 2


@pytest.mark.usefixtures("few_cases")
def test_verify_shows_all_where_asked_to() -> None:
    """Each comparison with its errors; without --verbose failures alone, and pass or fail of each training step."""
    short, long = (
        run("verify", "--device", "cpu", "--backend", "eager"),
        run("verify", "--backend", "eager", "--verbose"),
    )
    each = re.compile(r"^pass \w+-16x100\S* \w+: error [\d.e+-]+, PyTorch's [\d.e+-]+, 0\.\d+ of its", re.MULTILINE)
    assert len(each.findall(long.stdout)) == 2 * 4 + 5
    assert not each.findall(short.stdout)
    assert re.search(r"^ layer_norm-16x100\S+ +pass +pass +pass +pass +pass", short.stdout, re.MULTILINE)


@pytest.mark.usefixtures("few_cases")
def test_verify_fails_when_the_training_step_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that is wrong in one column fails forward, loss or gradients of the training step."""
    honest = kf.layer_norm

    def perturbed(input: Tensor, *args: Any, backend: str | None = None, **kwargs: Any) -> Tensor:
        y = honest(input, *args, backend=backend, **kwargs)
        return y if input.dtype == torch.float64 else y * torch.linspace(1, 1.01, input.shape[-1])

    monkeypatch.setattr(verify_module, "cases", lambda quick: [])
    monkeypatch.setattr(kf, "layer_norm", perturbed)
    result = run("verify", "--device", "cpu", "--backend", "eager")
    assert result.exit_code == 1
    assert result.stdout.strip().endswith("0 passed, 5 failed")


@pytest.mark.usefixtures("few_cases")
def test_verify_fails_when_no_kernel_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right numbers by a fallback are no verification of the backend."""
    assert loader.load(), loader.error()
    monkeypatch.setattr(loader, "launches", lambda counter: 7)
    result = run("verify", "--device", "cpu", "--backend", "cpu")
    assert result.exit_code == 1
    assert "no kernel of backend 'cpu' ran" in result.stdout
    assert "0 passed" in result.stdout


@pytest.mark.usefixtures("few_cases")
def test_verify_goes_on_after_a_case_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the row, and the other cases still count."""
    honest = oracle.run

    def raising(case: RowNormCase, inputs: Tensors, backend: str | None) -> dict[str, Tensor]:
        if case.verb == "rms_norm":
            raise RuntimeError("no [such] kernel")
        return honest(case, inputs, backend)

    monkeypatch.setattr(oracle, "run", raising)
    result = run("verify", "--device", "cpu", "--backend", "eager")
    assert result.exit_code == 1
    assert "RuntimeError: no [such] kernel" in result.stdout
    assert result.stdout.strip().endswith("9 passed, 1 failed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--backend", "cuda"], "the input is on cpu"),
        (["--device", "nowhere"], "'nowhere' is no device here"),
        (["--backend", "fast"], "`backend` must be one of"),
    ],
)
def test_verify_refuses_what_cannot_run(arguments: list[str], message: str) -> None:
    """A usage error that says why, instead of another backend's numbers."""
    result = run("verify", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_cache_shows_and_clears(empty_cache: Path) -> None:
    """Entries and size per kind, and none after --clear."""
    key = cache.digest("a kernel")
    assert cache.CUBINS.write(key, b"x" * 200_000)
    assert re.search(r"cubin\s+│ 1 entries\s+│ 200 kB", run("cache").stdout)
    result = run("cache", "--clear")
    assert result.exit_code == 0
    assert re.search(r"cubin\s+│ 0 entries", result.stdout)
    assert not cache.CUBINS.path(key).exists()


def test_info_fails_where_it_was_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that prepares a machine sees by the exit code that there is no extension."""
    monkeypatch.setattr(loader, "load", lambda: False)
    assert run("info", "--build").exit_code == 1
    assert run("info").exit_code == 0


def test_warmup_compiles_without_a_gpu(empty_cache: Path) -> None:
    """The kernels of one hidden size land in the cache, and a second run compiles nothing more."""
    command = ("warmup", "--hidden", "64", "--dtypes", "fp32", "--arch", "90")
    result = run(*command)
    assert result.exit_code == 0, result.output
    entries = cache.CUBINS.entries()
    # two norms in three directions, and what finishes the sums
    assert len(entries) >= 7
    assert run(*command).exit_code == 0
    assert cache.CUBINS.entries() == entries


def test_warmup_compiles_what_a_function_calls(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--model module:function` compiles the kernels of its calls, of any family, and those alone."""
    step = "def step(): kf.softmax(torch.ones(2, 32, requires_grad=True)).sum().backward()"
    step = "def step(): kf.softmax(torch.ones(2, 32, requires_grad=True)).sum().backward()"
    (tmp_path / "calls_softmax.py").write_text(f"import torch, kernel_fusion as kf\n{step}")
    monkeypatch.syspath_prepend(tmp_path)
    result = run("warmup", "--model", "calls_softmax:step", "--arch", "90")
    assert result.exit_code == 0, result.output
    assert "2 kernels for sm_90" in result.output
    assert len(cache.CUBINS.entries()) == 2


def test_warmup_says_when_nothing_can_be_kept(empty_cache: Path) -> None:
    """A cache folder that cannot be made is a failure here, where filling it is the purpose."""
    empty_cache.write_text("a file in its place")
    result = run("warmup", "--hidden", "64", "--dtypes", "fp32", "--arch", "90")
    assert result.exit_code == 1
    assert "cannot be written" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "64", "--arch", "12"], "12 is not known; name one of 80"),
        (["--arch", "90"], "name row lengths to compile for"),
        (["--hidden", "many", "--arch", "90"], "expected numbers with commas"),
        (["--hidden", "64", "--arch", "90", "--dtypes", "fp8"], "'fp8' is no dtype"),
        (["--model", "no_such_model", "--arch", "90"], "expected a configuration file, its folder, or module:function"),
    ],
)
def test_warmup_refuses_bad_options(arguments: list[str], message: str) -> None:
    """A usage error that names what there is."""
    result = run("warmup", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


_LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
_LLAMA |= {"num_attention_heads": 2, "vocab_size": 64, "architectures": ["LlamaForCausalLM"]}
_DEEP = "`num_hidden_layers` must be at most 1000"
_BAD_CONFIGURATIONS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is no configuration"),
    "a list": ([1], "is no configuration"),
    "nothing": ({}, "is no configuration"),
    "bytes": ("\udcff", "is no configuration"),
    "an unknown type": (_LLAMA | {"model_type": "no_such"}, "is no configuration"),
    "code of its own": ({"auto_map": {"AutoConfig": "x.Y"}, "model_type": "own"}, "is no configuration"),
    "a function": (_LLAMA | {"architectures": ["is_torch_available"]}, "must name a model class"),
    "a configuration": (_LLAMA | {"architectures": ["LlamaConfig"]}, "must name a model class"),
    "another class": (_LLAMA | {"architectures": ["Trainer"]}, "must name a model class"),
    "no class": (_LLAMA | {"architectures": ["NoSuchModel"]}, "must name a model class"),
    "a number": (_LLAMA | {"architectures": [3]}, "is no configuration"),
    "no name": (_LLAMA | {"architectures": []}, "must name a model class"),
    "another model's": (_LLAMA | {"architectures": ["WhisperModel"]}, "describes no model that WhisperModel can be"),
    "no heads": (_LLAMA | {"num_attention_heads": 0}, ""),
    "negative sizes": (_LLAMA | {"hidden_size": -64}, ""),
    "names for sizes": (_LLAMA | {"hidden_size": "many"}, ""),
    "an unknown activation": (_LLAMA | {"hidden_act": "no_such"}, "describes no model"),
    "too large": (_LLAMA | {"intermediate_size": 2**40}, "describes no model"),
    "too deep": (_LLAMA | {"num_hidden_layers": 10**9}, _DEEP),
    "too deep within": ({"model_type": "llava", "text_config": _LLAMA | {"num_hidden_layers": 1e12}}, _DEEP),
    "other inputs": ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]}, "no inputs are known"),
}


@pytest.mark.filterwarnings("ignore")  # of transformers about odd values
@pytest.mark.parametrize("name", _BAD_CONFIGURATIONS)
def test_warmup_refuses_bad_configurations(name: str, tmp_path: Path, empty_cache: Path) -> None:
    """A usage error in one sentence that names the file, whatever transformers raises; nothing else is called."""
    pytest.importorskip("transformers")
    content, message = _BAD_CONFIGURATIONS[name]
    file = tmp_path / "config.json"
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_bytes(text.encode(errors="surrogateescape"))
    result = run("warmup", "--model", str(file), "--arch", "90")
    assert result.exit_code == 2, result.output
    assert type(result.exception) is SystemExit
    assert "Invalid value for --model" in result.output
    assert message in " ".join(result.output.replace("│", " ").split())


def test_warmup_says_which_package_is_missing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuda-bindings no kernel can be compiled: a sentence with what to install, and no traceback."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    result = run("warmup", "--hidden", "64", "--dtypes", "fp32", "--arch", "90")
    assert result.exit_code == 1
    assert type(result.exception) is SystemExit
    assert "warmup: compiling CUDA kernels needs cuda-bindings (pip install cuda-bindings)" in result.output


def test_hints_name_packages_that_can_be_installed() -> None:
    """Packages that errors and pages tell to install are among the dependencies, by the name that an index knows."""
    texts = [(ROOT / folder / "pyproject.toml").read_text() for folder in ("", "bench")]
    known = set(re.findall(r'"([\w-]+)[\w.<>=,\[\]-]*"', "".join(texts)))
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    sources = [path for folder in ("kernel_fusion", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    hints = {
        hint: path.name
        for path in [*pages, *sources]
        for hint in re.findall(r"pip install (?:-\S+ )*['\"]?(\w[\w-]*)", path.read_text())
    }
    assert {"matplotlib", "cuda-bindings"} <= hints.keys() <= known | {"torch"}, hints


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", ","],
        ["bench", "models", "--weights", ","],
        ["bench", "models", "--weights", "bf16,fp16"],
        ["bench", "models", "--threads", "0"],
        ["bench", "models", "--shape", f"1x{'9' * 5000}"],
        ["bench", "models", "--device", "meta"],
        ["bench", "models", "--device", "hpu"],
        ["profile", "layer_norm", "--dtype", ","],
        ["profile", "layer_norm", "--dtype", "fp32,fp64"],
        ["profile", "no_such_case"],
        ["verify", "--device", "cpu:-1"],
        ["warmup", "--arch", "90", "--hidden", "-5"],
        ["warmup", "--arch", "90", "--hidden", "0"],
        ["plot", "missing.json"],
        ["compare", ".", "."],
        ["report", "missing.json"],
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_arguments_that_mean_nothing_are_usage_errors(arguments: list[str]) -> None:
    """Empty lists, several values for one, numbers out of range, devices without kernels, files that are not there."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Invalid value" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "models", "--quick", "--device", "cpu", "--output-dir"],
        ["profile", "layer_norm", "--device", "cpu", "--output-dir"],
        ["plot", "RESULTS", "--output-dir"],
        ["report", "RESULTS", "--output"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_folder_that_cannot_be_written_is_said_at_once(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence with its path, before anything is measured, traced or drawn."""
    path = results_of(measured("pytorch", 1.0)).write_json(tmp_path)
    (tmp_path / "file").touch()
    for module, name in ((bench_module, "_measure"), (trace, "record"), (plot, "pictures"), (report, "write")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("worked before it looked"))
    words = [str(path) if word == "RESULTS" else word for word in arguments]
    result = run(*words, str(tmp_path / "file" / "below"))
    assert result.exit_code == 1, result.output
    assert f"{arguments[0]}: {tmp_path / 'file'}" in result.output


def test_an_interrupt_is_a_word_and_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in any command exits as a shell expects, without a traceback."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "versions", interrupted)
    result = run("info")
    assert (result.exit_code, result.output) == (130, "Interrupted.\n")


def test_faults_of_the_program_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is neither the machine's nor the user's fault is not made a sentence."""

    def wrong() -> None:
        raise IndexError("ours")

    monkeypatch.setattr(machine, "versions", wrong)
    assert type(run("info").exception) is IndexError


def test_standard_streams_may_be_closed_or_of_another_encoding(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code tells of success all the same, and characters that there are not are question marks."""
    monkeypatch.setattr(sys, "argv", ["kernel-fusion", "cache"])
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for stdout in (None, ascii_only):
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 0
    ascii_only.flush()
    assert b"cubin" in ascii_only.buffer.getvalue()


def test_a_reader_may_stop_reading(empty_cache: Path) -> None:
    """With its output closed (`| head`) a command ends, and has nothing to say about it."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kernel_fusion", "cache"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_hf_kernel_writes_a_folder_once(tmp_path: Path) -> None:
    """The command writes the folder for the Hub, and into one that has builds it writes nothing."""
    command = "hf-kernel", "--output", str(tmp_path / "kernel")
    assert "is ready for an upload" in run(*command).stdout
    again = run(*command)
    assert again.exit_code == 1
    assert "write to a new folder" in again.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "models", "--output-dir", ""],
        ["profile", "layer_norm", "--output-dir", " "],
        ["plot", "RESULTS", "--output-dir", ""],
        ["report", "RESULTS", "--output", ""],
        ["tune", "--output", ""],
        ["cache", "--export", ""],
        ["hf-kernel", "--output", ""],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_empty_name_is_no_folder(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A usage error, and nothing is written into the current folder, which is what an empty path means to Python."""
    path = results_of(measured("pytorch", 1.0)).write_json(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = run(*(str(path) if word == "RESULTS" else word for word in arguments))
    assert result.exit_code == 2, result.output
    words = " ".join(result.output.replace("│", " ").split())
    assert "expected the name of a file or folder, got an empty one" in words
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["bench", "models", "--quick", "--device", "cpu", "--output-dir", "."], "models-quick.md"),
        (["bench", "models", "--quick", "--device", "cpu", "--output-dir", "."], "models-quick.json"),
        (["profile", "layer_norm", "--device", "cpu", "--output-dir", "."], "pytorch_profile.json"),
        (["profile", "layer_norm", "--device", "cpu", "--output-dir", "."], "profile.md"),
        (["plot", "RESULTS", "--kind", "speedup", "--output-dir", "."], "PICTURE"),
        (["report", "RESULTS"], "report.html"),
        (["report", "RESULTS", "--output", "RESULTS"], "RESULTS"),
        (["hf-kernel", "--output", "."], "README.md"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_others_wrote_is_not_overwritten(
    arguments: list[str], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence with the file's path, before long work; the file is as it was."""
    monkeypatch.chdir(tmp_path)
    theirs = [measured("pytorch", 1.0), measured("ours/cpu", 1.0)]
    results = results_of(*theirs).write_json(tmp_path / "results")
    file = str(results) if file == "RESULTS" else file
    if file == "PICTURE":
        file = plot.plot(results_of(*theirs), tmp_path, ["speedup"])[0].name
    if file != str(results):
        Path(file).write_text("mine, made with kernel-fusion")
    before = Path(file).read_bytes()
    for module, name in ((bench_module, "_measure"), (trace, "record"), (report, "write")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("worked before it looked"))
    result = run(*(str(results) if word == "RESULTS" else word for word in arguments))
    assert result.exit_code == 1, result.output
    assert re.search(rf"{re.escape(Path(file).name)}.*(does not overwrite|would be overwritten)", result.output)
    assert Path(file).read_bytes() == before


def test_what_a_command_wrote_it_may_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, reports and traces are drawn again under their names."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    path = str(results_of(measured("pytorch", 1.0), measured("ours/cpu", 1.0)).write_json(tmp_path))
    for command in (
        *(["plot", path, "--kind", "speedup", "--format", format] for format in ("png", "svg")),
        ["report", path],
        ["profile", "layer_norm", "--device", "cpu", "--backends", "eager", "--shape", "8x16", "--output-dir", "."],
    ):
        for _ in range(2):
            result = run(*command)
            assert result.exit_code == 0, result.output


def test_an_exported_cache_serves_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another interpreter, without a compiler and with that folder alone, has the kernels and builds nothing."""
    assert loader.load(), loader.error()
    # The library of this machine stands for one of all processors, which takes minutes to build.
    monkeypatch.setattr(build, "built_library", lambda say, every_variant: build.kept_library())
    folder = tmp_path / "exported"
    result = run("cache", "--export", str(folder))
    assert result.exit_code == 0, result.output
    assert f"KERNEL_FUSION_CACHE_DIR={folder}" in result.stdout
    code = """
        import torch, kernel_fusion as kf
        from kernel_fusion.operators import loader
        x = torch.randn(4, 8)
        y = kf.layer_norm(x, 8)
        print(torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6), loader.launches("cpu_forward"))
    """
    there = python(code, env={"KERNEL_FUSION_CACHE_DIR": str(folder), "CXX": "no-such-compiler"})
    assert there.stdout.split() == ["True", "1"]
    assert there.stderr == ""


def test_disabled_calls_take_pytorchs_operations() -> None:
    """In every thread and under `use_backend(None)`; nothing is loaded; a named backend is still that one."""
    code = """
        import threading, torch, kernel_fusion as kf
        from kernel_fusion.operators import loader
        x = torch.randn(4, 8)
        found = []
        def call():
            with kf.use_backend(None):
                y = kf.layer_norm(x, 8)
            found.append(torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6))
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        print(*found, loader.is_loaded())
        print(kf.explain(kf.softmax, x).backend, kf.explain(kf.softmax, x, backend="cpu").backend)
    """
    result = python(code, env={"KERNEL_FUSION_DISABLE": "1"})
    assert result.stdout.split() == ["True", "True", "False", "eager", "cpu"]


def test_a_compilation_is_logged_on_request(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line at level INFO of the logger kernel_fusion for each kernel; none for one from the cache."""
    command = ("warmup", "--hidden", "64", "--dtypes", "fp32", "--arch", "90")
    with caplog.at_level(logging.INFO, logger="kernel_fusion"):
        assert run(*command).exit_code == 0
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == len(cache.CUBINS.entries())
        assert all(re.fullmatch(r"compiled \S+ for sm_90 in \d+\.\d\d s", line) for line in lines)
        assert run(*command).exit_code == 0
    assert len(caplog.records) == len(lines)
