# Each target makes the virtual environment that it needs, where it is missing.

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
INTEGRATION ?= .venv-integration
WHEEL ?= .venv-wheel
BIN := $(VENV)/bin

# Two workers with a half of the tests each, so that what neighbouring tests share is made once.
PYTEST := -m pytest -n 2 --dist worksteal

# The tests that need no extra but `test`, without those of recovery's decisions, in which there is no JAX.
NOT_CORE := checkpoint experiments faults_flax faults_re% follow good_checkpoints llama% monitor% plot \
  readers% recipes recovery% replay_% skipping state_arguments state_roundtrips transplant_flax upstream_traps
CORE := $(filter-out $(NOT_CORE:%=tests/test_%.py),$(wildcard tests/test_*.py))

.PHONY: train demo-spike test check lint types docs format test-oldest integration dist clean

# Bad batches are what clipping is for, so the demonstration has two: docs/evidence.md.
train: ARGS = --run-dir runs/noise --spike-steps 150 250
train: $(VENV)/.examples  ## train a small LLaMA with zclip, two batches of noise on the way
	$(BIN)/python examples/llama/train.py $(ARGS)

demo-spike: $(VENV)/.examples  ## plant a corrupt row and a bad tensor, and see both named
	$(BIN)/python examples/llama/demo_spike.py $(ARGS)

test: $(VENV)/.dev  ## every test
	$(BIN)/python $(PYTEST) $(ARGS)

check: lint types test docs  ## everything that must pass

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build
	JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \
	  $(BIN)/python -m pytest -q --doctest-glob="*.md" README.md docs

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-oldest: $(OLDEST)/.pinned  ## the core's tests with the oldest versions that pyproject.toml accepts
	$(OLDEST)/bin/python $(PYTEST) $(CORE) zclip_jax \
	  --ignore=zclip_jax/monitor/_tensorboard.py --ignore=zclip_jax/recovery/_checkpoints.py \
	  --ignore=zclip_jax/recovery/_keep_good.py

integration: $(INTEGRATION)/.integration  ## zclip inside a third-party trainer
	PYTHONPATH=. $(INTEGRATION)/bin/python tests/integration/tunix_trainer.py

# `make dist PYTHON=python3.13` does the same with another Python.
dist: $(VENV)/.release  ## build the release, check it, install the wheel alone and run the core's doctests from it
	rm -rf dist $(WHEEL)
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/pip install -q dist/*.whl
	JAX_PLATFORMS=cpu $(WHEEL)/bin/python -I tests/installed_wheel.py

clean:
	rm -rf $(VENV) $(OLDEST) $(INTEGRATION) $(WHEEL) docs/_build dist

.PRECIOUS: %/bin/python
%/bin/python:
	$(PYTHON) -m venv $*

%/.examples: pyproject.toml | %/bin/python
	$*/bin/pip install -q -e ".[examples]"
	touch $@

%/.dev: pyproject.toml | %/bin/python
	$*/bin/pip install -q -e ".[dev]"
	touch $@ $*/.examples

%/.release: pyproject.toml | %/bin/python
	$*/bin/pip install -q -e ".[release]"
	touch $@

%/.integration: pyproject.toml | %/bin/python
	$*/bin/pip install -q -e ".[integration]"
	touch $@

%/.pinned: pyproject.toml | %/bin/python
	$*/bin/pip install -q -e ".[test]" $$($*/bin/python -c "import tomllib; \
	  print(*[d.replace('>=', '==') for d in tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']])")
	touch $@
