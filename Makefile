# Every target sets up what it needs. If a virtual environment that has torch is active, it is
# used, and only packages that it lacks are installed; otherwise .venv is made.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup finetune test test-all fuzz kill-trials lint bench test-gpu bench-gpu clean missing

NPROC ?= 2# ranks of `make finetune`
ARGS ?=# further arguments of finetune, test, test-all, fuzz, kill-trials, bench

PIP_INSTALL = -m pip install --no-input --disable-pip-version-check --quiet
READY := .venv/.ready

# Not for help and clean: importing torch takes a second.
ifneq ($(VIRTUAL_ENV),)
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
HAS_TORCH := $(shell "$(VIRTUAL_ENV)/bin/python" -c 'import tomllib, torch; print("yes")' 2>/dev/null)
endif
endif
PYTHON := $(if $(HAS_TORCH),$(VIRTUAL_ENV)/bin/python,$(CURDIR)/.venv/bin/python)

# The checkout itself, also where zeroshard isn't installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# Prints the requirements of zeroshard[dev] that aren't installed, one a line.
define MISSING
import re, tomllib
from importlib.metadata import PackageNotFoundError, version
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["hf"], *extras["plot"], *extras["eightbit"], *extras["dev"]]:
    name = re.match(r"[\w.-]+", requirement)[0]
    try:
        name == project["name"] or version(name)
    except PackageNotFoundError:
        print(requirement)
endef
export MISSING

help:  ## Show the targets
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "  make %-12s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(if $(HAS_TORCH),missing,$(READY))  ## Install what the other targets need

missing:
	@missing=$$("$(PYTHON)" -c "$$MISSING"); \
	if [ -n "$$missing" ]; then \
	    echo "Installing into $(VIRTUAL_ENV):" $$missing; \
	    torch=$$("$(PYTHON)" -c 'import torch; print(torch.__version__)'); \
	    "$(PYTHON)" $(PIP_INSTALL) $$missing "torch==$$torch"; \
	fi

$(READY): pyproject.toml
	@for python in python3.13 python3.12 python3.11 python3 ""; do \
	    $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' &>/dev/null && break; \
	done; \
	if [ -z "$$python" ]; then echo "zeroshard needs Python 3.11 or newer, with venv; none found" >&2; exit 1; fi; \
	echo "Installing zeroshard and its tools into .venv ($$($$python --version)); this takes some minutes"; \
	[ -x .venv/bin/pip ] || $$python -m venv .venv
	@.venv/bin/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@

finetune: setup  ## Fine-tune a small language model on two ranks (ARGS="--stage 2", NPROC=2)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$(PYTHON)" -m torch.distributed.run --standalone \
	    --nproc-per-node $(NPROC) examples/finetune.py $(ARGS)

test: setup  ## Run the tests of every behaviour, in minutes (ARGS="-k layout")
	"$(PYTHON)" -m pytest $(ARGS)

test-all: setup  ## Run all tests: those, and the long ones
	"$(PYTHON)" -m pytest --all $(ARGS)

fuzz: setup  ## Train random models in random ways, against plain PyTorch (ARGS="--cases 300")
	"$(PYTHON)" -m tests.fuzz $(ARGS)

kill-trials: setup  ## Kill ranks while they save, 50 times (ARGS="--trials 50")
	"$(PYTHON)" -m tests.checkpoint.kill $(ARGS)

lint: setup  ## Check style, format and types
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
	"$(PYTHON)" -m mypy --strict zeroshard

bench: setup  ## Measure step time, memory, checkpoints and optimizers on the CPU
	"$(PYTHON)" benchmarks/step_time.py $(ARGS)
	"$(PYTHON)" benchmarks/memory.py $(ARGS)
	"$(PYTHON)" benchmarks/checkpoint.py
	"$(PYTHON)" benchmarks/optimizers.py

test-gpu: setup  ## Run the tests that need a GPU
	"$(PYTHON)" -m pytest -m gpu $(ARGS)

bench-gpu: setup  ## Measure step time and optimizers on GPUs
	"$(PYTHON)" benchmarks/step_time.py --device cuda $(ARGS)
	"$(PYTHON)" benchmarks/optimizers.py --device cuda --seeds ""

clean:  ## Remove caches and build output (not .venv)
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache loss.png
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
