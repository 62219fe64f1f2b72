# Every target sets up .venv first; nothing outside this folder is touched.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
EXTRAS := dev,examples,jax,transformers,data,tensorboard,web
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test unit lint bench headline soak clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv and install everything into it

# Where no NVIDIA driver is found the CPU build of torch is taken if the index has one: it is 2 GB smaller.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "fusion-p2p needs Python 3.11; say: make PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (torch is large: a few minutes the first time) ..."
	@$(BIN)/pip install -q --upgrade "pip>=24" -c constraints.txt
	@command -v nvidia-smi >/dev/null 2>&1 || $(BIN)/pip install -q "torch==2.13.0+cpu" 2>/dev/null || \
	  echo "no CPU-only build of torch on this index; taking the default build"
	@$(BIN)/pip install -q -c constraints.txt setuptools wheel
	@PYTHONWARNINGS=ignore $(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $@

demo: setup  ## train GPT-2 on a swarm of 4 volunteer processes on this machine (5 minutes)
	@$(BIN)/fusion-run train examples/gpt2.toml --local 4 --run-dir runs/demo-$$(date +%Y%m%d-%H%M%S)

# Exit code 1: tests failed. A few that start processes are tried once more without neighbours, and named.
test: setup  ## all tests (at most 20 minutes on 2 cores)
	@rm -f .pytest_cache/v/cache/lastfailed
	$(BIN)/python -m pytest tests -o addopts=-q -m "not soak" -n 3 --dist loadfile || \
	  { test $$? -eq 1 && $(BIN)/python -m tests.alone; }

unit: setup  ## unit tests only (no sockets, under a minute)
	$(BIN)/python -m pytest tests/unit -m "not soak"

lint: setup  ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## every table of bounds, measured here
	$(BIN)/python -m tests.bench

headline: setup  ## ours beside torch.distributed.pipelining on a shaped network (root, 20 minutes)
	@$(BIN)/python -m tests.bench.netlab --headline --save headline; code=$$?; $(BIN)/python -m tests.bench.table; exit $$code

# The packages of W&B, which `make test` does without, are tried here.
soak: setup  ## the long checks
	@$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[wandb]"
	$(BIN)/python -m pytest tests/unit/test_checkpoint.py -k weights_and_biases
	$(BIN)/python -m pytest tests -m soak --timeout 7200

clean:  ## remove .venv and build products
	rm -rf .venv build dist *.egg-info
