# All targets share one virtual environment in .venv; it is made when it is missing or older than what it is made from.
PY ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-slow matrix lint house docs wheel bench e2e-slurm e2e-ray e2e-ray-quick e2e-kube env clean
env: $(VENV)/.made

$(VENV)/.made: pyproject.toml requirements-dev.txt constraints.txt src/lastcall/auto/lastcall-auto.pth
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-build-isolation -e .
	touch $@

demo: env
	$(BIN)/python examples/demo.py

# One process a core; a file's tests stay together, since they share what they have set up.
JOBS ?= 2
# One thread each: torch's pools of all tests at once would wait for one another on few cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --progress-line --durations-file build/durations.txt
QUICK = tests/unit tests/property tests/conformance tests/house

# Minutes: what starts no process, and a smoke of each real path.
test: env
	$(PYTEST) -m "quick and not slow" $(QUICK) $(shell grep -rl --include='test_*.py' 'mark\.smoke' tests)

# What CI runs: everything but further variants of what is tested anyway, which are slow.
test-all: env
	$(PYTEST)

test-slow: env
	$(PYTEST) -m "slow or not slow"

# The quick tests on every Python from 3.11 to 3.14 that is found here, without a framework; MATRIX=--torch: with torch, too.
matrix:
	$(PY) tools/matrix.py --jobs $(JOBS) $(MATRIX)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py

# What makes the source hard to enter, counted; fails beyond the limits at the top of the script.
house: env
	$(BIN)/python tools/house.py

e2e-slurm: env
	$(BIN)/python -m pytest tests/slurm

$(VENV)/.made-ray: $(VENV)/.made requirements-ray.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -r requirements-ray.txt
	touch $@

# Every shape of script with every notice, twenty preemptions in one run: some 25 minutes on two cores.
e2e-ray: $(VENV)/.made-ray
	$(BIN)/python -m pytest tests/unit/adapters/ray tests/ray -m "slow or not slow"

e2e-ray-quick: $(VENV)/.made-ray
	$(BIN)/python -m pytest tests/unit/adapters/ray tests/ray

# A real Kubernetes, built from Debian's source the first time (some eleven minutes of one core, as root on Debian 12).
e2e-kube: env
	$(BIN)/python tests/helpers/kube/build.py
	$(BIN)/python -m pytest tests/kube

$(VENV)/.made-docs: $(VENV)/.made requirements-docs.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -r requirements-docs.txt
	touch $@

# The site, in site/; every warning is an error. Nothing of it is loaded from another host.
docs: $(VENV)/.made-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The sdist and the wheel, in dist/: checked, and the wheel tried in an environment of its own.
wheel: $(VENV)/.made-docs
	$(BIN)/python tools/wheel.py

bench: $(VENV)/.made-ray
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .venv-matrix build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
