# One door. `make demo` trains, `make test` tests; each sets up what it needs.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# The pinned set that CI uses. CONSTRAINTS= installs the newest instead.
CONSTRAINTS ?= constraints.txt
CONSTRAIN := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
TORCH := $(if $(CONSTRAINTS),$(shell grep '^torch==' $(CONSTRAINTS)),torch)
# The index of the torch build: cu126 where a GPU or a driver is too old for PyPI's build, else PyPI.
# TORCH_INDEX= takes PyPI's in any case; another one is installed over what is there.
TORCH_INDEX ?= $(shell scripts/torch-index.sh)
PYTEST := $(BIN)/python -m pytest
# Files of tests at the same time: they start processes, and wait for them most of the time. Whole
# files, because the tests of one share a training; in their order, because the longest come first.
JOBS ?= 3
BY_FILE := --dist loadfile --no-loadscope-reorder --durations=40
# How long each test took, for scripts/durations.py.
TIMES := build/test-times
# Thousands of processes import llmx in the tests: compiled once, not in each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-real-data nightly fast test-oldest check fuzz chaos site golden behaviour behaviour-record bench gpu wheels clean venv system again


help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: venv ## set up, then train the bundled demo (GPU if there is one, else two CPU ranks)
	$(BIN)/python -m llmx
	@echo
	@echo 'Next: . $(BIN)/activate; python -m llmx --help; python -m llmx help KEY (say, optim.lr)'
	@echo 'Tab completion: eval "$$(llmx completion bash)"   (or zsh; fish: llmx completion fish | source)'

test: system venv ## set up, then run the tests (clusters of network namespaces need root)
	$(PYTEST) -n $(JOBS) --dist loadgroup --junitxml=$(TIMES)/quick.xml -m "not deepspeed and not cluster and not chaos and not wheel and not long and not nightly"
	$(PYTEST) -n $(JOBS) $(BY_FILE) --junitxml=$(TIMES)/slow.xml -m "(deepspeed or wheel or cluster or chaos or long) and not nightly"

test-real-data: system venv ## the tests that need real data sets (LLMX_REAL_DATA=DIR)
	$(PYTEST) -n $(JOBS) --dist load --maxschedchunk 1 --durations=40 -m "real_data and not nightly"

nightly: system venv ## what does not run for every landing (with LLMX_REAL_DATA=DIR, its real data sets, too)
	$(PYTEST) -n $(JOBS) $(BY_FILE) -m nightly

fast: venv ## the quick tests: no DeepSpeed, no clusters, no sweeps
	$(PYTEST) -n $(JOBS) --dist loadgroup

# The oldest versions that pyproject.toml allows, in an environment of its own (about 6 GB: PyPI has
# old torch with CUDA only). The tests of ranks, and a training of two ranks at ZeRO-3.
OLDEST := .venv-oldest
test-oldest: ## the lower bounds of the dependencies: install them, test ranks and a small training
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet -c constraints-oldest.txt -e . pytest pytest-timeout hypothesis
	$(OLDEST)/bin/python -m pytest -q tests/unit/test_train_*.py tests/unit/test_compose.py tests/unit/test_config_build.py
	$(OLDEST)/bin/python -m llmx hardware=cpu2 zero=stage3 task.steps=20 run_dir=$(OLDEST)/run

check: venv site ## format, lint, types, layers, sizes, links of the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/sizes.py --check
	$(BIN)/python scripts/names.py --check

fuzz: venv ## random command lines, config files and hostfiles through the command line (COUNT=2000 SEED=1)
	$(BIN)/python -m tests.fuzz --count $(or $(COUNT),2000) --seed $(or $(SEED),1)

# Faults of `make chaos`, and the seed of what strikes when.
N ?= 30
SEED ?= 1
SETUP ?= sft
chaos: system venv ## hit a long training with N faults on a cluster (N=200 SEED=7 SETUP=rollouts), record it in benchmarks/results
	$(BIN)/python -m tests.chaos --setup $(SETUP) --faults $(N) --seed $(SEED) --docs

