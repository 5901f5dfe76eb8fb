# Everything runs in .venv, which is made on first use. `make help` lists the targets.
#
#   PYTHON=python3.12            the interpreter that .venv is made with
#   VENV_ARGS=--system-site-packages   lets .venv see packages of that interpreter, e.g. a torch for its GPU
#   ARGS="…"                     more arguments for pacorl or pytest
#   WORKERS=1                    pytest processes

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
VERSIONS := .venv-versions
VERSION_TESTS := tests/core tests/config tests/io tests/models/test_lora.py tests/models/test_adapters.py tests/models/test_int8.py tests/models/test_streaming.py tests/runtime tests/report/test_page.py \
	tests/judge tests/grpo/test_trainer.py
BIN := $(VENV)/bin
RUN := $(VENV)/.pacorl-run
READY := $(VENV)/.pacorl-ready
PINS := $(VENV)/constraints.txt

# One thread per core, shared out over the test processes: more threads than cores make torch many times slower.
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell echo $$(( $(CORES) < 4 ? $(CORES) : 4 )))
OMP_NUM_THREADS ?= $(CORES)
export OMP_NUM_THREADS
# Tests start many processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$$(( $(OMP_NUM_THREADS) / $(WORKERS) > 0 ? $(OMP_NUM_THREADS) / $(WORKERS) : 1 )) \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: help setup lint check test quickstart docs wheel nightly test-gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv and install pacorl with its development tools

quickstart: $(RUN)  ## the whole story on this machine: judge, train, compare, a page that shows it
	$(BIN)/pacorl quickstart $(ARGS)

lint: $(READY)  ## format, lint, layers and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/mypy

check: lint  ## what must hold before a commit: lint, and the fast tests that see the most
	$(PYTEST) -m "not slow and not nightly" $$($(BIN)/python .ci/named_tests.py) $(ARGS)

test: $(READY)  ## all tests but the long ones
	$(PYTEST) --no-loadscope-reorder -m "not nightly" $(ARGS)

docs: $(READY)  ## the documentation site, in build/site; dead links and undocumented names fail
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build  # not -q, with which nothing is strict

wheel: $(READY)  ## wheel and sdist, in dist
	$(BIN)/python -m hatchling build -d dist

nightly: $(READY)  ## hours: the long tests, a real vLLM, the lowest and the newest versions
	PYTHON=$(BIN)/python tests/vllm/install.sh
	$(PYTEST) -m nightly $(ARGS)
	rm -rf $(VERSIONS) && mkdir -p build
	for end in lowest-direct highest; do \
		$(BIN)/uv pip compile -q --resolution $$end --extra serve --extra studio --extra data pyproject.toml -o build/$$end.txt; \
		$(BIN)/python -m venv $(VERSIONS)/$$end; \
		$(VERSIONS)/$$end/bin/pip install -q -c build/$$end.txt -e '.[serve,studio,data]' pytest pytest-xdist hypothesis scipy; \
		HF_HUB_OFFLINE=1 $(VERSIONS)/$$end/bin/python -m pytest -n $(WORKERS) --dist loadfile -p no:cacheprovider \
			-m "not slow and not nightly and not browser" $(VERSION_TESTS); \
	done

test-gpu: $(READY)  ## what only a card can show, on the tiny models: three minutes; skipped without a card
	$(BIN)/python -c 'import torch; torch.cuda.is_available() or print("no CUDA device is here: every test is skipped")'
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 0 -rs -m gpu tests/gpu $(ARGS)

clean:  ## remove build products and caches; .venv and runs stay
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache $(VERSIONS) .venv-vllm
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# --- set-up: runs again only when what is to be installed has changed ------------------------------------------

$(BIN)/python:
	@python=$(PYTHON); \
	for candidate in python3 python3.13 python3.12 python3.11; do \
		[ -n "$$python" ] && break; \
		"$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
			&& python=$$candidate; \
	done; \
	[ -n "$$python" ] || { echo "pacorl needs Python 3.11 or newer with its venv module (on Debian: apt-get install" \
		"python3-venv); found $$(python3 --version 2>/dev/null || echo no python3). Name one: make PYTHON=/path/to/python" >&2; exit 1; }; \
	"$$python" -m venv $(VENV_ARGS) $(VENV)

# A torch that is there and fits pyproject.toml's range stays: the pin gives way to its version.
$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV): a few minutes the first time …"
	@$(BIN)/python .ci/torch_version.py >/dev/null || $(BIN)/pip install -q -c constraints.txt torch
	@sed "s/^torch==.*/torch==$$($(BIN)/python .ci/torch_version.py)/" constraints.txt > $(PINS)
	@$(BIN)/pip install -q -c $(PINS) -e '.[serve,studio,data]'
	@touch $@

$(READY): $(RUN)
	@echo "Adding the development tools …"
	@$(BIN)/pip install -q -c $(PINS) -e '.[dev]'
	@touch $@
