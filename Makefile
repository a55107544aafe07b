# Two commands a newcomer needs: `make demo` and `make test`. Each does its own set-up, once.
PYTHON ?= python3
# Processes in which `make test` and `make test-slow` run the tests.
JOBS ?= 2
BIN := .venv/bin
ENV := .venv/.ready

.PHONY: demo test test-slow test-gpu bench-gpu test-cluster test-storm lint typecheck unit docs constraints clean help

help:
	@echo "make demo         the paper's method on real handwritten digits, into runs/demo/ (under 3 minutes)"
	@echo "make test         lint, types, import contracts and the tests (8 minutes on 2 idle x86 cores, under 20 on slow ones; JOBS=n for n processes)"
	@echo "make test-slow    the slow tests that need neither a GPU nor a cluster"
	@echo "make test-cluster tests with many processes: launchers, kills, a real Slurm (under 25 minutes)"
	@echo "make test-storm   the slow tests with many processes"
	@echo "make test-gpu     the tests that need a GPU"
	@echo "make bench-gpu    benchmarks on a GPU; FIGURES=\"...\" selects some, IMAGES=folder of JPEGs, CIFAR=folder of CIFAR-10"
	@echo "make docs         the documentation as a site, into site/; warnings are errors"
	@echo "make constraints  pin the newest versions that pyproject.toml allows"
	@echo "make clean        remove the environment (.venv)"

demo: $(ENV)
	$(BIN)/incv run -c recipes/demo.yaml

test: lint typecheck unit

lint: $(ENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

typecheck: $(ENV)
	$(BIN)/mypy

unit: $(ENV)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu and not cluster and not storm"

test-gpu: $(ENV)
	$(BIN)/python -m pytest -m gpu

bench-gpu: $(ENV)
	$(BIN)/python benchmarks/gpu.py $(FIGURES) $(if $(IMAGES),--images $(IMAGES)) $(if $(CIFAR),--cifar $(CIFAR))

test-slow: $(ENV)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow and not gpu and not cluster and not storm"

test-cluster: $(ENV)
	$(BIN)/python -m pytest -m "cluster and not storm"

test-storm: $(ENV)
	$(BIN)/python -m pytest -m storm

# uv is ten times faster than pip; where it cannot be had, pip does the same from the same pins.
$(ENV): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "incv needs Python 3.11 or newer, $(PYTHON) is older: say make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv || true
	if $(BIN)/uv --version >/dev/null 2>&1; \
	  then $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[demo,dali,deepspeed,docs,dev]'; \
	  else $(BIN)/python -m pip install -c constraints.txt -e '.[demo,dali,deepspeed,docs,dev]'; fi
	touch $@

# The variable silences a notice about the next major version of MkDocs, which constraints.txt keeps out.
docs: $(ENV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is in site/: open site/index.html"

constraints: $(ENV)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade \
	  --no-annotate --no-header --quiet -o constraints.txt

clean:
	rm -rf .venv
