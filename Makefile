# Every target works in a fresh clone, outside any virtual environment. Start with `make help`.

PYTHON ?= $(shell for name in python3.11 python3; do \
	"$$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
JOBS ?= 2

bin := .venv/bin
pip := $(bin)/python -m pip -qq --disable-pip-version-check
pins := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-tensorflow bench soundness zoo docs dist clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 24

demo: .venv/.installed ## train and audit a correct and a broken DP-SGD; the report goes to dpaudit-demo/
	$(bin)/dpaudit demo

test: .venv/.installed-dev ## every check: lint, format, types, layers, tests
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/python -m pytest -n $(JOBS) --dist worksteal

test-long: .venv/.installed-dev ## all tests, long ones too, with 40 seeds where a training is repeated
	DPAUDIT_TEST_LONG=1 $(bin)/python -m pytest -n $(JOBS) --dist worksteal

test-tensorflow: .venv-tensorflow/.installed ## the tests with TF Privacy, which needs an environment of its own
	.venv-tensorflow/bin/python -m pytest tests_tensorflow

bench: .venv/.installed-dev .venv-bench/.installed ## compare speed and tightness with other tools
	$(bin)/python benchmarks/run.py --others .venv-bench/bin/python

soundness: .venv/.installed-dev ## simulate the coverage of every bound; writes docs/soundness.md
	$(bin)/python benchmarks/soundness.py

zoo: .venv/.installed-dev ## run the faults of the zoo and their twins with many seeds; writes docs/zoo.md
	$(bin)/python benchmarks/zoo.py

docs: .venv/.installed-dev ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet

dist: .venv/.installed ## build the wheel and the source archive into dist/
	rm -rf dist
	$(bin)/python -m hatchling build -d dist

clean: ## delete what the other targets made
	rm -rf .venv .venv-bench .venv-tensorflow site dist dpaudit-demo dpaudit-zoo .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tests_tensorflow benchmarks -name __pycache__ -prune -exec rm -rf {} +

# What a user needs. The build backend comes from the same pins as everything else.
.venv/.installed: $(pins) | .venv/bin/python
	@echo "Installing dpaudit into .venv; torch is a large download, so this takes a minute or more"
	@$(pip) install -c constraints.txt hatchling editables
	@$(pip) install -c constraints.txt --no-build-isolation -e '.[torch]'
	@touch $@

# What a developer needs as well.
.venv/.installed-dev: .venv/.installed
	@echo "Installing the development tools into .venv"
	@$(pip) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

.venv-bench/.installed: benchmarks/constraints.txt | .venv-bench/bin/python
	@echo "Installing the other tools into .venv-bench"
	@.venv-bench/bin/python -m pip -qq --disable-pip-version-check install -r benchmarks/constraints.txt
	@touch $@

# TF Privacy 0.9 cannot be installed beside anything new. The list has every package that the tests need, and
# not those that TensorFlow only asks for; --no-deps keeps pip from adding them.
.venv-tensorflow/.installed: pyproject.toml tests_tensorflow/constraints.txt | .venv-tensorflow/bin/python
	@echo "Installing TensorFlow, TF Privacy and dpaudit into .venv-tensorflow"
	@.venv-tensorflow/bin/python -m pip -qq --disable-pip-version-check install --no-compile --no-deps -r tests_tensorflow/constraints.txt
	@.venv-tensorflow/bin/python -m pip -qq --disable-pip-version-check install --no-deps --no-build-isolation -e .
	@touch $@

%/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with: make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $*
