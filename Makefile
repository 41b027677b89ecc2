# Every goal sets itself up: a fresh machine needs python3.11, gcc and make. `make -k check` goes on after a failure.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.stamp
VLLM_STAMP := .venv-vllm/.stamp
PROTOS := $(wildcard protos/kv/v1/*.proto)
TESTS := $(wildcard tests/unit tests/contract tests/property tests/simulation tests/compat tests/integration tests/plugins)
CHECKS := check-lint check-types check-imports check-generated check-tidy check-deploy

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv gen check $(CHECKS) test test-unit test-gpu bench demo demo-pd clean

help:  ## show the goals
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv; then .venv/bin/kvservice is the command line

# UCX goes first: the build of the second extension looks for its headers in the environment.
$(STAMP): pyproject.toml setup.py $(wildcard kvservice/native/*.[ch] kvservice/native/ucx/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet 'libucx-cu12>=1.15'
	$(BIN)/python -m pip install --quiet -e '.[server,dev,ucx]'
	touch $@

$(VLLM_STAMP): $(STAMP) engine_plugins/demo/vllm_env.py
	$(BIN)/python engine_plugins/demo/vllm_env.py .venv-vllm
	touch $@

gen: $(STAMP)  ## write kvproto from protos/ and kvclient.sync from kvclient.aio
	$(BIN)/python protos/generate.py
	$(BIN)/python client/generate.py

check: $(CHECKS)  ## every check that runs no service: style, types, architecture, generated code, deploy files

check-lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

check-types: $(STAMP)
	$(BIN)/mypy

check-imports: $(STAMP)
	$(BIN)/lint-imports

check-generated: $(STAMP)
	$(BIN)/python protos/generate.py --check
	$(BIN)/python client/generate.py --check
	$(BIN)/python -m compileall -q protos/kvproto client/kvclient/sync

check-tidy: $(STAMP)
	$(BIN)/pytest -q tests/tidy

check-deploy: $(STAMP)
	deploy/check $(BIN)

test: $(STAMP) $(if $(WITHOUT_VLLM),,$(VLLM_STAMP))  ## every test, with real daemons and vLLM (WITHOUT_VLLM=1 leaves vLLM out)
	$(BIN)/pytest $(TESTS) $(if $(WITHOUT_VLLM),-m 'not vllm')

test-unit: $(STAMP)  ## the tests that need neither network nor processes, in seconds
	$(BIN)/pytest $(wildcard tests/unit tests/contract tests/property)

test-gpu: $(STAMP)  ## the tests that need a GPU (VLLM=path/to/python: an environment with torch, pytest and this project)
	$(if $(VLLM),$(VLLM),$(BIN)/python) -m pytest tests/gpu

bench: $(STAMP)  ## measure; writes build/bench.json
	mkdir -p build
	$(BIN)/python -m tests.bench

demo: $(STAMP)  ## prefill to decode with real vLLM through one daemon (VLLM=path/to/python: a vLLM that is there)
	$(BIN)/python engine_plugins/demo/main_job.py $(if $(VLLM),--vllm $(VLLM))

demo-pd: $(STAMP)  ## prefill and decode as two vLLM servers, KV straight from engine to engine (VLLM= as for demo)
	$(BIN)/python engine_plugins/demo/pd_job.py $(if $(VLLM),--vllm $(VLLM))

clean:  ## remove what was built, but not the environments
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find kvservice client engine_plugins protos tests -name __pycache__ -prune -exec rm -rf {} +
