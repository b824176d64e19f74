# Each target sets up what it needs on a fresh machine, then does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What serving needs, and what development needs besides, in one environment.
SERVING := $(VENV)/.serving
DEVELOPMENT := $(VENV)/.development
ARGS ?=
# Tests start hundreds of Python processes: they cache bytecode, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# Test processes: most tests wait for processes of theirs, so there is one more than a small machine has cores.
JOBS ?= 3
PARALLEL := --numprocesses $(JOBS) --dist loadfile
# Left to `make test-all`.
LONG := faults or fuzz or soak or slow

.PHONY: serve unit test test-all test-long test-clients test-sglang test-lm-eval check docs bench bench-path bench-edge bench-engine bench-disagg bench-handlers bench-router bench-multimodal bench-diffusion bench-experts bench-engine-peers reliability machine clean

serve: $(SERVING)
	$(BIN)/baton serve $(ARGS)

# docs/testing.md says what each tier runs.
unit: $(DEVELOPMENT)
	$(BIN)/python -m pytest --numprocesses 4 -p tests.without_torch -m "not (process or torch or slow)" \
		tests/unit tests/contract/test_engine_echo.py tests/contract/test_runtime_memory.py $(ARGS)

test: check machine
	$(BIN)/python -m pytest $(PARALLEL) -m "not ($(LONG) or clients)" $(ARGS)

test-all: test test-long test-clients test-sglang test-lm-eval

test-long: $(DEVELOPMENT) machine
	$(BIN)/python -m pytest $(PARALLEL) -m "$(LONG)" $(ARGS)

# Real clients of the OpenAI and Anthropic APIs, in environments of their own (1 GB).
test-clients: $(DEVELOPMENT) machine
	PYTHON=$(PYTHON) scripts/clients/install.sh .venv-clients
	$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

# Against the real SGLang, on the CPU, in an environment of its own (3 GB).
test-sglang:
	PYTHON=$(PYTHON) scripts/sglang_cpu/install.sh .venv-sglang
	SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-sglang/bin/python -m pytest tests/real_sglang $(ARGS)

# lm-eval through Baton and through transformers, in an environment of its own (800 MB).
test-lm-eval: $(DEVELOPMENT)
	PYTHON=$(BIN)/python scripts/lm-eval-venv.sh .venv-lm-eval
	$(BIN)/python -m pytest tests/e2e/test_lm_eval.py $(ARGS)

check: $(DEVELOPMENT)
	$(BIN)/ruff format --check src tests bench tools
	$(BIN)/ruff check src tests bench tools
	@! $(BIN)/radon cc --min C --show-complexity src bench tools | grep . || { echo "complexity is at most 10"; exit 1; }
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	$(BIN)/python -m tools.generate_docs --check

docs: $(DEVELOPMENT)
	$(BIN)/python -m tools.generate_docs

bench: bench-path bench-edge bench-engine bench-disagg bench-handlers bench-router bench-multimodal bench-diffusion bench-experts

bench-edge: $(DEVELOPMENT)
	$(BIN)/python -m bench.edge $(ARGS)

bench-path: $(DEVELOPMENT)
	$(BIN)/python -m bench.path $(ARGS)

bench-engine: $(DEVELOPMENT)
	$(BIN)/python -m bench.engine $(ARGS)

bench-disagg: $(DEVELOPMENT)
	$(BIN)/python -m bench.disagg $(ARGS)

bench-handlers: $(DEVELOPMENT)
	$(BIN)/python -m bench.handlers $(ARGS)

# Ten thousand requests in every layout, while workers are killed, frozen and cut off.
reliability: $(DEVELOPMENT) machine
	$(BIN)/python -m bench.reliability $(ARGS)

bench-router: $(DEVELOPMENT)
	$(BIN)/python -m bench.router $(ARGS)

bench-multimodal: $(DEVELOPMENT)
	$(BIN)/python -m bench.multimodal $(ARGS)

bench-diffusion: $(DEVELOPMENT)
	$(BIN)/python -m bench.diffusion $(ARGS)

# Plans are compared with SGLang's where `make test-sglang` has installed it.
bench-experts: $(DEVELOPMENT)
	$(BIN)/python -m bench.experts $(ARGS)

# Other engines to compare with, each in an environment of its own under .bench/ (4.4 GB).
bench-engine-peers:
	scripts/bench-peers.sh $(ARGS)

# Where we may: Debian packages for the cluster tests, which are skipped without them, and inotify instances, of which
# discovery by files takes one for each endpoint (Linux allows 128, which is a dozen of the systems that tests start).
machine:
	@if [ "$$(id -u)" = 0 ] && [ "$$(cat /proc/sys/fs/inotify/max_user_instances 2>/dev/null || echo 1024)" -lt 1024 ]; then \
		echo 1024 > /proc/sys/fs/inotify/max_user_instances || true; \
	fi
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v etcd && command -v nats-server; } >/dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends etcd-server nats-server >/dev/null; \
	fi

$(SERVING): pyproject.toml constraints.txt
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) torch
	@touch $@

$(DEVELOPMENT): pyproject.toml constraints.txt
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) torch,nixl,bench,dev
	@touch $@ $(SERVING)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
