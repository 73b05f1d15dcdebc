# Two commands: `make serve` and `make test`. Everything they need is installed into .venv first.

PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
MODEL ?=

.PHONY: serve test bench bench-web load soak setup setup-dev lock clean

serve: $(VENV)/.serve
	@exec $(VENV)/bin/python -W ignore manage.py serve $(if $(MODEL),--model "$(MODEL)")

test: $(VENV)/.dev $(CLIENTS)/.done
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m pytest

bench: $(VENV)/.dev
	$(VENV)/bin/python -m scripts.bench

bench-web: $(VENV)/.dev
	$(VENV)/bin/python -m scripts.bench_web

load: $(VENV)/.dev
	$(VENV)/bin/python -m loadtests

soak: $(VENV)/.dev
	$(VENV)/bin/python -m scripts.soak

setup: $(VENV)/.serve

setup-dev: $(VENV)/.dev $(CLIENTS)/.done

$(VENV)/.serve: requirements/serve.lock
	$(PYTHON) scripts/install.py $(VENV) requirements/serve.lock --torch
	@touch $@

$(VENV)/.dev: requirements/dev.lock
	$(PYTHON) scripts/install.py $(VENV) requirements/dev.lock --torch
	@touch $@ $(VENV)/.serve

$(CLIENTS)/.done: requirements/clients.lock
	$(PYTHON) scripts/install.py $(CLIENTS) requirements/clients.lock
	@touch $@

# Needs uv (pip install uv). torch is installed by its exact version, because its files differ by platform.
lock:
	uv pip compile pyproject.toml --extra dev --python-version 3.11 --generate-hashes --no-emit-package torch -o requirements/dev.lock
	uv pip compile pyproject.toml --python-version 3.11 --generate-hashes --no-emit-package torch -c requirements/dev.lock -o requirements/serve.lock
	uv pip compile requirements/clients.in --python-version 3.11 --generate-hashes -o requirements/clients.lock

clean:
	rm -rf $(VENV) $(CLIENTS) var
