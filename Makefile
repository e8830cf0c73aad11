# Every target makes .venv when it is missing; needs Python 3.11+ and a package index.

VENV ?= .venv
# The first Python that is new enough and really starts: a version manager may leave a name that does not.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PYTEST_ARGS ?=
SWEEP_ARGS ?=
# What to install beside the package: lint brings the tools and their Node.js, which a venv for tests alone can spare.
EXTRAS ?= lint,test
INSTALLED := $(VENV)/.installed

WILD_VENV ?= .venv-wild
WILD_NEWEST_VENV ?= .venv-wild-newest

.PHONY: help wild demo docs test test-wide test-newest lint check format goldens pictures sweep hooks venv

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(INSTALLED) ## plan and train a small GPT on 8 virtual CPU devices, beside jax.jit; writes demo/plan.html
	$(VENV)/bin/python examples/train_gpt.py --output demo

docs: $(INSTALLED) ## build the manual in docs/_build; warnings are errors
	$(VENV)/bin/python -m pip install --quiet --editable '.[docs]'
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

test: $(INSTALLED) ## the suite, or what PYTEST_ARGS names
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-wide: ## the suite with the long tests that others are much like
	$(MAKE) test PYTEST_ARGS="--wide $(PYTEST_ARGS)"

test-newest: ## the quick part of the suite on Python 3.12 with the newest jax
	.ci/test-newest

lint: $(INSTALLED) ## ruff and pyright
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

check: lint ## lint, and the tests that take seconds: structure, goldens, pages
	$(VENV)/bin/python -m pytest -m 'not slow' tests/test_structure.py tests/test_golden.py tests/test_docs.py

format: $(INSTALLED) ## rewrite the code as ruff has it
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

goldens: $(INSTALLED) ## write tests/golden anew; read the diff before you commit it
	$(VENV)/bin/python -m pytest tests/test_golden.py --update-goldens

pictures: $(INSTALLED) ## draw the pictures of docs/ anew
	$(VENV)/bin/python docs/draw_architecture.py

sweep: $(INSTALLED) ## every long benchmark, before a release; SWEEP_ARGS=--list says which, and how long each takes
	$(VENV)/bin/python -m pip install --quiet --editable '.[gpu-aot]'
	$(VENV)/bin/python -m benchmarks.sweep $(SWEEP_ARGS)

wild: $(WILD_VENV)/.installed $(WILD_NEWEST_VENV)/.installed ## train steps of released packages beside their own jit; writes docs/wild.md
	KERAS_BACKEND=jax $(WILD_VENV)/bin/python -m benchmarks.wild --json $(WILD_VENV)/rows.json --markdown docs/wild.md
	$(WILD_NEWEST_VENV)/bin/python -m benchmarks.wild --json $(WILD_VENV)/rows.json --markdown docs/wild.md

hooks: $(INSTALLED) ## have git run `make lint` before a commit and `make check` before a push
	$(VENV)/bin/pre-commit install --hook-type pre-commit --hook-type pre-push

venv: $(INSTALLED) ## only install

$(INSTALLED): pyproject.toml
	@test -x $(VENV)/bin/python || test -n "$(PYTHON)" || \
		{ echo "No Python 3.11 or newer was found. Install one, or name it: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

$(WILD_VENV)/.installed: pyproject.toml benchmarks/wild/requirements.txt
	test -x $(WILD_VENV)/bin/python || $(PYTHON) -m venv $(WILD_VENV)
	$(WILD_VENV)/bin/python -m pip install --quiet --editable . --requirement benchmarks/wild/requirements.txt
	@touch $@

$(WILD_NEWEST_VENV)/.installed: pyproject.toml benchmarks/wild/requirements-newest.txt
	test -x $(WILD_NEWEST_VENV)/bin/python || $$(.ci/python312) -m venv $(WILD_NEWEST_VENV)
	$(WILD_NEWEST_VENV)/bin/python -m pip install --quiet --editable . --requirement benchmarks/wild/requirements-newest.txt
	@touch $@
