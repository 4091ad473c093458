# Every target sets up what it needs; the first call takes minutes, later ones start at once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH  := torch==2.13.0
OTHER_PIP = $(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check
PYTEST := -m pytest -q -n auto --maxprocesses 8 --dist worksteal
# Tests compiled by one run are read by the next ones, whatever the environment says: each process would compile them.
test test-all test-torch: export PYTHONDONTWRITEBYTECODE :=

# Other versions of torch that the tests pass on, and the TorchRec and FBGEMM that were built for each.
VERSION ?= 2.11.0
OTHERS  := 2.11.0 2.12.0
torchrec-2.11.0 := torchrec==1.6.1 fbgemm-gpu-cpu==1.6.0
torchrec-2.12.0 := torchrec==1.7.0 fbgemm-gpu-cpu==1.7.0
torchrec-2.13.0 := torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
OTHER   := .venv-torch-$(VERSION)

MINUTES ?= 30
SEED    ?= 1
COUNT   ?= 300

.DEFAULT_GOAL := help
.PHONY: help setup setup-distributed run test test-all test-torch test-sanitized test-gpu test-mutants chaos lint types docs \
  notebooks bench wheel try-wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.test-ready ## a virtual environment with everything

setup-distributed: $(VENV)/.distributed-ready ## TorchRec, for runs on several ranks

run: $(VENV)/.run-ready ## train micro-dlrm on embedded data and print the result
	@$(BIN)/recperf run micro-dlrm --data.source embedded

test: $(VENV)/.test-ready $(VENV)/.distributed-ready lint types ## lint, types and tests, minutes
	$(BIN)/python $(PYTEST) tests

test-all: $(VENV)/.test-ready $(VENV)/.distributed-ready $(VENV)/.loggers-ready lint types test-sanitized ## also what takes long, and other torch versions
	$(BIN)/python $(PYTEST) -m "long or not long" tests
	for version in $(OTHERS); do $(MAKE) test-torch VERSION=$$version || exit 1; done

test-torch: $(OTHER)/.ready ## the tests on another torch, as VERSION=2.12.0
	$(OTHER)/bin/python $(PYTEST) tests

# The interpreter and torch are not built with the sanitizer: its library is loaded first, and leaks are theirs.
test-sanitized: $(VENV)/.test-ready ## the C bodies' tests under AddressSanitizer and UBSan
	LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -q -n 0 \
	  --capture=no --sanitize -k "not triton" $$(grep -l native tests/ops/test_*.py)

# With the Python that is there: a machine with a GPU often has torch, and no package index.
test-gpu: ## commands as a user runs them, on this machine's GPU, as PART=runs, commands or ranks
	$(PYTHON) tests/gpu/gpu_commands.py $(PART) --jobs 3

test-mutants: $(VENV)/.test-ready ## changes formulas at random and shows what no test notices, as SEED=1 COUNT=300
	$(BIN)/python tests/mutants.py --seed $(SEED) --count $(COUNT)

chaos: $(VENV)/.test-ready $(VENV)/.distributed-ready ## random signals, damage and full disks, as MINUTES=30 SEED=1
	$(BIN)/python tests/reliability/chaos.py --minutes $(MINUTES) --seed $(SEED)

lint: $(VENV)/.test-ready ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.test-ready ## mypy
	$(BIN)/mypy

docs: $(VENV)/.docs-ready ## the documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

notebooks: $(VENV)/.test-ready ## run the notebooks of examples/ and store them with what they print
	@home=$$(mktemp -d) && cp examples/*.ipynb $$home && cd $$home && export PATH=$(CURDIR)/$(BIN):$$PATH COLUMNS=110 \
	  TERM=dumb NO_COLOR=1 RECPERF_HOME=$$home/.cache/recperf && \
	  for book in *.ipynb; do echo "== $$book"; jupyter-execute --inplace $$book || exit 1; done; \
	  sed -i "s#$$home#~#g" *.ipynb && cp *.ipynb $(CURDIR)/examples

bench: $(VENV)/.bench-ready ## every benchmark, rows appended; a missed goal does not stop it
	@for script in benchmarks/[a-z]*.py; do repeats=; \
	  case $$script in *_peer.py|*/next_item*|*/large_log.py|*/public_quality.py|*/watched_programs.py) continue;; */claims_repeat.py) repeats="2 1";; esac; \
	  echo "== $$script"; $(BIN)/python $$script $$repeats || [ $$? -eq 5 ] || exit 1; done

