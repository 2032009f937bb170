# Two commands, each a thin line over a documented one:
#   make labs                 install, run every lab, say which published number no longer holds
#   make labs LABS="00 01"    only these
#   make labs TORCH=cpu       PyTorch's CPU wheels (smaller), where PyTorch's own index can be reached
#   make test                 everything that CI runs
LABS  ?=
TORCH ?= default
VENV  := .venv
BIN   := $(VENV)/bin
# The first Python of a supported version; override with PYTHON=/path/to/python3.12
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $$p && break; done)
STAMP := $(VENV)/installed-$(TORCH)
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIN = $(shell sed -n 's/^ *"\(\(torch\|torchvision\)==[^"]*\)",*$$/\1/p' pyproject.toml)

.PHONY: labs test install clean

labs: $(STAMP)
	@$(BIN)/labs run $(LABS); run=$$?; if [ $$run -le 1 ]; then $(BIN)/labs check $(LABS); fi && exit $$run

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/labs run
	$(BIN)/labs check
	LABS_RUN=1 $(BIN)/python -m pytest --nbval --nbval-sanitize-with tests/notebooks/sanitize.cfg --nbval-cell-timeout 300 notebooks/00_*.ipynb
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadgroup

install: $(STAMP)

$(STAMP): pyproject.toml
	@case "$(TORCH)" in default|cpu) ;; *) echo "TORCH=$(TORCH): default or cpu is expected"; exit 1;; esac
	@test -n "$(PYTHON)" && "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null || { echo "'$(PYTHON)' is no Python 3.11 to 3.13 with venv" \
		"(Debian: apt install python3-venv). Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@if [ "$(TORCH)" = cpu ]; then \
		echo "Installing $(PIN) from PyTorch's CPU index"; \
		$(BIN)/python -m pip install --retries 1 --timeout 15 --index-url $(CPU_INDEX) $(PIN) \
		|| echo "PyTorch's CPU index cannot be reached: taking the default wheels instead"; fi
	@echo "Installing the pinned set (with PyTorch's default wheels about 6 GB; a minute or several)"
	$(BIN)/python -m pip install --editable ".[run,test,pinned]"
	@rm -f $(VENV)/installed-* && touch $@

clean:
	rm -rf $(VENV) build
