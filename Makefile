# Every target that needs Python makes the checkout's own environment first (.venv); a second call does nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all unit test-pythons lint check format bench support-matrix dynamo dynamo-test ray-test sglang-test sglang-table gpu-kit reference clean

help:  ## list the targets
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'
	@echo '  ARGS="…" goes to the command behind a target, as in: make demo ARGS="--help"'

setup:  ## make .venv: vLLM for this machine, kvbm, the tools
	@$(PYTHON) scripts/setup_venv.py

demo: setup  ## set everything up and run the prefix-reuse experiment on real vLLM servers
	@$(BIN)/kvbm demo $(ARGS)

test: lint  ## set everything up and pass the checks and tests that every change needs
	@$(BIN)/python scripts/run_tests.py $(ARGS)

test-all: setup  ## the longer tests that `make test` leaves out: slow ones, the V2 runner, SGLang
	@$(BIN)/python scripts/run_tests.py --rest $(ARGS)

unit: setup  ## the tests that start no engine; those of one part: make unit ARGS=policy
	@$(BIN)/python scripts/unit_tests.py $(ARGS)

test-pythons: setup  ## the tests that need no engine and no torch, on Python 3.10 and 3.13 where installed
	@$(BIN)/python scripts/other_pythons.py

check: lint  ## style, types, import rules, tidiness
	@$(BIN)/python -m pytest -q tests/unit/test_tidy.py tests/unit/test_swallowed_errors.py tests/unit/test_imports.py tests/unit/test_architecture.py

lint: setup  ## style, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; echo "run: make format"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup  ## put the code into its standard form
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

bench: setup  ## measure the budgets of the design and print them as a table
	@$(BIN)/kvbm bench $(ARGS)

support-matrix: setup  ## the engine tests on every supported vLLM; writes docs/reference/support-matrix.md
	@$(BIN)/python scripts/support_matrix.py $(ARGS)

dynamo: setup  ## the same experiment through NVIDIA's Dynamo: a frontend, routers, prefill and decode apart
	@$(BIN)/python scripts/dynamo_demo.py $(ARGS)

dynamo-test: setup  ## the tests under NVIDIA's Dynamo; writes their row of docs/reference/support-matrix.md
	@$(BIN)/python scripts/dynamo_test.py $(ARGS)

ray-test: setup  ## the tests of engines whose ranks are Ray's actors; writes their row of docs/reference/support-matrix.md
	@$(BIN)/python scripts/ray_test.py $(ARGS)

sglang-test: setup  ## the tests under SGLang; writes their row of docs/reference/support-matrix.md
	@$(BIN)/python scripts/sglang_test.py $(ARGS)

sglang-table: setup  ## what becomes of wrong KV under SGLang: its own files and KVBM, as a table
	@$(BIN)/python scripts/sglang_venv.py
	@$(BIN)/python scripts/sglang_table.py $(ARGS)

gpu-kit: setup  ## pack what a CUDA machine without a network needs for benchmarks.gpu_kit; ARGS=--rehearse runs it here
	@$(BIN)/python scripts/gpu_kit.py $(ARGS)

reference: setup  ## write the generated pages of docs/reference, the dashboard, and the snapshot of the public surface
	@$(BIN)/python -m kvbm.settings.reference > docs/reference/settings.md
	@$(BIN)/python -m kvbm.observe.reference > docs/reference/metrics.md
	@$(BIN)/python scripts/dashboard.py > deploy/grafana/kvbm.json
	@PYTHONPATH=tests $(BIN)/python -m rigs.public_surface > tests/unit/public_surface.txt

clean:  ## remove environments, caches and build results
	rm -rf $(VENV) .venvs .gpu-kit .gpu-kit-rehearsal build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
