# Each target sets up what it needs on a fresh machine, then does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: serve test test-fast test-sglang check docs bench bench-path bench-engine bench-disagg bench-handlers bench-router bench-engine-peers cluster-packages clean

serve: $(STAMP)
	$(BIN)/baton serve $(ARGS)

test: check cluster-packages
	$(BIN)/python -m pytest $(ARGS)

test-fast: check
	$(BIN)/python -m pytest -m "not e2e" $(ARGS)

# Against the real SGLang, on the CPU, in an environment of its own (3 GB).
test-sglang:
	PYTHON=$(PYTHON) scripts/sglang_cpu/install.sh .venv-sglang
	SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-sglang/bin/python -m pytest tests/real_sglang $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check src tests bench tools
	$(BIN)/ruff check src tests bench tools
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	$(BIN)/python -m tools.generate_docs --check

docs: $(STAMP)
	$(BIN)/python -m tools.generate_docs

bench: bench-path bench-engine bench-disagg bench-handlers bench-router

bench-path: $(STAMP)
	$(BIN)/python -m bench.path $(ARGS)

bench-engine: $(STAMP)
	$(BIN)/python -m bench.engine $(ARGS)

bench-disagg: $(STAMP)
	$(BIN)/python -m bench.disagg $(ARGS)

bench-handlers: $(STAMP)
	$(BIN)/python -m bench.handlers $(ARGS)

bench-router: $(STAMP)
	$(BIN)/python -m bench.router $(ARGS)

# Other engines to compare with, each in an environment of its own under .bench/ (4.4 GB).
bench-engine-peers:
	scripts/bench-peers.sh $(ARGS)

# Debian packages for the cluster tests, where we may install them; without them those tests are skipped.
cluster-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v etcd && command -v nats-server; } >/dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends etcd-server nats-server >/dev/null; \
	fi

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev,bench,torch]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
