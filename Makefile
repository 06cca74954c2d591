# `make help` lists what there is. Every target makes its own .venv first.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# The CPU build; a bare `torch` may bring gigabytes of CUDA packages.
TORCH ?= torch==2.13.0

.PHONY: help demo test smoke lit bench gpu-bundle lint types report-size clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/gossamer-opt: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(BIN)/gossamer-opt  ## run the pruned transformer: report, agreement, latency
	$(BIN)/python examples/pruned_transformer.py

test: $(BIN)/gossamer-opt  ## all tests: smoke first, then pytest and lit
	$(BIN)/python -m pytest tests/test_smoke.py
	$(BIN)/python -m pytest
	$(BIN)/lit --quiet tests/lit

smoke: $(BIN)/gossamer-opt  ## seconds: does it compile anything at all
	$(BIN)/python -m pytest tests/test_smoke.py

lit: $(BIN)/gossamer-opt  ## the passes' tests
	$(BIN)/lit --verbose tests/lit

bench: $(BIN)/gossamer-opt  ## measure linear layers and MiniLM against the contenders, 1 and 2 threads
	$(BIN)/python -m benchmarks --workload linear --threads 1,2 --out benchmarks/results/linear.json
	$(BIN)/python -m benchmarks --workload minilm --threads 1,2 --out benchmarks/results/minilm.json

gpu-bundle: $(BIN)/gossamer-opt  ## build/gpu-bundle: kernels, checks and timings for a machine with a GPU; a dry run here
	$(BIN)/python -m benchmarks.gpu.bundle build/gpu-bundle
	$(BIN)/python build/gpu-bundle/run.py --dry-run

lint: $(BIN)/gossamer-opt  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads packages from the file system, so the package map is laid out as links.
types: $(BIN)/gossamer-opt  ## mypy
	@mkdir -p build/types/gossamer
	@ln -sfn $(CURDIR)/gossamer/*.py $(CURDIR)/gossamer/py.typed build/types/gossamer/
	@for room in backend sparsity passes dialects runtime; do ln -sfn $(CURDIR)/$$room build/types/gossamer/$$room; done
	MYPYPATH=build/types $(BIN)/mypy -p gossamer
	MYPYPATH=build/types $(BIN)/mypy --explicit-package-bases benchmarks examples

report-size:  ## lines of code by room
	@for room in gossamer backend sparsity passes dialects runtime tests examples benchmarks; do \
	  printf '%-12s %6d\n' $$room "$$(find $$room -name '*.py' -o -name '*.mlir' | xargs cat | wc -l)"; done

clean:  ## remove the venv and everything built
	rm -rf $(VENV) build *.egg-info
