# `make demo` and `make test` do all their set-up themselves. PYTHON names the interpreter to build .venv from.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
NODES  ?= 4
FAULTS ?= 300
SEED   ?= 1

.PHONY: help setup packages demo check test test-all integrations docs fuzz chaos soak bench cluster cluster-shell cluster-fault cluster-down clean

help:
	@echo "make demo           a node dies under the example, a spare takes over; writes deadpool-demo.png"
	@echo "make test           format, lint, types, import contracts, all tests but the fault matrix"
	@echo "make test-all       make test, the fault matrix, the group tests on a second torch, make integrations"
	@echo "make integrations   jobs of transformers and lightning under faults"
	@echo "make docs           the pages of docs/ as a site in build/site"
	@echo "make fuzz           100,000 mutated inputs for every reader of bytes or text from outside"
	@echo "make chaos          every kind of fault on a real Slurm cluster, docs/reliability.md (root)"
	@echo "make soak           FAULTS=$(FAULTS) faults drawn from SEED=$(SEED), two hours at most (root)"
	@echo "make bench          every figure and picture of docs/evaluation.md again; an hour on an idle machine (root)"
	@echo "make check          format, lint, types, import contracts"
	@echo "make cluster        a real Slurm cluster of NODES=$(NODES) nodes on this machine (root); Ctrl-C ends it"
	@echo "make cluster-shell  a shell on its login node;  make cluster-down  end it from elsewhere"
	@echo "make cluster-fault KIND=power-off NODE=n2   strike a node of it"

packages:
	@tools/debian-packages.sh build cluster

setup: $(VENV)/.ready

$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	@tools/debian-packages.sh build
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt 'setuptools>=70.1'
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev,plot,docs]'
	@touch $@

demo: setup
	@$(BIN)/deadpool rehearse examples/train_gpt.py --nodes 3 --spares 1 \
	    --fault power-off:1@20 --plot deadpool-demo.png

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy $$(find tests bench -name '*.py')
	@PYTHONPATH=.:runtime:slurm $(BIN)/lint-imports setup.cfg

test: check packages
	@$(BIN)/pytest -m "not matrix and not integrations"

test-all: check packages
	@$(BIN)/pytest -m "not integrations"
	@tools/second-torch.sh
	@VENV=$(VENV) tools/frameworks.sh

integrations: setup
	@VENV=$(VENV) tools/frameworks.sh

docs: setup
	@$(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

fuzz: setup
	@$(BIN)/python tests/fuzz/fuzz.py --inputs 100000

chaos: setup packages
	@$(BIN)/python tests/chaos/chaos.py

soak: setup packages
	@$(BIN)/python tests/chaos/soak.py --faults $(FAULTS) --seed $(SEED)

bench: setup packages
	@$(BIN)/python bench/everything.py

cluster: setup packages
	@$(BIN)/python tests/cluster/mini_cluster.py up --nodes $(NODES)

cluster-shell:
	@$(BIN)/python tests/cluster/mini_cluster.py shell

cluster-fault:
	@$(BIN)/python tests/cluster/mini_cluster.py fault $(KIND) $(NODE)

cluster-down:
	@$(BIN)/python tests/cluster/mini_cluster.py down

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
