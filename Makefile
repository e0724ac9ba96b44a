# One environment, one place for every command. `make demo` and `make test` need Python 3.11+ and the package registries.
# torch: where pip is offered a CPU build (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), the pin in constraints.txt takes it.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PEERS  := $(VENV)/.peers
AVX2   := $(VENV)/llama-cpp-avx2
AVX2_ARGS := -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF
# GCC 12.2 loses most of the configuration of AMX's tiles as a dead store (its bug 114098; amxtileintrin.h names 8 of the 64
# bytes that the instruction reads), and llama.cpp ends by SIGSEGV in its first product of 8 or 4 bits.
PEERS_ARGS := -DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-fno-dse
CLIENTS := $(VENV)/clients
IMAGES ?= operator gateway server
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# pip compiles every module that it installs, which takes longer than all else it does. A tenth of them are ever imported, and
# Python compiles these when they first are, where nothing keeps it from writing.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup tools demo test test-fast test-soak test-clients images e2e lint style types imports format peers bench bench-avx2 bench-formats bench-operator bench-gateway bench-gpu bench-gpu-models bench-autoscaling bench-reality docs crds chart clean

help:           ## show this
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## *' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with the pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

tools:          ## what the tests want from Debian: a real Prometheus, a real Redis
	@command -v prometheus >/dev/null && command -v redis-server >/dev/null || { \
	  command -v apt-get >/dev/null || { echo "the tests need prometheus (2.40+) and redis-server (7+) on the PATH"; exit 1; }; \
	  SUDO=; [ "$$(id -u)" = 0 ] || SUDO=sudo; \
	  $$SUDO apt-get update -qq && $$SUDO env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus redis-server; }

demo: setup     ## the whole path on this machine: manifest, tokens, scale up, scale down (about 2 minutes)
	$(BIN)/llmservice demo

test: setup tools ## every test: unit, property, parity, chart, end to end
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test-fast: setup ## unit and property tests: without servers and what is marked slow (two to four minutes on two cores)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests --fast

test-soak: setup ## the long versions of some tests: every fault at every call, tens of thousands of requests
	$(BIN)/python -m pytest -q -m soak

test-clients: setup ## the clients of examples/clients with their real packages (wants node and npm)
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile instructor langchain-openai litellm mcp llama-index-llms-openai-like openai-agents
	npm install --silent --no-fund --no-audit --prefix $(CLIENTS) openai
	$(BIN)/python -m pytest -q -m clients

images:         ## build the images with docker, podman or buildah (IMAGES="gateway …", BUILD_ARGS="--build-arg TORCH_CPU_INDEX_URL=…")
	@for builder in docker podman buildah none; do $$builder info >/dev/null 2>&1 && break; done; \
	test $$builder != none || { echo "make images needs docker, podman or buildah, and none of them works here"; exit 1; }; \
	for image in $(IMAGES); do \
	  $$builder build --target $$image --tag llmservice-$$image:$(VERSION) $(BUILD_ARGS) . || exit 1; done

e2e: setup tools ## end to end only (KUBEBUILDER_ASSETS or KUBECONFIG choose another API server)
	$(BIN)/python -m pytest -q e2e

lint: setup     ## what CI checks before the tests
	$(MAKE) --no-print-directory --jobs 2 --output-sync types style imports

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

format: setup   ## let ruff write the code's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup     ## write docs/metrics.md's tables from the registries
	$(BIN)/python docs/metrics_tables.py

crds: setup     ## write crds/ (and the chart's copy) from the operator's models
	$(BIN)/llmservice crd --write

chart: crds     ## write what else of the chart is generated: alerts, dashboards, schema, README
	$(BIN)/llmservice alerts --write
	$(BIN)/python charts/dashboards.py
	$(BIN)/python charts/values_docs.py

$(PEERS): $(STAMP)
	CMAKE_ARGS="$(PEERS_ARGS)" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-cache-dir -c constraints.txt -e '.[dev,bench-peers]'
	@touch $@

peers: setup $(PEERS) ## what `make bench` compares with: compiles llama.cpp for this machine (minutes, needs a C++ compiler)

bench: peers    ## benchmarks of this machine: benchmarks/results/*.json and docs/benchmarks.md (under 20 minutes)
	$(BIN)/python benchmarks/run.py

bench-avx2: peers ## `compare.py` as on a CPU without AVX-512: compiles another llama.cpp (minutes), writes docs/benchmarks.md
	test -d $(AVX2) || CMAKE_ARGS="$(AVX2_ARGS)" $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-cache-dir --no-deps --no-binary llama-cpp-python -c constraints.txt --target $(AVX2) llama-cpp-python
	$(BIN)/python benchmarks/compare.py --avx2 $(AVX2)
	$(BIN)/python benchmarks/report.py

bench-formats: peers ## `compare.py` of 8-bit weights, and of transformers' code on our cache; writes docs/benchmarks.md
	$(BIN)/python benchmarks/compare.py --formats
	$(BIN)/python benchmarks/report.py

bench-operator: setup ## the operator with 1,000 services (10 minutes), then docs/benchmarks.md
	$(BIN)/python benchmarks/run.py operator_scale

bench-gateway: setup ## the gateway beside nginx, and cache-aware routing (6 minutes, wants nginx), then docs/benchmarks.md
	$(BIN)/python benchmarks/run.py gateway

bench-autoscaling: setup ## every autoscaling policy in simulated time, then docs/benchmarks.md (AZURE=azure_llm_conv_2023.csv, FULL=1, MISPREDICTED=1, AGAIN=1)
	$(BIN)/python benchmarks/autoscaling.py $(if $(AZURE),--azure $(AZURE)) $(if $(FULL),--full) $(if $(MISPREDICTED),--mispredicted) $(if $(AGAIN),--again)
	$(BIN)/python benchmarks/report.py

bench-reality: setup ## the simulator against a cluster with timed models, and against one server (36 minutes), then docs/benchmarks.md
	$(BIN)/python benchmarks/run.py reality

bench-gpu: setup ## what needs a CUDA GPU: kernels, steps, throughput, memory (within 9 minutes; benchmarks/gpu.py --rehearse needs none)
	$(BIN)/python benchmarks/gpu.py

bench-gpu-models: setup ## every model family, quantised format and adapters on a CUDA GPU (within 6 minutes)
	$(BIN)/python benchmarks/gpu.py --only families formats by_transformers with_adapters

clean:
	rm -rf $(VENV) .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
