# The commands of this project. Each builds what it needs; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help demo demo-surgery ui pictures docs test test-clusters test-spark quick servers check lock audit soak bench bench-scale bench-sdf mutants proto clean

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
UV_VERSION := uv==0.13.9
SCHEDULES ?= 100000
LIMIT ?= 600

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/'

# $(call set_up,LOCK): what fails is one line; Python is checked here, as the script needs it.
define set_up
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ found=$$(command -v $(PYTHON) >/dev/null && $(PYTHON) -V 2>&1 | head -n 1 || echo missing); \
		echo "Python 3.11 or newer is needed; $(PYTHON) is $$found. Next: install it, or call make with PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) requirements/set_up.py $(VENV) $(1) '$(UV_VERSION)'
endef

# What runs the project: no test tools.
$(VENV)/runs: requirements/runtime.txt pyproject.toml
	$(call set_up,runtime)
	@touch $@

$(VENV)/ready: requirements/dev.txt pyproject.toml
	$(call set_up,dev)
	@touch $(VENV)/runs $@

demo: $(VENV)/runs ## run the main job on real data: killed, restarted, compacted, expired, proved (a minute)
	@$(BIN)/python examples/flights/demo.py

demo-surgery: $(VENV)/ready ## fork, evolve and bootstrap stopped jobs, with what a restore loads before and after
	@$(BIN)/python -m tests.surgery_demo

ui: $(VENV)/runs ## open Dagster's UI on a job that goes on, compacted as you watch
	@$(BIN)/python examples/flights/ui.py

pictures: $(VENV)/ready ## take the pictures of the docs again (needs Chromium; Debian: chromium)
	@$(BIN)/python -m tests.browser.pictures

$(VENV)-docs/ready: requirements/docs.txt | $(VENV)/ready
	@echo "Setting up $(VENV)-docs from requirements/docs.txt (once, some seconds)…"
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv --without-pip $(VENV)-docs
	@$(BIN)/uv pip sync --quiet --python $(VENV)-docs/bin/python --require-hashes requirements/docs.txt
	@touch $@

docs: $(VENV)-docs/ready ## build the documentation site in build/docs/site; a broken link or anchor fails
	@$(VENV)-docs/bin/python docs/site/docstrings.py
	@$(BIN)/python docs/site/stage.py build/docs
	@$(VENV)-docs/bin/zensical build --strict --clean --config-file build/docs/zensical.toml
	@! grep -rnE '<(script|link|img)[^>]* (src|href)="?(https?:)?//' build/docs/site --include='*.html' || \
		{ echo "a page loads something from another host: see above"; exit 1; }
	@echo "Open build/docs/site/index.html; for the search: $(PYTHON) -m http.server -d build/docs/site"

# Python keeps what it has compiled, whatever the environment says: the tests start hundreds of
# processes. In a fresh clone one process compiles the tests, else each of the three does.
test test-clusters test-spark quick soak: export PYTHONDONTWRITEBYTECODE :=
TESTS := -m "not soak and not clusters" --ignore=tests/benchmarks
# A process that dies ends the run with an error: what it still had to do is not done by another.
PARALLEL := --numprocesses=3 --dist=loadscope --no-loadscope-reorder --max-worker-restart=0
# What is long by intention may take as long as the process of a test may.
LONG := --timeout=590

test: $(VENV)/ready ## run all tests
	@{ test -d tests/__pycache__ || $(BIN)/python -m pytest $(TESTS) --collect-only >/dev/null; } & \
		$(BIN)/python -m tests.quick_spark; done=$$?; wait; exit $$done
	@$(BIN)/python -m pytest $(TESTS) $(PARALLEL)

test-clusters: $(VENV)/ready ## run the tests on Spark clusters that they start on loopback (not part of CI)
	@$(BIN)/python -m pytest tests/clusters $(LONG)

# Without whole commands, and what starts processes, runs two writers in every order, or kills at
# each write.
NOT_QUICK := cli spark/test_holders.py engine/test_interleavings.py test_imports.py \
	test_optional_packages.py dataflow/test_migrate.py dataflow/runtime/test_failed_records.py \
	dataflow/topics/test_ways_out.py
# One process for each of two cores: each loads and collects anew.
QUICK := $(NOT_QUICK:%=--ignore=tests/unit/%) --numprocesses=2 $(filter-out --numprocesses=%,$(PARALLEL))
quick: export HYPOTHESIS_PROFILE ?= quick
quick: $(VENV)/ready ## run the unit and property tests, with few examples of each property
	@$(BIN)/python -m pytest tests/unit tests/property -m "not soak" $(QUICK)

# Another pyspark beside the packages of .venv: its own come first.
SPARK := $(VENV)-spark-$(VERSION)
ON_CLUSTERS := tests/clusters/test_connect.py tests/clusters/test_standalone.py

test-spark: $(VENV)/ready ## run the Spark tests with another pyspark: VERSION=3.5 (needs a network once)
	@test -n "$(VERSION)" || { echo "Which pyspark? For example: make test-spark VERSION=3.5"; exit 1; }
	@test -e $(SPARK)/ready || { $(PYTHON) -m venv --without-pip $(SPARK) && \
		$(BIN)/uv pip install --quiet --no-cache --python $(SPARK)/bin/python 'pyspark==$(VERSION).*' && \
		echo "import site; site.addsitedir('$$(realpath $(VENV)/lib/python3.*/site-packages)')" \
			> "$$(echo $(SPARK)/lib/python3.*/site-packages)/project.pth" && touch $(SPARK)/ready; }
	@$(SPARK)/bin/python -m pytest tests/spark $(ON_CLUSTERS) -m "not soak" $(LONG)

