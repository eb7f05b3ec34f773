# All that a newcomer needs: `make run` and `make test`. Plain `make` lists the rest.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=

# Which models `make run` and `make demo` show: smollm2 or qwen-coder.
PAIR ?= smollm2
DEMO = $(VENV)/bin/outrider demo --pair $(PAIR)

# In an environment of its own, as it pulls other packages back.
CHECKOV := .venv-checkov/bin/checkov

PACKAGES := outrider specdec draft_worker target_worker scheduler services
GENERATE = $(PY) -m grpc_tools.protoc -Iprotos --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) \
	--mypy_grpc_out=quiet:$(1) protos/outrider/v1/*.proto

# A path with a blank is only taken as a URL: pip splits the variable at blanks.
blank := $(subst ,, )
export PIP_CONSTRAINT := file://$(subst $(blank),%20,$(CURDIR))/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Code generators are looked for beside the interpreter.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Workers that spin while they wait starve each other on shared cores; read once, when torch is imported.
export OMP_WAIT_POLICY := passive
test test-slow test-mutants: export OMP_NUM_THREADS := 2

.DEFAULT_GOAL := help
.PHONY: help setup run demo test test-slow test-mutants check check-k8s protos check-protos format bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.dev ## Install everything for development into .venv (TORCH=<requirement or file>: your own torch)

run: $(VENV)/.runtime ## Answer one prompt through scheduler, draft and target worker, then end (PAIR=qwen-coder: two real models)
	@$(DEMO) $(ARGS)

demo: $(VENV)/.runtime ## The same, but stay up for prompts of yours
	@$(DEMO) --keep $(ARGS)

test: $(VENV)/.dev ## Run the tests (ARGS="-k name" selects; they run in two lanes, ARGS="-n 0" in one)
	$(PY) -m pytest -n 2 $(ARGS)

test-slow: $(VENV)/.dev ## Run all tests, the slow ones included
	$(PY) -m pytest -m "slow or not slow" $(ARGS)

test-mutants: $(VENV)/.dev ## Plant faulty samplers one by one; each must fail the test that names it
	PYTHONPATH=.:tests $(PY) -m mutants

check: $(VENV)/.dev ## Lint, formatting, types, import direction, protos: all of them, then fail if any did
	@failed=; for check in "$(PY) -m ruff check" "$(PY) -m ruff format --check" $(VENV)/bin/lint-imports "$(PY) -m mypy" \
	"$(VENV)/bin/buf lint" "$(MAKE) --no-print-directory check-protos"; do \
	echo "== $$check"; $$check || failed="$$failed\n  $$check"; done; \
	test -z "$$failed" || { printf "make check: failed:$$failed\n" >&2; exit 1; }

check-k8s: $(VENV)/.dev $(CHECKOV) ## checkov over what k8s/ renders, the images' install steps, overlays as processes (minutes)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && for overlay in k8s/overlays/*; do \
	$(VENV)/bin/kubectl kustomize "$$overlay" > "$$fresh/$${overlay##*/}.yaml" || exit 1; done \
	&& $(CHECKOV) --config-file k8s/checkov.yaml --directory "$$fresh"
	$(PY) -m pytest -m 'slow and not model' -k 'not worker_image' tests/test_k8s_*.py $(ARGS)

protos: $(VENV)/.dev ## Regenerate outrider/v1 from protos/
	$(call GENERATE,.)

check-protos: $(VENV)/.dev ## Fail if outrider/v1 is not what protos/ generates
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call GENERATE,$$fresh) && touch $$fresh/outrider/v1/__init__.py \
	&& diff -r --exclude=__pycache__ outrider/v1 $$fresh/outrider/v1 \
	|| { echo "outrider/v1 differs from what protos/ generates: run 'make protos' and commit the result" >&2; exit 1; }

format: $(VENV)/.dev ## Format the code and fix what ruff can fix
	$(PY) -m ruff check --fix-only
	$(PY) -m ruff format

bench: $(VENV)/.dev ## Measure for at most 40 minutes, and write docs/benchmarks.md (ARGS="NAME --help": one benchmark)
	$(PY) -m bench $(ARGS)

clean: ## Remove .venv, caches and build output (models stay)
	rm -rf $(VENV) .venv-checkov build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find $(PACKAGES) tests bench -name __pycache__ -prune -exec rm -rf {} +

# The environment. Each stamp is newer than what it was made from; TORCH takes part in the first only.

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	echo "make: needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	echo "make: $(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Only `.[all]`: what running needs.
$(VENV)/.runtime: pyproject.toml constraints.txt $(if $(TORCH),always) | $(PY)
	@$(PY) -m pip install -qq --upgrade pip setuptools
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
ifneq ($(TORCH),)
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(PY) -m pip install '$(TORCH)'
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/torch.txt
endif
	@if [ -f $(VENV)/torch.txt ]; then cat $(VENV)/torch.txt; else grep '^torch==' constraints.txt; fi >> $(VENV)/constraints.txt
	@$(PY) -c "$$SAY_SIZE"
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(PY) -m pip install -qq --no-build-isolation --editable '.[all]'
	@touch $@

# The tools on top.
$(VENV)/.dev: $(VENV)/.runtime
	@test -x $(VENV)/bin/pytest || echo 'Installing the development tools: about 100 MB to download, 0.3 GB on disk.'
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(PY) -m pip install -qq --no-build-isolation --editable '.[dev]'
	@touch $@

$(CHECKOV): k8s/checkov-requirements.txt | $(PY)
	$(PY) -m venv .venv-checkov
	@echo 'Installing checkov: about 90 MB to download, 0.3 GB on disk.'
	PIP_CONSTRAINT= .venv-checkov/bin/python -m pip install -qq --requirement $<
	@touch $@

.PHONY: always
always:

# Asks the package index which build of torch would come, without fetching it.
define SAY_SIZE
import importlib.util, json, pathlib, subprocess, sys
torch = pathlib.Path("$(VENV)/torch.txt")
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-", "torch"]
if torch.exists():
    print(f"Keeping {torch.read_text().strip()}. Installing the rest: about 95 MB to download.")
elif importlib.util.find_spec("torch"):
    print("Bringing .venv up to date.")
elif (asked := subprocess.run(pip, capture_output=True, text=True)).returncode:
    sys.exit("make: no package index answers, or none has torch for this Python: " + asked.stderr.strip()[-300:])
else:
    needs = " ".join(json.loads(asked.stdout)["install"][0]["metadata"].get("requires_dist", []))
    if "nvidia" in needs or "cuda" in needs:
        print("Installing torch with CUDA and the rest: roughly 3 GB to download, 7 GB on disk.")
        print("For a CPU build, or your own: make setup TORCH=<requirement or wheel file>")
    else:
        print("Installing torch for the CPU and the rest: about 280 MB to download, 1.3 GB on disk.")
endef
export SAY_SIZE
