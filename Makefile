# The repo root must never be importable: `import kernels` would find our folder.
export PYTHONSAFEPATH := 1

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTO_VENV := .venv-proto
PROTOS := $(sort $(wildcard proto/v1/*.proto))

.PHONY: install model demo test deploy-check bench-cpu bench-frontend bench-ranking bench-yes-no bench-kernels bench-engine load faults fuzz soak check proto proto-check metrics-docs dashboards dashboard-pictures prometheus wheel clean

install: $(STAMP)

# torch first and by itself: later lines then keep the build that is there. PyPI's Linux build is
# for CUDA and large; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the CPU build.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("stemserve needs Python 3.11 or newer; name one: make PYTHON=python3.12") if sys.version_info < (3, 11) else 0'
	@echo "Installing into $(VENV): about 2 GB with a CPU build of torch; once, a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet torch==2.13.0 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf

model: $(MODEL)

$(MODEL): | $(STAMP)
	$(BIN)/python -m stemserve.service.default_model --output-dir $(@D)

demo: $(STAMP) $(MODEL)
	$(BIN)/python examples/demo.py --model $(MODEL)

test: $(STAMP) $(MODEL) prometheus
	$(BIN)/pytest -m "not gpu" -n 2 --dist loadfile

# Chart, images, rules and routing, as far as they can be checked without a cluster; ends with a line of JSON.
# As root with buildah and debootstrap the CPU image is built and run too; ARGS=--no-image leaves that out.
deploy-check: $(STAMP) $(MODEL) prometheus
	$(BIN)/python deploy/check.py $(ARGS)

# Options in ARGS, such as ARGS=--quick; ARGS=--help lists them.
bench-cpu: $(STAMP) $(MODEL)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_cpu.py $(ARGS)

# What the service adds to the model's time; the worker is a fake one.
bench-frontend: $(STAMP) $(MODEL)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_frontend.py --model $(MODEL) $(ARGS)

bench-ranking: $(STAMP) $(MODEL)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_ranking.py $(ARGS)

bench-yes-no: $(STAMP) $(MODEL)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_yes_no.py $(ARGS)

# A real server and the default model: overload for a minute, faults, bad input.
load: $(STAMP) $(MODEL)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/overload.py --model $(MODEL) $(ARGS)

faults: $(STAMP) $(MODEL)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/faults.py --model $(MODEL) $(ARGS)

fuzz: $(STAMP) $(MODEL)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/fuzz_server.py --model $(MODEL) $(ARGS)

soak: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/soak.py $(ARGS)

# On a GPU. Where $(PYTHON) has what it needs and sees a GPU, it is used as it is.
GPU_READY := import google.rpc, sys, torch, triton; sys.exit(not torch.cuda.is_available())

bench-kernels:
	@python=$(PYTHON); $$python -c '$(GPU_READY)' 2>/dev/null \
		|| { $(MAKE) --no-print-directory install && python=$(BIN)/python; }; \
	PYTHONPATH=src:benchmarks:$$PYTHONPATH $$python benchmarks/bench_kernels.py $(ARGS)

bench-engine:
	@python=$(PYTHON); $$python -c '$(GPU_READY)' 2>/dev/null \
		|| { $(MAKE) --no-print-directory install && python=$(BIN)/python; }; \
	PYTHONPATH=src:benchmarks:$$PYTHONPATH $$python benchmarks/bench_engine.py $(ARGS)

check: $(STAMP) proto-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# Generated with 1.78.0: newer generators stamp a protobuf version that a 6.x runtime refuses.
$(PROTO_VENV)/.installed:
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet grpcio-tools==1.78.0 mypy-protobuf==3.7.0 googleapis-common-protos buf-bin
	touch $@

proto: $(PROTO_VENV)/.installed
	PATH="$(abspath $(PROTO_VENV))/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -Isrc \
		-I"$$($(PROTO_VENV)/bin/python -c 'import google.rpc; print(list(google.rpc.__path__)[0] + "/../..")')" \
		--python_out=src --grpc_python_out=src --mypy_out=quiet:src --mypy_grpc_out=quiet:src \
		--include_imports --descriptor_set_out=$(PROTO_VENV)/image.binpb \
		$(addprefix src/stemserve/,$(PROTOS))

proto-check: proto
	$(PROTO_VENV)/bin/buf lint $(PROTO_VENV)/image.binpb --config buf.yaml --path stemserve/proto
	@git diff --exit-code -- proto || (echo "generated code differs: run make proto and commit"; exit 1)

metrics-docs: $(STAMP)
	$(BIN)/python -m stemserve.service.metrics.page docs/metrics.md

dashboards:
	$(PYTHON) deploy/grafana/make_dashboards.py

# As a real server fills them in some minutes; needs matplotlib.
dashboard-pictures: $(STAMP) prometheus
	$(BIN)/python -m pip install --quiet matplotlib
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/live_dashboards.py $(ARGS)

# Debian's build, for tests of rules and dashboards; without it they are skipped.
prometheus:
	@$(PYTHON) deploy/prometheus/get_prometheus.py .cache/prometheus || echo "no Prometheus: some tests will be skipped"

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) $(PROTO_VENV) build dist
