# Every command of the README. Each works in a fresh clone where nothing but Python 3.11-3.13 is installed.
#   make tune PYTHON=python3.12        another interpreter
#   make tune TUNE_RANKS=4 TUNE_ARGS='--model qwen3-30b-a3b --ep 4 --device cpu'

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

TUNE_RANKS ?= 2
TUNE_ARGS ?= --model olmoe-1b-7b --ep 2 --dtype bf16 --policy eager --buckets 1:256 --device cpu --store .tuned --json .tuned/summary.json
# Threads of one rank; torchrun would set 1 anyway, and say so.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

ENGINES := .venv-sglang/.ready .venv-vllm/.ready

.PHONY: help tune test test-fast test-random test-sglang test-vllm test-vllm-tree check format clean

help:
	@echo 'make tune       tune OLMoE-1B-7B on two CPU ranks'
	@echo 'make test       everything that runs without a GPU'
	@echo 'make test-fast  the same without the serving engines'
	@echo 'make test-random  the property tests on other examples in each run'
	@echo 'make test-sglang  the SGLang plugin in the real engine, on CPU'
	@echo 'make test-vllm  the vLLM plugin in the real engine, on CPU'
	@echo 'make check      ruff and mypy alone;  make format  lets ruff rewrite'
	@echo 'make clean      remove the environment, the tuned entries and the caches'

tune: $(VENV)/.core
	@mkdir -p .tuned
	$(BIN)/torchrun --standalone --nproc-per-node $(TUNE_RANKS) -m moe_dist.tune $(TUNE_ARGS)

# Tests of a served engine run in environments of their own, which are installed while the other tests run: pip waits for the network, they
# compute. pip says nothing unless it fails; a failure of either ends `make test` with an error, after what has begun by then.
test:
	$(MAKE) -j 3 test-fast $(ENGINES)
	$(MAKE) -j 1 test-sglang test-vllm

test-fast: check
	$(BIN)/python -m pytest -n auto -q -m 'not gpu and not engine'

# `make test` gives the Hypothesis tests the same examples each time; this gives them ten times as many, other ones in each run.
test-random: $(VENV)/.test
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -n auto -q --timeout=3600 -m hypothesis

# Each start of an engine is a minute of imports on one core: two at a time.
test-sglang: .venv-sglang/.ready
	.venv-sglang/bin/python -m pytest -n 2 --dist worksteal -q -m engine tests/plugins/sglang

test-vllm: .venv-vllm/.ready
	.venv-vllm/bin/python -m pytest -n 2 --dist loadfile -q -m engine tests/plugins/vllm

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The environment, in two stages: what tuning needs, and what tests need on top. A stamp is written last, so that an
# interrupted install is done again; a changed requirement makes both anew, from nothing, so that none lingers. The doctor
# runs before the tests' packages come in: what the core needs, the core declares.
$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Python %d.%d is not supported; name a Python of 3.11 to 3.13: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	$(BIN)/moe-dist doctor --store $(VENV)/doctor
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

.venv-sglang/.ready: tests/plugins/sglang/environment.sh tests/plugins/sglang/requirements.txt pyproject.toml constraints.txt
	tests/plugins/sglang/environment.sh $(PYTHON) .venv-sglang
	@touch $@

# All of it over the Python of a later vLLM, which has no build for CPUs yet; test-vllm runs a small part so.
VLLM_TREE ?= 0.33.0
test-vllm-tree: .venv-vllm/.ready
	.venv-vllm/bin/python tests/plugins/vllm/make_env.py .venv-vllm --tree $(VLLM_TREE)
	PYTHONPATH=$(CURDIR)/.venv-vllm/tree-$(VLLM_TREE) VLLM_TARGET_DEVICE=cpu .venv-vllm/bin/python -m pytest -n 2 --dist loadfile -q -m engine tests/plugins/vllm

.venv-vllm/.ready: tests/plugins/vllm/make_env.py pyproject.toml constraints.txt
	$(PYTHON) tests/plugins/vllm/make_env.py .venv-vllm
	@touch $@

clean:
	rm -rf $(VENV) .venv-sglang .venv-vllm .tuned .mypy_cache .ruff_cache
