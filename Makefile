# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed
# DVC runs `python` from PATH.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: demo test test-faults ui install clean

demo: $(INSTALLED)  ## the whole pipeline on the embedded default
	python -m flows.pipeline

test: $(INSTALLED)  ## unit tests, and one real run of the whole chain
	python -m pytest tests -m "not faults"

test-faults: $(INSTALLED)  ## kill -9 in real runs, servers that are started wrong, and what takes longest
	python -m pytest tests -m faults

ui: $(INSTALLED)  ## MLflow on http://127.0.0.1:5000
	mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000

install: $(INSTALLED)

# torch first, with what it needs; then the pinned rest without dependencies, so that nothing is resolved.
# The .pth file puts the CPU stand-in for SGLang's kernels on the path of this environment alone.
$(INSTALLED): infra/constraints-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else \
	  "Draftline needs Python 3.11 to 3.13, this is %d.%d. Name another: make demo PYTHON=python3.12" % v)'
	@echo "Setting up $(VENV): 3.3 GB, 2 to 3 minutes without a word from pip"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' $<)
	$(BIN)/python -m pip install --quiet --no-deps -r $<
	$(BIN)/python -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "draftline.pth").write_text("$(CURDIR)/infra/sglang_cpu\n")'
	touch $@

# DVC's cache stays; `dvc checkout` brings back what it holds (infra/docs/flow.md, "Back to earlier parameters").
# The records of servers stay too: by nothing else is one found that a killed run left behind.
clean:  ## artifacts, reports and logs of runs; the environment stays
	rm -rf artifacts reports
	test ! -d logs || find logs -type f ! -name 'server-*.json' -delete
