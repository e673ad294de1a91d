# Every target sets up what it needs; a stamp makes that quick when nothing has changed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
DASHBOARDS := .dashboards
PACKAGES := kvtrace instrumented_connectors requirements tests
PARALLEL := -n 4 --dist worksteal
FIGURES := docs/figures.json
DOCUMENTS := README.md docs/costs.md docs/words.md
DEMO := --requests 20 --rate 2 --input-len 600 --output-len 16 --seed 1
# Whatever runs here may keep its byte code: vLLM has thousands of modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-clients test-fast test-timing dashboards-test lint bench figures figures-more tables clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(VENV)/primed ## install everything into .venv

$(VENV)/stamp: requirements/dev.txt requirements/cpu-engine.txt requirements/install requirements/fetch.py requirements/uv.txt pyproject.toml
	@requirements/install $(VENV) "$(PYTHON)"
	@touch $@

# What the engine imports, as byte code: else every process of the first lab would work it out for itself.
$(VENV)/primed: $(VENV)/stamp requirements/prime
	@requirements/prime $(VENV)
	@touch $@

$(CLIENTS)/stamp: requirements/clients.txt requirements/fetch.py
	@echo "installing public load generators into $(CLIENTS)" >&2
	@test -x $(CLIENTS)/bin/python || "$(PYTHON)" -m venv --without-pip $(CLIENTS)
	@"$(PYTHON)" requirements/fetch.py $(CLIENTS) requirements/clients.txt
	@touch $@

$(DASHBOARDS)/stamp: tests/dashboards/set_up requirements/duckdb-1.5.txt requirements/fetch.py $(wildcard tests/dashboards/render/*)
	@tests/dashboards/set_up $(DASHBOARDS) "$(PYTHON)"
	@test -e $(DASHBOARDS)/left-out || touch $@

# What the boards are drawn from, beside a store made up: real engines, where there are any.
$(DASHBOARDS)/recording.duckdb: $(VENV)/primed
	@mkdir -p $(DASHBOARDS)
	@if test -e $(VENV)/without-engine; then exit 0; fi; \
	PYTHONPATH="$(CURDIR)/tests/engine/start_site" $(BIN)/kvtrace record -o $@ --force --lab push $(DEMO) >/dev/null

demo: setup ## record and explain one push and one pull run of real engines
	@if test -e $(VENV)/without-engine; then echo "make demo: no engine for this platform; see make setup" >&2; exit 1; fi
	@mkdir -p demo
	@for mode in push pull; do \
	  $(BIN)/kvtrace record -o demo/$$mode.duckdb --force --lab $$mode $(DEMO); \
	  $(BIN)/kvtrace explain demo/$$mode.duckdb; \
	  $(BIN)/kvtrace explain demo/$$mode.duckdb --slowest 1; \
	done

dashboards-test: setup $(DASHBOARDS)/stamp $(DASHBOARDS)/recording.duckdb ## dashboards: SQL, Prometheus, DuckDB 1.5, panels drawn in Chromium
	@$(BIN)/kvtrace dashboards write dashboards --check
	@$(BIN)/pytest -q tests/dashboards

lint: $(VENV)/stamp ## style, types, import contracts
	@$(BIN)/ruff check $(PACKAGES)
	@$(BIN)/ruff format --check --quiet $(PACKAGES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

# pytest rewrites every test's assertions when it is first read: once here, else by each of its processes at the same time.
$(VENV)/collected: $(VENV)/stamp $(wildcard tests/*.py tests/*/*.py)
	@$(BIN)/pytest -q --collect-only >/dev/null || true
	@touch $@

test: ## lint, then all tests, real engines and public load generators included
	@$(MAKE) -j4 lint test-clients $(VENV)/collected $(DASHBOARDS)/stamp $(DASHBOARDS)/recording.duckdb
	@tests/in_memory $(BIN)/pytest -q --durations=10 $(PARALLEL) -m "not engine"
	@if test -e $(VENV)/without-engine; then \
	  echo "no engine for this platform: tests with engines are left out" >&2; \
	else \
	  $(BIN)/pytest -q --durations=20 -m engine; \
	fi

test-clients: $(VENV)/stamp # public load generators, where there are engines to load
	@test -e $(VENV)/without-engine || $(MAKE) $(CLIENTS)/stamp

test-timing: setup $(CLIENTS)/stamp ## tests that compare times of real engines to milliseconds; wants a quiet machine
	@$(BIN)/pytest -q -m timing

test-fast: setup ## tests without engines
	@tests/in_memory $(BIN)/pytest -q $(PARALLEL) -m "not engine and not dashboards"

bench: setup ## what tracing costs: emit, ingest, attribution, checking blocks, serving; what queries and live snapshots take
	@$(BIN)/python -m tests.bench_emit
	@$(BIN)/python -m tests.bench_ingest
	@$(BIN)/python -m tests.bench_attribution
	@$(BIN)/python -m tests.bench_checks
	@$(BIN)/python -m tests.bench_queries
	@$(BIN)/python -m tests.bench_publication
	@$(BIN)/python -m tests.bench_serving
	@$(BIN)/python -m tests.bench_observers
	@$(BIN)/python -m tests.bench_switched

figures: setup ## measure what README and docs/costs.md tell, some 25 minutes on two cores; wants a quiet machine
	@$(BIN)/python -m tests.bench_emit --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_ingest --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_attribution --requests 100000 300000 1000000 --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_queries --requests 1000000 --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_checks --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_publication --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_observers --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_switched --minutes 5 --figures $(FIGURES)
	@$(MAKE) tables

figures-more: setup ## the same for what takes long: against stock connectors, with a recorder, on top of 100 million events
	@$(BIN)/python -m tests.bench_switched --recorded --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_publication --requests 2650000 --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_serving --figures $(FIGURES)
	@$(BIN)/python -m tests.bench_serving --recorded --figures $(FIGURES)
	@$(MAKE) tables

tables: $(VENV)/stamp ## print the documents' tables anew, from the vocabulary and the figures
	@$(BIN)/python -m cogapp -r $(DOCUMENTS)

clean: ## remove everything that was installed or made
	@rm -rf $(VENV) $(CLIENTS) $(DASHBOARDS) demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
