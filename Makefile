# make serve    set everything up and serve the default model on 127.0.0.1:8000
# make test     set everything up and run all tests
#
# Variables
#   PYTHON=python3       the Python (3.11 or newer) that .venv is made with
#   TORCH_INDEX=URL      a package index with CPU-only torch wheels, asked besides the usual one
#   MODEL=FILE           serve this .gguf file, folder or ORG/NAME instead of the default model
#   ARGS="..."           further arguments for tidegate, pytest or the benchmarks
#   NAME=...             run one benchmark: tests/benchmarks/bench_NAME.py

PYTHON ?= python3
TORCH_INDEX ?=
MODEL ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
NAME ?=
BENCHMARKS := $(patsubst tests/benchmarks/bench_%.py,%,$(wildcard tests/benchmarks/bench_*.py))

# One word for the shell, whatever is in it.
quoted = '$(subst ','\'',$(1))'

# A set-up is fresh while these two files hold what they held when it was made, whatever their dates.
KEY := $(shell cat pyproject.toml constraints-dev.txt | cksum | tr -d ' ')
READY := $(VENV)/.serve-$(KEY)
READY_DEV := $(VENV)/.dev-$(KEY)

PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check \
	--constraint constraints-dev.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: serve test test-thorough soak check lint format model bench claims peers bench-cpu wheel-test coverage clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,9p'

serve: $(READY)
	@exec $(BIN)/tidegate serve $(if $(MODEL),$(call quoted,$(MODEL))) $(ARGS)

test: $(READY_DEV) model
	$(BIN)/python -m pytest $(ARGS)

test-thorough: $(READY_DEV) model
	TIDEGATE_THOROUGH=1 $(BIN)/python -m pytest --timeout 3600 $(ARGS)

# The longest runs: 10,000 clients that leave, memory and speed over thousands of requests. Prints figures.
soak: $(READY_DEV) model
	TIDEGATE_SOAK=1 $(BIN)/python -m pytest tests/soak -s --timeout 3600 $(ARGS)

check: lint
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(READY)
	@$(BIN)/tidegate pull

# NAME=quality runs tests/benchmarks/bench_quality.py alone.
bench: $(READY_DEV) model
	@for name in $(or $(NAME),$(BENCHMARKS)); do \
		echo "== $$name"; $(BIN)/python -m tests.benchmarks.bench_$$name $(ARGS) || exit 1; \
	done

# The field's claims against their baselines on this machine, idle: a table, build/claims/claims.json and a plot.
claims: $(READY_DEV) model
	$(BIN)/python -m tests.benchmarks.claims $(ARGS)

# llama.cpp and OpenVINO with their forms of the default model, under build/peers; about 20 minutes, once.
peers: $(READY_DEV) model
	$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL=$(TORCH_INDEX) )$(BIN)/python -m tests.benchmarks.cpu.peers $(ARGS)

# Tidegate beside those peers, idle: a table, and JSON under benchmarks/. ARGS="--rows prefill,one" for some rows.
bench-cpu: $(READY_DEV) model
	$(BIN)/python -m tests.benchmarks.cpu $(ARGS)

# Builds the wheel, installs it into an environment of its own and streams a chat from it.
wheel-test: $(READY_DEV) model
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python .ci/wheel_test.py

coverage: $(READY_DEV) model
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage report

clean:
	rm -rf $(VENV) build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
		sys.exit(0 if v >= (3, 11) else "Tidegate needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.11" % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }  # half an environment would look whole

$(READY): | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@rm -f $(VENV)/.serve-*
	@touch $@

$(READY_DEV): | $(BIN)/python
	$(PIP_INSTALL) --editable '.[dev]'
	@rm -f $(VENV)/.serve-* $(VENV)/.dev-*
	@touch $(READY) $@
