# make demo, make test, make lint: each makes .venv when it is missing; needs Python 3.11+ and a package index.

VENV ?= .venv
# The first Python that is new enough and really starts: a version manager may leave a name that does not.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PYTEST_ARGS ?=
# What to install beside the package: lint brings the tools and their Node.js, which a venv for tests alone can spare.
EXTRAS ?= lint,test
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint venv

demo: $(INSTALLED)
	$(VENV)/bin/python examples/train_gpt.py

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@test -x $(VENV)/bin/python || test -n "$(PYTHON)" || \
		{ echo "No Python 3.11 or newer was found. Install one, or name it: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@
