# The commands of the repository. Each first makes what it needs: a virtual environment in .venv with the versions
# of constraints.txt, made anew whenever one of these or a pyproject.toml changes.
#
#   make demo    verify every kernel, benchmark quickly with a plot, train a small GPT; on the best device present
#   make test    the quick tests: every verb, backend, direction and dtype, in minutes; PYTEST_ARGS chooses among them
#   make test-all
#                all the tests that can run on this machine; PYTEST_ARGS chooses, for example PYTEST_ARGS='-m cuda'
#   make coverage
#                the tests of `make test` with the lines they run: fails below 95 % of those that need no GPU
#   make lint    ruff, mypy, clang-format, and the words of pages and comments
#   make docs    the documentation as a site, docs/_build/index.html; a warning is an error, and so is a page that
#                needs the network, for its formulas or else, or has LaTeX in them that the converter does not know
#   make wheel   the wheel for Linux that needs no compiler, into dist; WHEEL_ARGS chooses (--torch 2.13.0)
#   make release-check
#                build the archives of a release, look into them, and verify the wheels in fresh environments
#   make clean   remove the environment and everything generated in the checkout (the caches in the user's cache
#                folder stay; `kernel-fusion cache --clear` removes those)
#
# PYTHON names the interpreter, RELEASE_ARGS what release-check tries (--python 3.10,3.13 --torch 2.11.0). To use a
# PyTorch that it already has (a CUDA build, say), whatever its version: make demo VENV_ARGS=--system-site-packages

PYTHON ?= python3
VENV_ARGS ?=
# Two workers are faster than one even on two cores, and few enough to share a GPU.
PYTEST_ARGS ?= -n 2 --dist worksteal
RESULTS := demo-results

BIN := .venv/bin
STAMP := .venv/installed
# A PyTorch taken from outside need not be the pinned one, and neither need what came with it.
CONSTRAINTS := $(if $(findstring system-site-packages,$(VENV_ARGS)),,-c constraints.txt)

# Threads that spin while they wait take the cores from the other worker.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest

.PHONY: demo test test-all coverage lint docs wheel release-check clean

demo: $(STAMP)
	$(BIN)/kernel-fusion verify
	$(BIN)/kernel-fusion bench models --quick --output-dir $(RESULTS)/models
	$(BIN)/python examples/train_gpt.py --output-dir $(RESULTS)
	@echo; echo "Plots:"; ls $(RESULTS)/*.png $(RESULTS)/*/*.png

test: $(STAMP)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

coverage: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS) -m "not slow" --cov
	$(BIN)/python tests/gpu_only_lines.py

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	git ls-files '*.cpp' '*.h' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/python docs/words.py

docs: $(STAMP)
	$(BIN)/sphinx-build -q -n -W --keep-going -c docs . docs/_build
	! grep -rE '<(script|img|link|iframe)[^>]*(src|href)="(https?:)?//' docs/_build --include='*.html'
	grep -q '<math' docs/_build/docs/verbs.html
	! grep -rE '<m[a-z]+>(&<|\\)' docs/_build --include='*.html'

wheel: $(STAMP)
	$(BIN)/python tests/release_wheel.py $(WHEEL_ARGS)

release-check: $(STAMP)
	$(BIN)/python tests/release_check.py $(RELEASE_ARGS)

clean:
	rm -rf .venv $(RESULTS) docs/_build build dist *.egg-info bench/build bench/*.egg-info .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# PyTorch comes first and alone, so that one that is there already is never replaced.
$(STAMP): pyproject.toml bench/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "kernel_fusion needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV_ARGS) .venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install $(CONSTRAINTS) torch
	$(BIN)/pip install $(CONSTRAINTS) --editable '.[dev]' --editable ./bench
	touch $@
