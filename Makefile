# `make serve` and `make test` are all that is needed; `make help` lists the rest. Each installs what it needs into .venv first.

# What was compiled once is kept, whatever the shell says: servers and workers start from it.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
PROTOCOL_CLIENTS := .venv-protocol-clients
SCALEGEN := .venv-scalegen
MODEL ?=

.PHONY: help serve test test-all unit lint types coverage mutants test-gpu bench bench-web gpu-campaign curve gpu-wheels load faults soak protocol setup setup-dev otel redis nixl ray lock clean

serve: $(VENV)/.serve  ## Serve the demo model, or MODEL=directory-or-hub-id
	@exec $(VENV)/bin/python -W ignore manage.py serve $(if $(MODEL),--model "$(MODEL)")

help:  ## These lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

PYTEST := $(VENV)/bin/python -m pytest

test: setup-dev  ## What every change must pass: lint, types, unit, the engine, every endpoint and client once
	@$(MAKE) --no-print-directory lint types
	$(PYTEST) -m "not full and not slow" --limit-cpu-time

PARTS ?=
REPEAT ?= 1
BUSY ?=

test-all: setup-dev  ## All tests but slow ones. PARTS="dialects security", REPEAT=5, BUSY=1 to keep a core busy
	HYPOTHESIS_PROFILE=thorough $(VENV)/bin/python -m tests.repeat --runs $(REPEAT) $(if $(BUSY),--busy) \
	  $(addprefix tests/,$(PARTS))

lint: $(VENV)/.dev  ## Format, ruff, imports between layers
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports

types: $(VENV)/.dev  ## mypy
	$(VENV)/bin/mypy

# Plugins that only other tests use take longer to import than most tests here to run. Some tests wait, so there is a
# process more than there are CPUs.
UNIT = $(PYTEST) tests/unit tests/dialects -m "not live and not slow" -n $$(($$(nproc) + 1)) --dist worksteal \
  -p no:schemathesis -p no:faker

unit: $(VENV)/.dev  ## The fast tests: fake workers, no model; none imports torch
	$(UNIT)

coverage: $(VENV)/.dev  ## The fast tests, with what they cover and a floor for it
	$(UNIT) --cov --cov-report=term:skip-covered

MUTANTS ?=

mutants: $(VENV)/.dev  ## Mutate scheduler, routing, admission and more; list what no test notices
	$(VENV)/bin/mutmut run $(MUTANTS)
	$(VENV)/bin/python -m tools.lint.mutation_scores --survivors

bench: $(VENV)/.dev  ## The engine alone beside the whole server
	$(VENV)/bin/python -m tools.bench.server

bench-web: $(VENV)/.dev  ## What the web process spends for an event and for a request
	$(VENV)/bin/python -m tools.bench.web

curve: $(VENV)/.dev  ## This server beside its peers, which it installs: hours. CURVE="--shapes ... --rounds ..."
	$(VENV)/bin/python -m benchmarks.curve --out var/curve $(CURVE)
	$(VENV)/bin/python -m benchmarks.report var/curve/runs.jsonl
	$(VENV)/bin/python -m benchmarks.plot var/curve/runs.jsonl

load: $(VENV)/.dev  ## Load tests, compared with targets: minutes. LOAD="--shapes ramp --profile cpu"
	$(VENV)/bin/python -m loadtests $(LOAD)

SOAK_S ?= 600

soak: $(VENV)/.dev  ## SOAK_S seconds of mixed load, after which nothing may be left
	$(VENV)/bin/python -m loadtests --shapes soak --seconds $(SOAK_S)

faults: $(VENV)/.dev  ## Every fault and attack, and all tests that are slow: an hour
	$(VENV)/bin/python -m pytest tests/faults tests/security tests/launchers -n 0 -m "slow or not slow"
	$(VENV)/bin/python -m pytest tests/engine tests/dialects tests/server tests/gpu -n 0 -m slow


# On a machine that has torch, transformers and Triton, and may have no network: what else the server and its tests import
# comes from .gpu-wheels, which `make gpu-wheels GPU_PYTHON_VERSION=3.12` fills elsewhere.
GPU_PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
GPU_PYTHON_VERSION ?= 3.12
GPU_RUN = PYTHONPATH=.gpu-site:. $(GPU_PYTHON)

gpu-wheels: $(VENV)/.dev  ## Packages for a GPU machine without network
	$(VENV)/bin/python -m tools.gpu.packages --python-version $(GPU_PYTHON_VERSION)

.gpu-site:
	$(GPU_PYTHON) -c "import django, llguidance, msgspec, pytest" || \
	  $(GPU_PYTHON) -m tarfile -e .gpu-wheels/site.tar.xz .gpu-site || (rm -rf .gpu-site; false)

