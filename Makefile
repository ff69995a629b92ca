# Trine: the commands of the house. Needs only Python 3.11+ with pip and venv.
# PORT, MODEL and FLAGS set what is served: make serve PORT=8123 MODEL=smollm2 FLAGS="--max-num-seqs 32"

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?= smollm2
FLAGS  ?=
STEPS  ?= 10000000
WORKERS ?= 2

BIN := $(VENV)/bin

.PHONY: help serve chat setup test check sim mutants gpu bench docs clean
.DEFAULT_GOAL := help

help:  ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

NATIVE := setup.py $(wildcard trine/kernels/native/src/*) trine/kernels/native/build.py

$(VENV)/.base: pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trine needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; give another one: make serve PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing; on Debian: apt install python3-venv"; exit 1; }
	@echo "installing Trine into $(VENV) (a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "installing the tools of the tests into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

serve: $(VENV)/.base  ## install, fetch the model, serve it on PORT
	@exec $(BIN)/trine serve $(MODEL) --port $(PORT) $(FLAGS)

chat: $(VENV)/.base  ## the same model in this terminal
	@exec $(BIN)/trine chat $(MODEL) $(FLAGS)

setup: $(VENV)/.dev  ## everything for working on the code

test: $(VENV)/.dev  ## all tests that need no GPU: host, CPU, kernels under Triton's interpreter
	@$(BIN)/trine pull smollm2 --quiet || echo "smollm2 could not be fetched: tests on real weights will be skipped and counted"
	@$(BIN)/python tools/check.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/jit -n $(WORKERS) --dist worksteal

check: $(VENV)/.dev  ## format, lint, types, import rules, sizes
	@$(BIN)/ruff format --check trine tests tools
	@$(BIN)/ruff check trine tests tools
	@$(BIN)/lint-imports
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python tools/check.py

sim: $(VENV)/.dev  ## simulate STEPS steps of the engine core, and report
	@$(BIN)/python tools/sim.py --steps $(STEPS) $(if $(filter 10000000,$(STEPS)),--save)

mutants: $(VENV)/.dev  ## break the core on purpose: every break must be noticed
	@$(BIN)/python tools/mutants.py

gpu: $(VENV)/.dev  ## tests that need a GPU; without one they are skipped and say so
	@$(BIN)/python -m pytest tests/gpu -rs

bench: $(VENV)/.base  ## load a running server on PORT and print percentiles
	@$(BIN)/trine bench serve --url http://127.0.0.1:$(PORT) $(FLAGS)

docs: $(VENV)/.dev  ## the generated reference pages
	@$(BIN)/python tools/docs.py

clean:  ## forget the environment and what was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