servers: $(VENV)/ready ## install the S3 servers that tests use beside moto (needs Go and npm; once)
	@$(BIN)/python -m tests.s3_servers $(SERVERS)

check: $(VENV)/ready ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

soak: $(VENV)/ready servers ## kills and SCHEDULES=100000 random schedules; SEED= repeats a run (not part of CI)
	@$(BIN)/python -m tests.explorer.soak --schedules $(SCHEDULES) $(if $(SEED),--seed $(SEED))
	@$(if $(SEED),SOAK_SEED=$(SEED)) $(BIN)/python -m pytest -m soak $(LONG)

bench: $(VENV)/ready ## figures as ratios to peers in one run (not part of CI)
	@$(BIN)/python -m pytest tests/benchmarks -s $(LONG)

bench-scale: $(VENV)/ready ## cost beside size: measure again, draw docs/pictures/scale.svg (LIMIT=600 seconds for one size)
	@$(BIN)/python -m tests.benchmarks.scale docs/site/scale.csv --limit $(LIMIT)
	@$(BIN)/python docs/site/plots.py

bench-sdf: $(VENV)/ready ## the speed of dataflows beside floors and goals: measure again, write docs/operate/sdf-speed.md
	@$(BIN)/python -m tests.benchmarks.sdf docs/operate/sdf-speed.md

mutants: $(VENV)/ready ## mutation tests of the safety modules (hours; MODULE=lease for one)
	@test -x $(VENV)-mutants/bin/mutmut || { $(PYTHON) -m venv $(VENV)-mutants && \
		echo "$$(realpath $(VENV))"/lib/python3.*/site-packages \
			> "$$(echo $(VENV)-mutants/lib/python3.*/site-packages)/project.pth" && \
		$(VENV)-mutants/bin/pip install --quiet --disable-pip-version-check 'mutmut==3.8.1' \
			"$$(grep -o '^pytest==[0-9.]*' requirements/dev.txt)"; }
	@nice -n 10 $(VENV)-mutants/bin/python tests/mutants/run.py $(MODULE)

UV := $(VENV)-lock/bin/uv
# Universal: one file for every platform and Python. What is locked stays where it still fits.
LOCK := $(UV) pip compile --quiet --universal --python-version 3.11 --no-strip-extras --no-annotate \
	--generate-hashes --no-emit-index-url --custom-compile-command 'make lock'
UPGRADE_OPTION = $(if $(UPGRADE),$(if $(filter all,$(UPGRADE)),--upgrade,--upgrade-package '$(UPGRADE)'))

lock: ## update requirements/*.txt from pyproject.toml (needs a network; UPGRADE=all or UPGRADE=NAME for newer versions)
	@test -x $(UV) || { $(PYTHON) -m venv $(VENV)-lock && \
		$(VENV)-lock/bin/pip install --quiet --disable-pip-version-check '$(UV_VERSION)'; } || \
		{ echo "uv cannot be installed into $(VENV)-lock: see above"; exit 1; }
	@$(LOCK) $(UPGRADE_OPTION) pyproject.toml --extra spark --extra ui \
		--output-file requirements/runtime.txt >/dev/null
	@$(LOCK) $(UPGRADE_OPTION) pyproject.toml --constraint requirements/runtime.txt \
		--output-file requirements/base.txt >/dev/null
	@$(LOCK) $(UPGRADE_OPTION) pyproject.toml --group dev --constraint requirements/runtime.txt \
		--output-file requirements/dev.txt >/dev/null
	@$(LOCK) $(UPGRADE_OPTION) --group core --constraint requirements/runtime.txt \
		--output-file requirements/core.txt >/dev/null
	@$(LOCK) $(UPGRADE_OPTION) --group docs --output-file requirements/docs.txt >/dev/null
	@! grep -n '://' requirements/*.txt || { echo "a lock file names an address: see above"; exit 1; }
	@git --no-pager diff --stat -- requirements 2>/dev/null || true

# Strict: without an answer about a package pip-audit would say that it has no vulnerabilities.
AUDIT := $(VENV)-audit/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off
SERVICE ?= pypi

audit: ## look for known vulnerabilities of the locked dependencies (needs a network; SERVICE=osv too)
	@test -x $(VENV)-audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)-audit && \
		$(VENV)-audit/bin/pip install --quiet --disable-pip-version-check 'pip-audit==2.10.1'; } || \
		{ echo "pip-audit cannot be installed into $(VENV)-audit: see above"; exit 1; }
	@found=$$($(AUDIT) -s $(SERVICE) -r requirements/runtime.txt 2>$(VENV)-audit/log) && \
		echo "No known vulnerabilities in requirements/runtime.txt ($(SERVICE))." || \
		{ test -n "$$found" && echo "$$found" || echo "Nothing was audited: the service $(SERVICE)" \
		"does not answer for every package (its words: $(VENV)-audit/log)" \
		"$(if $(filter osv,$(SERVICE)),,- try SERVICE=osv)"; exit 1; }

proto: ## regenerate the protobuf modules (needs a network once)
	@test -x $(VENV)-proto/bin/python || { $(PYTHON) -m venv $(VENV)-proto && \
		$(VENV)-proto/bin/pip install --quiet 'grpcio-tools==1.62.3' 'mypy-protobuf==3.6.0' 'setuptools<80'; }
	@$(VENV)-proto/bin/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. \
		--plugin=protoc-gen-mypy=$(VENV)-proto/bin/protoc-gen-mypy \
		arroyo_dagster/state/codec/proto/state.proto

clean: ## remove what the other commands made
	@rm -rf $(VENV) $(VENV)-spark-* $(VENV)-proto $(VENV)-mutants $(VENV)-audit $(VENV)-lock $(VENV)-docs build/docs .mutants .demo .dagster .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +
