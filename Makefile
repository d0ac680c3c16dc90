# make run     train the main job with a static and a dynamic partition and compare them
# make repack-demo  train on four ranks, and on fewer as the model is pruned
# make ops     compile what DeepSpeed compiles for CPUs, before tests need it
# make test    run the test suite
# make test-all  the same with every value of the large matrices (checkpoints, lost ranks)
# make test-every  the same with every combination of these values: hours
# make test-lowest  the quickstart and `dynpipe doctor --numerics` on the lowest torch and DeepSpeed that are supported, in
#              .venv-lowest; downloads a torch with CUDA (TORCH_LOWEST='torch==2.4.0+cpu' where there is such a build)
# make lint    ruff and mypy
# make docs    build docs/ into a site, docs/_build/index.html; a broken link is an error
# make bench   the quick benchmarks, about 8 minutes; rewrites benchmarks/results and the table of docs/results.md
# make bench-full  all benchmarks, a little over two hours on two idle cores
# make gpu     all that one CUDA device can say, in at most ten minutes and without network; writes benchmarks/results/gpu.
#              WHEELS=folder: in a fresh environment made from wheels; DEVICE=cpu: a rehearsal, in outputs/gpu
# make wheels  gathers those wheels in WHEELS (by default: wheels); CUDA_TORCH= leaves torch out
# Each makes the environment in .venv first if it is missing.

PYTHON   ?= python3
TORCH    ?= torch==2.13.0
# Left empty, they are what conf/config.yaml says, or the experiment in ARGS: freezing on 2 ranks.
SCENARIO ?=
RANKS    ?=
# Test files that run at once. Most tests are processes that wait for each other, so two keep two cores busy.
JOBS     ?= 2
ARGS     ?=
# The quickstart with fewer batches: layers freeze early, and are moved after every fourth batch if that pays.
LOWEST_ARGS ?= run.batches=12 run.window=4 'scenario.batches=[2,4]' ds.dynamic_pipeline.rebalance_every=4
# Of wheels that `make gpu` installs; the torch that `make wheels` puts beside them, none if empty.
WHEELS     ?=
CUDA_TORCH ?= $(TORCH)
VENV     := .venv
BIN      := $(VENV)/bin
READY    := $(VENV)/.ready

LOWEST   := .venv-lowest
version   = $(shell $(PYTHON) -c 'import runpy; print(runpy.run_path("dynpipe_ds/_versions.py")["$(1)"])')
TORCH_LOWEST     ?= torch==$(call version,LEAST_TORCH).0
DEEPSPEED_LOWEST ?= deepspeed==$(call version,LEAST_DEEPSPEED)

GPU_VENV := .venv-gpu
# By its path, since environments go in front of PATH below, and the one that is made anew must not make itself.
BASE_PYTHON := $(shell command -v $(PYTHON))
GPU_BIN   = $(if $(WHEELS),$(GPU_VENV)/bin,$(BIN))

# A file's tests share fixtures. In the order of collection the long files do not come last.
PARALLEL  = -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: env ops run repack-demo test test-all test-every test-lowest lint docs bench bench-full gpu gpu-device gpu-env wheels clean
env: $(READY)

# torch goes first and pinned: left to the dependencies, the newest build would come with gigabytes of CUDA.
# Python compiles what it imports; pip would compile all 14,000 files.
$(READY): setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; set PYTHON="; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -e '.[dev]'
	@touch $(READY)

# DeepSpeed finds its compiler's helper (ninja) on the PATH, and keeps what it compiles with the environment that
# it was compiled for.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Without its cache, every process would compile all of torch that it imports.
unexport PYTHONDONTWRITEBYTECODE
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/ops

run: $(READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m scenarios.train \
	  $(if $(SCENARIO),scenario=$(SCENARIO)) $(if $(RANKS),launch.num_accelerators=$(RANKS)) $(ARGS)

# Four ranks prune a model and leave as soon as the others can hold it.
repack-demo: $(READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m scenarios.repack experiment=repack_pruning $(ARGS)

# Before the tests: one of them that ends its processes while they compile would leave a lock for all others.
ops: $(READY)
	$(BIN)/python -m tests.operations

test: ops
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: ops
	$(BIN)/python -m pytest $(PARALLEL) -m "not combination" $(ARGS)

test-every: ops
	$(BIN)/python -m pytest $(PARALLEL) -m "" $(ARGS)

$(LOWEST)/.ready: setup.py dynpipe_ds/_versions.py
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check "$(TORCH_LOWEST)" numpy setuptools
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation "$(DEEPSPEED_LOWEST)"
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -e '.[scenarios]'
	@touch $@

test-lowest: export PATH := $(CURDIR)/$(LOWEST)/bin:$(PATH)
test-lowest: export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(LOWEST)/ops
test-lowest: export OMP_NUM_THREADS := 1
test-lowest: $(LOWEST)/.ready
	$(LOWEST)/bin/python -m dynpipe_ds doctor --numerics
	$(LOWEST)/bin/python -m scenarios.train output_dir=outputs/lowest $(LOWEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.docs-ready
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

$(VENV)/.docs-ready: setup.py $(READY)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -e '.[docs]'
	@touch $@

bench: $(READY)
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-full: $(READY)
	$(BIN)/python -m benchmarks.run --full $(ARGS)

# Nothing is made or downloaded where there is no device.
gpu: STARTED := $(shell date +%s)
gpu: export PATH := $(CURDIR)/$(GPU_BIN):$(PATH)
gpu: gpu-device $(if $(WHEELS),gpu-env,$(READY))
	@$(GPU_BIN)/python -m benchmarks.gpu.main --started $(STARTED) $(ARGS)

gpu-device:
	@$(if $(filter cpu,$(DEVICE)),,$(PYTHON) -m benchmarks.gpu.look)

gpu-env:
	@$(BASE_PYTHON) -m benchmarks.gpu.install $(WHEELS) $(GPU_VENV)

wheels: $(READY)
	$(BIN)/python -m benchmarks.gpu.wheels $(or $(WHEELS),wheels) $(if $(CUDA_TORCH),--torch $(CUDA_TORCH)) $(ARGS)

clean:
	rm -rf $(VENV) $(LOWEST) $(GPU_VENV) build dist *.egg-info outputs docs/_build
