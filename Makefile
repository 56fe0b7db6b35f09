# Each target sets up what it needs in $(VENV), out of an ordinary build of this tree, and says so.
#
#     make demo      train on the text of Python's own library, then stream new text
#     make test      run the tests

PYTHON ?= python3
VENV ?= .venv
NEEDED_MB ?= 1000

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
SAY := @echo "recur:"

# Folders are among the sources, so that a deleted file counts as a change.
SOURCES := setup.py pyproject.toml $(shell find recur \( -name '__pycache__' -o -name '*.so' \
	-o -name '_kernels.c' -o -name '_kernels.html' \) -prune -o -print)

.PHONY: help demo test lint docs bench soak bench-peers test-all test-lowest test-oracles sanitize valgrind \
	test-dist dist run-lowest run-oracles clean FORCE
.DELETE_ON_ERROR:

help:
	@echo "make demo          train a character model on real text, then stream new text from it"
	@echo "make test          run the tests (ARGS='-k lstm' to choose)"
	@echo "make lint          ruff, mypy, cython-lint"
	@echo "make docs          build docs/_build/html"
	@echo "make bench         measure recur on this machine (ARGS='--filter Step')"
	@echo "make soak          long runs of live streams: kills, growth, load (a quarter of an hour; keeps a log)"
	@echo "make bench-peers   measure recur beside other libraries (downloads them, takes 40 minutes)"
	@echo "make test-all      the tests on every CPython 3.10 to 3.14 that runs here"
	@echo "make test-lowest   the tests with the oldest NumPy and SciPy allowed"
	@echo "make test-oracles  the comparisons with torch, onnxruntime and others (downloads them)"
	@echo "make sanitize      the kernels' tests under AddressSanitizer and UBSan, on every CPU path (GCC, Linux)"
	@echo "make valgrind      a small run of the kernels under valgrind's memcheck (Linux)"
	@echo "make test-dist     the tests of the wheel, made from the sdist, outside this tree"
	@echo "make dist          dist/*.tar.gz and dist/*.whl"
	@echo "make clean         remove environments and build products"
	@echo "PYTHON=... chooses the interpreter (now: $(PYTHON)), VENV=... the environment's folder"

# --- the environment

# Run each time, since PYTHON may name another interpreter than the last time; it leaves a fitting
# environment, and the file's date, as they are.
$(VENV)/made-by: FORCE
	@sh tools/venv.sh "$(PYTHON)" "$(VENV)" $(NEEDED_MB)

$(VENV)/recur.installed: $(VENV)/made-by $(SOURCES)
	$(SAY) "building and installing recur into $(VENV) (it compiles for a minute or two)"
	@rm -rf build
	@$(PIP) ".[cli]"
	@touch $@

$(VENV)/%.group: $(VENV)/made-by pyproject.toml
	$(SAY) "installing what \"$*\" needs into $(VENV)"
	@$(PIP) --group $*
	@touch $@

# --- what to do in it: scripts of the environment, as "python -m" would import the unbuilt recur/

demo: $(VENV)/recur.installed
	$(BIN)/recur demo

test: $(VENV)/recur.installed $(VENV)/test.group
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/recur.installed $(VENV)/lint.group
	$(BIN)/ruff check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cython-lint recur  # it runs pycodestyle by name

docs: $(VENV)/recur.installed $(VENV)/docs.group
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	$(SAY) "open docs/_build/html/index.html"

bench: $(VENV)/recur.installed
	$(BIN)/python benchmarks/run.py $(ARGS)

soak: $(VENV)/recur.installed $(VENV)/test.group
	@mkdir -p benchmarks/results
	@log=benchmarks/results/soak-$$(date +%F).log; \
		echo "recur: soaking, into $$log"; \
		$(BIN)/python benchmarks/soak.py $(ARGS) > $$log; \
		status=$$?; tail -n 1 $$log; exit $$status

bench-peers:
	@found=$$(sh tools/pythons.sh 3.11) && set -- $$found && \
		sh benchmarks/compare.sh "$$2" .venv-peers benchmarks/results $(ARGS)

# --- other environments

test-all:
	@found=$$(sh tools/pythons.sh) && echo "$$found" | while read -r version python; do \
		echo "recur: testing on Python $$version"; \
		$(MAKE) --no-print-directory test VENV=.venv-$$version PYTHON=$$python </dev/null || exit 1; \
	done

test-lowest:
	@found=$$(sh tools/pythons.sh 3.12 3.11 3.10) && set -- $$found && \
		$(MAKE) --no-print-directory run-lowest VENV=.venv-lowest PYTHON=$$2

run-lowest: $(VENV)/recur.installed $(VENV)/test.group
	@$(PIP) $$($(BIN)/python tools/lowest.py)
	$(BIN)/pytest $(ARGS)

test-oracles:
	@found=$$(sh tools/pythons.sh 3.11) && set -- $$found && \
		$(MAKE) --no-print-directory run-oracles VENV=.venv-oracles PYTHON=$$2 NEEDED_MB=3000

run-oracles: $(VENV)/recur.installed $(VENV)/oracles.group
	$(BIN)/pytest -m oracle --no-skips $(ARGS)

# A second build, which only the tests started here see.  Leaks are not looked for: Python itself
# keeps memory to its end.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined

$(VENV)/sanitized/made: $(VENV)/made-by $(SOURCES)
	$(SAY) "building recur with $(SANITIZERS) into $(VENV)/sanitized"
	@rm -rf build recur/_kernels.c $(VENV)/sanitized
	@RECUR_DEBUG=1 CFLAGS="$(SANITIZERS) -fno-omit-frame-pointer" LDFLAGS="$(SANITIZERS)" \
		$(PIP) --no-deps --no-cache-dir --target $(VENV)/sanitized .
	@rm -rf build recur/_kernels.c  # with the checks of RECUR_DEBUG in it
	@touch $@

# ARCHS names the CPU paths; unless given, all that this machine can run.
sanitize: $(VENV)/sanitized/made $(VENV)/recur.installed $(VENV)/test.group
	@for path in $${ARCHS:-$$($(BIN)/python tools/paths.py)}; do \
		echo "recur: the kernels' tests under sanitizers on $$path"; \
		RECUR_ARCH=$$path LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
			UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$(abspath $(VENV))/sanitized" \
			$(BIN)/pytest --capture=sys tests/test_kernels_*.py $(ARGS) || exit 1; \
	done

# Python's own allocator would hide blocks from valgrind, and its string functions read past the ends
# of theirs: tools/valgrind.supp names what is not recur's.
valgrind: $(VENV)/recur.installed
	@command -v valgrind >/dev/null || { echo "recur: valgrind is missing; install it (Debian:" \
		"apt install valgrind)" >&2; exit 1; }
	PYTHONMALLOC=malloc OPENBLAS_NUM_THREADS=1 valgrind --quiet --error-exitcode=1 \
		--suppressions=tools/valgrind.supp $(BIN)/python tools/small_run.py

dist: $(VENV)/made-by $(VENV)/dist.group
	$(SAY) "building the sdist, and the wheel from it, into dist/"
	@rm -rf build dist
	@log=$$($(BIN)/python -m build --outdir dist . 2>&1) || { echo "$$log"; exit 1; }

test-dist: dist
	@sh tools/try_dist.sh "$(BIN)/python" dist

clean:
	rm -rf .venv .venv-* build dist docs/_build *.egg-info