wheel: $(VENV)/.test-ready ## the wheel, in dist/
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# As a user does: no constraints, no checkout, a folder and a home of its own.
try-wheel: ## install the wheel of dist/ into a new environment, and run it
	@[ -f "$$(ls dist/*.whl | tail -1)" ] || { echo "there is no wheel in dist/: make wheel"; exit 1; }
	@home=$$(mktemp -d) && trap 'rm -rf "$$home"' EXIT && wheel=$$(realpath $$(ls dist/*.whl | tail -1)) && cd $$home && \
	  export RECPERF_HOME=$$home/cache && $(PYTHON) -m venv venv && venv/bin/pip install --quiet $(TORCH) && \
	  venv/bin/pip install --quiet $$wheel && venv/bin/recperf doctor && venv/bin/recperf run --no-peaks --quiet && \
	  venv/bin/recperf report runs/* --out page.html && echo "the wheel works"

clean: ## remove the virtual environment and caches; runs stay
	rm -rf $(VENV) .venv-torch-* .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first and alone: resolved together with others, pip may take a newer one with gigabytes of CUDA.
$(VENV)/.torch-ready:
	@echo "setting up $(VENV) (once, a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.run-ready: $(VENV)/.torch-ready pyproject.toml constraints.txt
	@$(PIP) -c constraints.txt -e ".[data,mlperf,baselines]"
	@touch $@

$(VENV)/.bench-ready: $(VENV)/.run-ready
	@$(PIP) -c constraints.txt -e ".[data,mlperf,baselines,bench]"
	@touch $@

$(VENV)/.docs-ready: $(VENV)/.run-ready
	@$(PIP) -c constraints.txt -e ".[data,mlperf,docs]"
	@touch $@

$(VENV)/.test-ready: $(VENV)/.run-ready
	@$(PIP) -c constraints.txt -e ".[data,mlperf,docs,tensorboard,dev]"
	@touch $@

# Without constraints: what wandb and mlflow need is theirs, and no test of make test needs them.
$(VENV)/.loggers-ready: $(VENV)/.test-ready
	@$(PIP) wandb mlflow-skinny sqlalchemy alembic
	@touch $@

# Torch brings its own triton, whose interpreter (3.6) needs numpy before 2.4, and its bounds of setuptools. Where no
# wheels of TorchRec's parts exist for this platform, the tests of ranks skip; any other failure to install is an error.
$(OTHER)/.ready: pyproject.toml constraints.txt requirements/distributed-cpu.txt
	@[ -n "$(torchrec-$(VERSION))" ] || { echo "VERSION=$(VERSION): no TorchRec is listed for it, one of: $(OTHERS)"; exit 1; }
	@echo "setting up $(OTHER) (once, some minutes)"
	@$(PYTHON) -m venv $(OTHER)
	@$(OTHER_PIP) torch==$(VERSION)
	@grep -vE '^(torch|triton|setuptools|numpy|torchrec|fbgemm-gpu-cpu)=' constraints.txt > $(OTHER)/constraints.txt
	@printf 'torch==$(VERSION)\nnumpy<2.4\n' >> $(OTHER)/constraints.txt
	@$(OTHER_PIP) -c $(OTHER)/constraints.txt -e ".[data,mlperf,tensorboard,dev]"
	@grep -vE '^(torchrec|fbgemm-gpu-cpu)=' requirements/distributed-cpu.txt > $(OTHER)/distributed.txt
	@$(OTHER_PIP) --no-deps -r $(OTHER)/distributed.txt $(torchrec-$(VERSION)) 2> $(OTHER)/torchrec.log || { \
	  cat $(OTHER)/torchrec.log; ! grep -qE "Retrying|Could not fetch|HTTP error" $(OTHER)/torchrec.log && \
	  grep -q "No matching distribution found" $(OTHER)/torchrec.log && \
	  echo "no wheels of TorchRec for torch $(VERSION) on this platform: the tests of ranks skip"; }
	@touch $@

# Without dependencies: torchrec asks for another build of fbgemm than the one that runs here.
$(VENV)/.distributed-ready: $(VENV)/.run-ready requirements/distributed-cpu.txt
	@$(PIP) --no-deps -r requirements/distributed-cpu.txt
	@touch $@
