# Six words for what is done often. TLORA_VENV names another environment than ./.venv.
.PHONY: help env quickstart test quick lint docs
PYTHON = $$(scripts/setup_env.sh test)

help:        ## list these words (the default)
	@sed -n 's/^\([a-z]*\): *## */\1\t/p' $(MAKEFILE_LIST) | expand -t 12

env:         ## make ./.venv with all that tests and documentation need
	@scripts/setup_env.sh dev

quickstart:  ## train four small jobs on the CPU and check the adapters with PEFT
	scripts/quickstart.sh

test:        ## lint, types and all tests
	scripts/test.sh

quick:       ## lint, types and the fast unit tests: about a minute
	scripts/test.sh quick

lint:        ## format, lint and check types
	python=$(PYTHON) && $$python -m ruff format . && $$python -m ruff check --fix . && $$python -m mypy

docs:        ## build the documentation into build/site; a broken link is an error
	python=$(PYTHON) && $$python -m mkdocs build --strict
