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
# What fails runs once more, alone: docs/testing.md.
TWICE := scripts/pytest-twice.sh
# Ends with an error for a broken link (not with --quiet, which drops warnings). The advice of the theme is left out.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
# Left to `make test-all`.
LONG := faults or fuzz or soak or slow

.PHONY: serve unit test test-all test-rest environments test-long test-clients test-view test-deploy test-sglang test-sglang-gpu test-gpu test-lm-eval check docs bench bench-path bench-edge bench-timelines bench-engine bench-disagg bench-handlers bench-router bench-multimodal bench-diffusion bench-experts bench-gpu bench-gpu-handoff bench-sglang-gpu bench-engine-peers reliability machine inotify emulator clean

serve: $(SERVING)
	$(BIN)/baton serve $(ARGS)

# docs/testing.md says what each tier runs.
unit: $(DEVELOPMENT)
	$(TWICE) $(BIN)/python --numprocesses 4 -p no:schemathesis -p no:anyio -p tests.without_torch -m "not (process or torch or slow)" \
		tests/unit tests/contract/test_engine_echo.py tests/contract/test_runtime_memory.py $(ARGS)

test: check machine
	$(TWICE) $(BIN)/python $(PARALLEL) -m "not ($(LONG) or clients or view or deploy)" $(ARGS)

test-all: test test-rest

# What `make test` leaves out.
test-rest: test-long test-clients test-view test-deploy test-sglang test-lm-eval

# The environments of these targets, which install them otherwise: CI does so while `make test` runs.
environments: $(DEVELOPMENT)
	PYTHON=$(PYTHON) scripts/clients/install.sh .venv-clients
	PYTHON=$(PYTHON) scripts/deploy-venv.sh .venv-deploy
	PYTHON=$(PYTHON) scripts/sglang_cpu/install.sh .venv-sglang
	PYTHON=$(BIN)/python scripts/lm-eval-venv.sh .venv-lm-eval

test-long: $(DEVELOPMENT) machine emulator
	$(TWICE) $(BIN)/python $(PARALLEL) --durations 20 -m "($(LONG)) and not deploy" $(ARGS)

# Real clients of the OpenAI and Anthropic APIs, and load tools, in environments of their own (3 GB).
test-clients: $(DEVELOPMENT) machine
	PYTHON=$(PYTHON) scripts/clients/install.sh .venv-clients
	$(TWICE) $(BIN)/python -m clients tests/clients $(ARGS)

# The web view in a real Chromium: Debian's package, which is installed here as root, and axe-core from npm.
test-view: $(DEVELOPMENT) machine
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || \
		{ echo "install chromium: apt-get install chromium"; exit 1; }
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) torch,nixl,bench,dev,view-tests
	[ -f node_modules/axe-core/axe.min.js ] || npm install --silent --no-save --no-package-lock axe-core@4 || true
	$(TWICE) $(BIN)/python -m view tests/view $(ARGS)

# Manifests, chart, units and images, checked with tools in an environment of their own (280 MB); needs kubectl.
test-deploy: $(DEVELOPMENT)
	PYTHON=$(PYTHON) scripts/deploy-venv.sh .venv-deploy
	$(TWICE) $(BIN)/python -m deploy tests/deploy $(ARGS)

# Against the real SGLang, on the CPU, in an environment of its own (3 GB).
test-sglang:
	PYTHON=$(PYTHON) scripts/sglang_cpu/install.sh .venv-sglang
	SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TWICE) .venv-sglang/bin/python --numprocesses 2 --dist loadfile tests/real_sglang $(ARGS)

# The same on a GPU (docs/testing.md). SGLANG_GPU is the environment: without a network scripts/sglang_gpu/unpack.sh makes it first.
SGLANG_GPU ?= .venv-sglang-gpu
SGLANG_GPU_JOBS ?= 6
test-sglang-gpu:
	[ -f $(SGLANG_GPU)/env.sh ] || PYTHON=$(PYTHON) scripts/sglang_gpu/install.sh $(SGLANG_GPU)
	. $(SGLANG_GPU)/env.sh && python -m pytest -vv -W default --numprocesses $(SGLANG_GPU_JOBS) --dist loadfile tests/real_sglang $(ARGS)

