# Every target works in a fresh clone, outside of any virtual environment. Start with `make help`.

PYTHON ?= $(shell for name in python3.11 python3; do \
	"$$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
JOBS ?= 2

bin := .venv/bin
pip := $(bin)/python -m pip -qq --disable-pip-version-check
pins := pyproject.toml constraints.txt
checks := $(bin)/ruff check && $(bin)/ruff format --check && $(bin)/mypy && $(bin)/lint-imports
# A file is run by one process, because its tests share fixtures; see FileScheduling in tests/conftest.py.
distributed := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test check test-long test-faults test-tensorflow bench soundness zoo detection docs dist clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 24

demo: .venv/.installed ## train and audit a correct and a broken DP-SGD; write the report to dpaudit-demo/
	$(bin)/dpaudit demo

# The checks run in the background, because mypy needs half a minute; their output is printed last.
test: .venv/.installed-dev ## run every check: lint, format, types, layers, tests
	@log=$$(mktemp); ($(checks)) >"$$log" 2>&1 & checks=$$!; \
	trap 'kill $$checks 2>/dev/null; rm -f "$$log"' EXIT; trap 'exit 130' INT TERM; \
	$(bin)/python -m pytest $(distributed); tests=$$?; \
	wait $$checks; checked=$$?; cat "$$log"; exit $$((tests | checked))

check: .venv/.installed-dev ## run lint, format, types and layers only
	$(checks)

test-long: .venv/.installed-dev ## run all tests, including long ones, with 40 seeds where training is repeated
	DPAUDIT_TEST_LONG=1 $(bin)/python -m pytest $(distributed)

test-faults: .venv/.installed-dev ## kill runs, workers and Ray, and fill disks; part of test-long
	DPAUDIT_TEST_LONG=1 $(bin)/python -m pytest tests/robustness

test-tensorflow: .venv-tensorflow/.installed ## run the tests with TF Privacy, which needs a separate environment
	.venv-tensorflow/bin/python -m pytest tests_tensorflow

bench: .venv/.installed-dev .venv-bench/.installed ## compare speed and tightness with other tools
	$(bin)/python benchmarks/run.py --others .venv-bench/bin/python

soundness: .venv/.installed-dev ## simulate the coverage of every bound; write docs/soundness.md and docs/data
	$(bin)/python tools/pages/soundness.py

zoo: .venv/.installed-dev ## run the faults in the zoo and their correct twins with many seeds; write docs/zoo.md
	$(bin)/python tools/pages/zoo.py

detection: .venv/.installed-dev ## measure which faults default settings detect; write docs/detection.md
	$(bin)/python tools/pages/detection.py

docs: .venv/.installed-dev ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet

dist: .venv/.installed ## build the wheel and the source archive into dist/
	rm -rf dist
	$(bin)/python -m hatchling build -d dist

clean: ## delete everything that the other targets create
	rm -rf .venv .venv-bench .venv-tensorflow site dist dpaudit-demo dpaudit-reproduction dpaudit-zoo .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tests_tensorflow benchmarks tools -name __pycache__ -prune -exec rm -rf {} +

# What users need. The build backend is pinned, too.
.venv/.installed: $(pins) | .venv/bin/python
	@echo "Installing dpaudit into .venv; torch is a large download, so this takes a minute or more"
	@$(pip) install -c constraints.txt hatchling editables
	@$(pip) install -c constraints.txt --no-build-isolation -e '.[torch]'
	@touch $@

# What developers need in addition.
.venv/.installed-dev: .venv/.installed
	@echo "Installing the development tools into .venv"
	@$(pip) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

.venv-bench/.installed: benchmarks/constraints.txt | .venv-bench/bin/python
	@echo "Installing the other tools into .venv-bench"
	@.venv-bench/bin/python -m pip -qq --disable-pip-version-check install -r benchmarks/constraints.txt
	@touch $@

# TF Privacy 0.9 cannot be installed together with recent packages. The constraints list what the tests need and
# omit what TensorFlow requires but does not use here; --no-deps keeps pip from adding that.
.venv-tensorflow/.installed: pyproject.toml tests_tensorflow/constraints.txt | .venv-tensorflow/bin/python
	@echo "Installing TensorFlow, TF Privacy and dpaudit into .venv-tensorflow"
	@.venv-tensorflow/bin/python -m pip -qq --disable-pip-version-check install --no-compile --no-deps -r tests_tensorflow/constraints.txt
	@.venv-tensorflow/bin/python -m pip -qq --disable-pip-version-check install --no-deps --no-build-isolation -e .
	@touch $@

%/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; specify it with: make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $*