# Strict: a link to a page or a heading that is not there is an error.
site: venv ## the documentation as pages with a search: build/site/index.html
	rm -rf build/pages && mkdir -p build/pages
	git ls-files '*.md' ':!tests' | xargs cp --parents --target-directory=build/pages
	$(BIN)/python -m llmx.cli.help > build/pages/docs/config.md
	$(BIN)/python -m llmx.failures.page > build/pages/docs/failures.md
	$(BIN)/zensical build --strict --config-file mkdocs.yml
	@echo 'build/site/index.html opens from disk. The search wants a server: python3 -m http.server -d build/site'

golden: venv ## record the golden files anew, on purpose
	LLMX_RECORD_GOLDEN=1 $(PYTEST) -q tests/unit
	git --no-pager diff --stat -- tests/golden

# Four to six minutes on two quiet cores. ONLY="sft data/labelled": the cases with such a name.
behaviour: venv ## run small trainings and preparations; compare their results with the recorded ones, bit for bit
	$(BIN)/python -m tests.behaviour compare $(if $(ONLY),--only $(ONLY))

behaviour-record: venv ## record these results anew, on purpose (before a redesign: on the commit before it)
	$(BIN)/python -m tests.behaviour record

bench: venv ## start-up, throughput, tokenizing and checkpoints against what others use
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/zero3_after_eval.py
	$(BIN)/python benchmarks/throughput.py sft
	$(BIN)/python benchmarks/throughput.py lora --only defaults
	$(BIN)/python benchmarks/throughput.py dpo --only "reference once"
	$(BIN)/python benchmarks/throughput.py grpo
	$(BIN)/python benchmarks/tokenization.py
	$(BIN)/python benchmarks/checkpoint_stall.py

# Measured with .venv where there is one, else with PYTHON and what is installed there.
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
# PARTS="paths rl": these parts anew. OUT=DIR: the table. ARGS=--pretend: shrunken, also on a CPU.
gpu: ## what the GPUs of this machine do, an hour for all: parts that have not been measured; benchmarks/README.md
	$(GPU_PYTHON) -m benchmarks.gpu $(PARTS) $(if $(OUT),--out $(OUT)) $(ARGS)

# What llmx needs and an image with torch, transformers, peft and accelerate lacks. The compiled ones
# are for FOR, the Python of that image.
WHEELS := build/wheels
FOR ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PURE := annotated-types antlr4-python3-runtime deepspeed einops hjson hydra-core markdown-it-py mdurl \
	omegaconf py-cpuinfo pydantic pygments rich typing-inspection
COMPILED := msgpack ninja pydantic-core
wheels: ## wheels of what an image with torch, transformers, peft, accelerate lacks (FOR=3.12: its Python)
	rm -rf $(WHEELS)
	$(PYTHON) -m pip wheel --quiet --no-deps -c constraints.txt --wheel-dir $(WHEELS) $(PURE)
	$(PYTHON) -m pip download --quiet --no-deps -c constraints.txt --dest $(WHEELS) --only-binary :all: \
		--python-version $(FOR) --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 $(COMPILED)
	@du -sk $(WHEELS) | awk '$$1 > 65536 {print "over 64 MiB"; exit 1}'
	@echo 'There, in a copy of this directory, without an index; then make gpu:'
	@echo 'python3 -m pip install --no-index --no-deps $(WHEELS)/*.whl'

venv: $(VENV)/.installed

# torch first: its pin decides the build, so that nothing later drags in another one. The suffix
# (+cu126) keeps pip from taking the build that is there for satisfied.
$(VENV)/.installed: pyproject.toml constraints.txt $(if $(filter undefined file,$(origin TORCH_INDEX)),,again)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "llmx needs Python 3.10 or newer; set PYTHON=python3.11, say"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || scripts/install-system-packages.sh --minimal
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),'$(TORCH)$(if $(CONSTRAINTS),+$(notdir $(TORCH_INDEX)))' --index-url $(TORCH_INDEX),$(TORCH))
	$(BIN)/python -m pip install --quiet $(CONSTRAIN) -e ".[dev]"
	@# Aside: DeepSpeed imports mlflow where it is installed, which doubles the time of its import.
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/trackers $(CONSTRAIN) \
		alembic mlflow-skinny sqlalchemy
	@# Aside as well: peft imports bitsandbytes where it is installed, at twice the time.
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/quantized \
		$(CONSTRAIN) bitsandbytes || echo "no bitsandbytes for this machine: its tests are skipped"
	touch $@

again:

system:
	scripts/install-system-packages.sh

clean: ## remove the virtual environment and caches; runs under outputs/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build
