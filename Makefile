# Two commands from a clean clone: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
# Extras of pyproject.toml that development needs. EXTRAS=test,tools leaves out torch.
EXTRAS ?= test,tools,oracle
# Number of processes that run tests.
WORKERS ?= 2
# All tests of a file run in one process, and share what it made.
BY_FILE = --dist loadfile
SLOWEST = --durations=30 --durations-min=1
# Modules are compiled once, not by each worker and each program that a test starts.
export PYTHONDONTWRITEBYTECODE =
# Has glibc ask for large pages of memory, which saves page faults.
LARGE_PAGES = GLIBC_TUNABLES=glibc.malloc.hugetlb=1
# On a CPU with products of bf16 the demo is faster in bf16, on others in f32.
DTYPE := $(shell grep -qs avx512_bf16 /proc/cpuinfo && echo bf16 || echo f32)
# Draws the page of a run for README.
CHROMIUM ?= chromium
# Settings for the demo, such as ARGS="training.steps=30 mesh.d=8 mesh.t=1".
ARGS ?=

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CONSTRAINTS := $(wildcard constraints/py$(VERSION).txt)
RUN = $(VENV)/bin/python -m
# Each of these files marks a complete installation.
RUNTIME := $(VENV)/.installed
DEVELOPMENT := $(VENV)/.installed-$(EXTRAS)
SITE := $(VENV)/.installed-for-docs
fail = { echo "make: $(1)" >&2; exit 1; }

.PHONY: help demo verify setup test test-quick test-long test-shardlib mutants house wheels docs pictures lint format constraints clean check-python check-venv
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) WORKERS=$(WORKERS) ARGS=$(ARGS)"

demo: $(RUNTIME) ## train a small sharded model on 8 simulated devices
	$(LARGE_PAGES) JAX_PLATFORMS=cpu $(RUN) train --config-name=local_test_synthetic training.compute_dtype=$(DTYPE) $(ARGS)

verify: $(RUNTIME) ## compare a small step on two meshes of 8 simulated devices with one device: a minute
	$(RUN) tools.verify --config-name=local_test_synthetic verify.small=true mesh.p=2 \
	  'verify.meshes=[2x2x2,2x1x2x2]'

setup: $(DEVELOPMENT) ## only install

# The linters run beside the tests, and what they print comes last.
test: $(DEVELOPMENT) ## all tests of a few seconds each, beside the linters and the type checker
	@printed=$$(mktemp); $(MAKE) --no-print-directory lint >$$printed 2>&1 & linters=$$!; \
	$(RUN) pytest -n $(WORKERS) $(BY_FILE) $(SLOWEST) -m "not long"; tests=$$?; \
	wait $$linters; linted=$$?; cat $$printed; rm $$printed; exit $$((tests || linted))

test-quick: $(DEVELOPMENT) ## only what a new Python or jax would break first: seconds
	$(RUN) pytest -n $(WORKERS) $(SLOWEST) -m "quick and not long"

test-long: $(DEVELOPMENT) ## only the long tests, which `make test` leaves out
	$(RUN) pytest -n $(WORKERS) $(BY_FILE) $(SLOWEST) -m long

test-shardlib: check-python ## the tests of shardlib, where only it and pytest are installed: a few minutes
	rm -rf build $(VENV)-shardlib && $(PYTHON) -m venv $(VENV)-shardlib
	$(VENV)-shardlib/bin/pip install --quiet ./shardlib pytest $(CONSTRAINTS:%=-c %)
	JAX_ENABLE_COMPILATION_CACHE=false $(VENV)-shardlib/bin/pytest -o addopts="--import-mode=importlib --strict-markers" -o pythonpath=. \
	  -m "not long" tests/shardlib tests/exact

mutants: $(DEVELOPMENT) ## plant single faults in a copy of the source, and see that tests still catch them: half an hour
	$(RUN) bench.faults $(ARGS)

house: ## lines of each room, beside those of the last release
	@$(PYTHON) bench/house.py $(ARGS)