# The built-in engine on a GPU (docs/testing.md), with the packages that python3 has: warnings are not errors here. Without a network
# scripts/gpu/unpack.sh brings what is missing.
GPU_JOBS ?= 8
GPU_KERNELS := tests/torch/gpu tests/torch/test_core_overlap.py tests/torch/test_sampler.py tests/unit/engine_kit/test_cuda.py
GPU_ENGINE := tests/torch/test_exact.py tests/torch/test_engine_contract.py tests/torch/test_engine.py tests/torch/test_commands.py \
	tests/torch/test_core.py tests/torch/test_guided.py tests/torch/test_sparse.py tests/torch/test_expert_engine.py \
	tests/torch/test_diffusion_exact.py tests/torch/test_diffusion_engine.py
GPU_HANDOFF := tests/unit/transfer/test_gpu_memory.py tests/unit/transfer/test_transports.py tests/torch/test_handoff.py \
	tests/e2e/test_disaggregated.py tests/e2e/test_disagg_cancellation.py tests/e2e/test_disagg_faults.py
GPU_TESTS ?= $(GPU_KERNELS) $(GPU_ENGINE) $(GPU_HANDOFF)
# These need a prefill that takes long enough to be left.
GPU_TOO_FAST := in_prefill or queue_of_late_prefills
test-gpu: inotify
	$(PYTHON) -m pytest -p no:cacheprovider -o filterwarnings=default --numprocesses $(GPU_JOBS) --dist loadfile -k "not ($(GPU_TOO_FAST))" $(GPU_TESTS) $(ARGS)

# lm-eval through Baton and through transformers, in an environment of its own (800 MB).
test-lm-eval: $(DEVELOPMENT)
	PYTHON=$(BIN)/python scripts/lm-eval-venv.sh .venv-lm-eval
	$(TWICE) $(BIN)/python tests/e2e/test_lm_eval.py $(ARGS)

check: $(DEVELOPMENT)
	$(BIN)/ruff format --check src tests bench tools
	$(BIN)/ruff check src tests bench tools
	@! $(BIN)/radon cc --min C --show-complexity src bench tools | grep . || { echo "complexity is at most 10"; exit 1; }
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	$(BIN)/python -m tools.generate_docs --check
	$(SITE) --site-dir .site

# The reference pages from the source code, and the site from all pages.
docs: $(DEVELOPMENT)
	$(BIN)/python -m tools.generate_docs
	$(SITE)

bench: bench-path bench-edge bench-engine bench-disagg bench-handlers bench-router bench-multimodal bench-diffusion bench-experts

bench-edge: $(DEVELOPMENT)
	$(BIN)/python -m bench.edge $(ARGS)

bench-path: $(DEVELOPMENT)
	$(BIN)/python -m bench.path $(ARGS)

bench-timelines: $(DEVELOPMENT)
	$(BIN)/python -m bench.timelines $(ARGS)

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

# On a machine with a GPU, with the torch, transformers and Triton that its python3 has; random weights, no downloads.
bench-gpu:
	PYTHONPATH=src:. $(PYTHON) -m bench.gpu $(ARGS)

bench-gpu-handoff:
	PYTHONPATH=src:.:$$PYTHONPATH $(PYTHON) -m bench.gpu_handoff $(ARGS)

# Tokens streamed by SGLang itself and by Baton's adapter, beside each other.
bench-sglang-gpu:
	[ -f $(SGLANG_GPU)/env.sh ] || PYTHON=$(PYTHON) scripts/sglang_gpu/install.sh $(SGLANG_GPU)
	. $(SGLANG_GPU)/env.sh && python -m bench.sglang_stream $(ARGS)

# Other engines to compare with, each in an environment of its own under .bench/ (4.4 GB).
bench-engine-peers:
	scripts/bench-peers.sh $(ARGS)

# Where we may: Debian packages for tests of clusters and of monitoring, which are skipped without them, and inotify instances, of which
# discovery by files takes one for each endpoint (Linux allows 128, which is a dozen of the systems that tests start).
machine: inotify
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v etcd && command -v nats-server && command -v promtool; } >/dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends etcd-server nats-server prometheus >/dev/null; \
	fi

inotify:
	@if [ "$$(id -u)" = 0 ] && [ "$$(cat /proc/sys/fs/inotify/max_user_instances 2>/dev/null || echo 1024)" -lt 1024 ]; then \
		echo 1024 > /proc/sys/fs/inotify/max_user_instances || true; \
	fi

# The step compiled for 64-bit ARM, and run: those tests are skipped without these.
emulator:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null; \
	fi

$(SERVING): pyproject.toml constraints.txt
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) torch
	@touch $@

$(DEVELOPMENT): pyproject.toml constraints.txt
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) torch,nixl,bench,docs,dev
	@touch $@ $(SERVING)

clean:
	rm -rf $(VENV) site .site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
