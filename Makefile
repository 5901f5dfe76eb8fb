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
VERSION_TESTS := tests/core tests/lab/plan/test_balance.py tests/config tests/io tests/models/lora tests/models/quantize tests/runtime tests/report/test_page.py \
	tests/judge tests/grpo/test_trainer.py tests/gpu tests/test_gpu_day.py
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

.PHONY: help setup tiny quickstart docs wheel lock sbom lint test campaign attack test-gpu test-vllm test-versions check claims matrix lattice clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv and install pacorl with its development tools

quickstart: $(RUN)  ## the whole story on this machine: judge, train, compare, a page that shows it
	$(BIN)/pacorl quickstart $(ARGS)

tiny: $(RUN)  ## the tiny checkpoints again, under runs/tiny (about 4.6 CPU hours; ARGS="--share 0.01" tries it)
	$(BIN)/python -m tools.tiny all $(ARGS)

docs: $(READY)  ## the documentation site, in build/site; dead links and undocumented names fail
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build  # not -q, with which nothing is strict

wheel: $(READY)  ## wheel and sdist, in dist
	$(BIN)/python -m hatchling build -d dist

lock: $(READY)  ## build/requirements.lock: the pins with their hashes, for `pip install --require-hashes` on such a machine
	mkdir -p build
	$(BIN)/pip install -q --dry-run --ignore-installed --only-binary=:all: --report build/pip.json -c $(PINS) '.[serve,data]'
	$(BIN)/python -m tools.supply lock build/pip.json > build/requirements.lock

sbom: $(RUN)  ## build/sbom.json: what is installed in .venv, as a CycloneDX bill of materials
	mkdir -p build
	$(BIN)/python -m tools.supply sbom > build/sbom.json

lint: $(READY)  ## format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint  ## what must hold before a commit: lint and the fast tests
	$(PYTEST) -m "not slow and not campaign and not vllm" $(ARGS)

test: $(READY)  ## all tests but the campaign's and those that need a real vLLM
	$(PYTEST) --no-loadscope-reorder -m "not campaign and not vllm" $(ARGS)

test-gpu: $(READY)  ## what only a card can show, on the tiny models: three minutes; skipped without a card
	$(BIN)/python -c 'import torch; torch.cuda.is_available() or print("no CUDA device is here: every test is skipped")'
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 0 -rs -m gpu tests/gpu $(ARGS)

campaign: $(READY)  ## long trials of what must survive anything, attack included; its summary has counts and minutes
	$(PYTEST) -m campaign $(ARGS)

attack: $(READY)  ## part of it: tens of thousands of hostile files, requests and answers (ARGS="--share 0.1" is quick)
	PYTHONPATH=.:tests/judge:tests/models/policies:tests/toy OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		$(BIN)/python -m qa.attack $(ARGS)

claims: $(RUN)  ## the missing runs behind docs/claims.md, each committed alone, after a table of prices (ARGS="--minutes 20", "--quick")
	nice -n 10 $(BIN)/python -m tools.claims --commit $(ARGS)

matrix: $(READY)  ## each generator as set, edit and with references: its pipeline, adapters, an epoch; the table of docs/policies.md
	PYTHONPATH=.:tests/models/policies:tests/toy:qa/zoo OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		$(BIN)/python -m qa.matrix --write $(ARGS)

lattice: $(READY)  ## what changes bits: remakes the table of docs/verify.md (many minutes)
	PYTHONPATH=src:tests/toy:tests/models/policies:tests/distributed HF_HUB_OFFLINE=1 $(BIN)/python tests/distributed/lattice.py --write

test-vllm: $(READY)  ## the judge against a real vLLM, in an environment of its own
	PYTHON=$(BIN)/python tests/vllm/install.sh
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 0 -m vllm tests/vllm $(ARGS)

test-versions: $(READY)  ## a fast part of the tests at the lowest versions that pyproject.toml allows, and at the newest
	rm -rf $(VERSIONS) && mkdir -p build && $(BIN)/python -m tools.minima > build/minima.txt
	for end in lowest newest; do \
		pins=$$([ $$end = newest ] || echo "-c build/minima.txt"); \
		$(BIN)/python -m venv $(VERSIONS)/$$end; \
		$(VERSIONS)/$$end/bin/pip install -q $$pins -e '.[serve,data]' pytest pytest-xdist scipy; \
		HF_HUB_OFFLINE=1 $(VERSIONS)/$$end/bin/python -m pytest -n $(WORKERS) --dist loadfile -p no:cacheprovider \
			-m "not slow and not campaign and not vllm" $(VERSION_TESTS) $(ARGS); \
	done

clean:  ## remove build products and caches, keep .venv and runs
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -path './$(VENV)' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf $(VENV) $(VERSIONS)

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
	@$(BIN)/pip install -q -c $(PINS) -e '.[serve,data]'
	@touch $@

$(READY): $(RUN)
	@echo "Adding the development tools …"
	@$(BIN)/pip install -q -c $(PINS) -e '.[dev]'
	@touch $@