# Each wheel would take along what another build left in build/.
wheels: $(RUNTIME) ## the wheels of shardwright, which has shardlib, and of shardlib alone, in dist/
	@for package in . ./shardlib; do rm -rf build && $(RUN) pip wheel -q --no-deps -w dist $$package || exit 1; done
	@rm -rf build && ls dist/*.whl

docs: $(SITE) ## the documentation as a site with search; prints the path of its first page
	@$(RUN) sphinx -q -W --keep-going -c docs/site -d $(VENV)/doctrees . docs/site/html
	@echo docs/site/html/README.html

pictures: $(DEVELOPMENT) ## the pictures of README and the outputs of docs/tour.ipynb, anew: some minutes
	@$(VENV)/bin/python docs/site/pictures.py
	@rm -rf runs/demo
	@$(RUN) train --config-name=local_test_synthetic paths.model_name=demo
	@sed 's|$(CURDIR)/||g' runs/demo/report.html >runs/demo/page.html
	@$(CHROMIUM) --headless --no-sandbox --hide-scrollbars --virtual-time-budget=20000 --window-size=1280,950 \
	  --screenshot=docs/pictures/report.png file://$(CURDIR)/runs/demo/page.html

lint: $(DEVELOPMENT) ## only the linters and the type checker
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) basedpyright --pythonpath $(VENV)/bin/python

format: $(DEVELOPMENT) ## correct what the linters can
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean: ## remove the virtual environment, what was built, and the caches
	if [ -e $(VENV)/pyvenv.cfg ]; then rm -rf $(VENV); fi
	rm -rf *.egg-info shardlib/*.egg-info build dist $(VENV)-shardlib .pytest_cache .ruff_cache

# A killed pip leaves packages that look installed, so an environment with an unfinished installation is made anew.
$(RUNTIME): PACKAGES = .
$(DEVELOPMENT): PACKAGES = .[$(EXTRAS)]
$(SITE): PACKAGES = .[docs]
$(RUNTIME) $(DEVELOPMENT) $(SITE): pyproject.toml $(CONSTRAINTS) | check-venv
	@if [ -e $(VENV)/.unfinished ]; then rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(VENV)/.unfinished
	@echo "setting up $(VENV) with Python $(VERSION): about a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) pip install --quiet -e '$(PACKAGES)' $(CONSTRAINTS:%=-c %)
	@rm $(VENV)/.unfinished && touch $(RUNTIME) $@

# Local version suffixes are removed: 2.13.0+cpu is on no registry, and 2.13.0 accepts either build. The CUDA packages of
# another torch build are removed too: their versions would contradict those of the extra `cuda`.
constraints: FRESH := $(VENV)-fresh
constraints: check-python ## renew the constraints file of this Python, with the newest packages
	rm -rf $(FRESH) && $(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install -e '.[$(EXTRAS),docs]'
	{ echo "# What pyproject.toml and its extras $(EXTRAS),docs install on Python $(VERSION) for Linux;"; \
	  echo "# made by 'make constraints PYTHON=python$(VERSION)': do not edit."; \
	  $(FRESH)/bin/python -m pip freeze --exclude-editable | sed 's/+.*//' | grep -vE '^(nvidia|cuda|triton)'; \
	} > constraints/py$(VERSION).txt
	rm -rf $(FRESH)

check-python:
	@case "$(VERSION)" in \
	  "") $(call fail,no Python runs as $(PYTHON); give one with PYTHON=... (3.11 or newer));; \
	  [12].*|3.?|3.10) $(call fail,$(PYTHON) is Python $(VERSION); give one with PYTHON=... (3.11 or newer));; \
	esac
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  $(call fail,$(PYTHON) makes no virtual environments; install python3-venv (Debian, Ubuntu) or give another PYTHON=...)

check-venv: check-python
	@[ ! -d $(VENV) ] || [ -e $(VENV)/.unfinished ] || grep -qs '^version.* = $(VERSION)\.' $(VENV)/pyvenv.cfg || \
	  $(call fail,$(VENV) is no virtual environment of Python $(VERSION); give another VENV=... or remove it)
	@$(if $(CONSTRAINTS),,echo "make: Python $(VERSION) has no file in constraints/: newest packages, untested together")