test-gpu: .gpu-site  ## The engine's tests on a CUDA device
	$(GPU_RUN) -m pytest -c /dev/null --rootdir . -p no:cacheprovider tests/gpu

gpu-campaign: .gpu-site  ## Tests and figures of a CUDA device, continued by the next call. RESULTS=FILE, PARTS, DRY=1
	$(GPU_RUN) -W ignore -m tools.gpu.campaign $(if $(DRY),--dry) $(if $(RESULTS),--results "$(RESULTS)") \
	  $(if $(BUDGET_S),--budget-s $(BUDGET_S)) $(if $(PARTS),--parts $(PARTS))

setup: $(VENV)/.serve  ## Install what serving needs

otel: $(VENV)/.serve requirements/otel.lock  ## Install what traces need
	$(PYTHON) tools/release/install.py $(VENV) requirements/otel.lock

redis: $(VENV)/.serve requirements/redis.lock  ## Install what rates counted together need
	$(PYTHON) tools/release/install.py $(VENV) requirements/redis.lock

ray: $(VENV)/.serve requirements/ray.lock  ## Install what the launcher ray needs
	$(PYTHON) tools/release/install.py $(VENV) requirements/ray.lock

nixl: $(VENV)/.serve requirements/nixl.lock  ## Install what KV transfer by NIXL needs
	$(PYTHON) tools/release/install.py $(VENV) requirements/nixl.lock

setup-dev:  ## Install what tests need as well, two environments at a time
	@$(MAKE) --no-print-directory -j2 $(VENV)/.dev $(PROTOCOL_CLIENTS)/.done $(CLIENTS)/.done $(SCALEGEN)/.done

$(VENV)/.serve: requirements/serve.lock
	$(PYTHON) tools/release/install.py $(VENV) requirements/serve.lock --torch
	@touch $@

$(VENV)/.dev: requirements/dev.lock
	$(PYTHON) tools/release/install.py $(VENV) requirements/dev.lock --torch
	@touch $@ $(VENV)/.serve

$(CLIENTS)/.done: requirements/clients.lock
	$(PYTHON) tools/release/install.py $(CLIENTS) requirements/clients.lock
	@touch $@

$(PROTOCOL_CLIENTS)/.done: requirements/protocol-clients.lock
	$(PYTHON) tools/release/install.py $(PROTOCOL_CLIENTS) requirements/protocol-clients.lock
	@touch $@

$(SCALEGEN)/.done: requirements/scalegen.lock
	$(PYTHON) tools/release/install.py $(SCALEGEN) requirements/scalegen.lock
	@touch $@

# The messages of gRPC services, from their .proto files.
protocol: $(VENV)/.dev  ## Messages of gRPC services from their .proto files
	$(VENV)/bin/python -m grpc_tools.protoc -I. -I$$($(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
	  --python_out=. --pyi_out=. inference/dialects/*/protocol/*.proto

# Needs uv (pip install uv). torch is installed by its exact version, because its files differ by platform.
lock:  ## Resolve the dependencies anew
	uv pip compile pyproject.toml --extra dev --python-version 3.11 --generate-hashes --no-emit-package torch -o requirements/dev.lock
	uv pip compile pyproject.toml --python-version 3.11 --generate-hashes --no-emit-package torch -c requirements/dev.lock -o requirements/serve.lock
	uv pip compile requirements/otel.in --python-version 3.11 --generate-hashes -c requirements/dev.lock -o requirements/otel.lock
	uv pip compile requirements/redis.in --python-version 3.11 --generate-hashes -c requirements/dev.lock -o requirements/redis.lock
	uv pip compile requirements/ray.in --python-version 3.11 --generate-hashes -c requirements/dev.lock -o requirements/ray.lock
	uv pip compile requirements/nixl.in --no-deps --python-version 3.11 --generate-hashes -o requirements/nixl.lock
	uv pip compile requirements/loadtest.in --python-version 3.11 --generate-hashes -c requirements/dev.lock -o requirements/loadtest.lock
	uv pip compile requirements/torch-cuda.in --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes -c requirements/serve.lock -o requirements/torch-cuda.lock
	uv pip compile requirements/clients.in --python-version 3.11 --generate-hashes -o requirements/clients.lock
	uv pip compile requirements/protocol-clients.in --python-version 3.11 --generate-hashes -o requirements/protocol-clients.lock
	uv pip compile requirements/scalegen.in --no-deps --python-version 3.11 --generate-hashes -o requirements/scalegen.lock

clean:  ## Remove what was installed and made
	rm -rf $(VENV) $(CLIENTS) $(PROTOCOL_CLIENTS) $(SCALEGEN) var
