# Two commands: `make demo` runs the main job on the embedded model, `make test` passes the tests. Each sets up what it needs.
.PHONY: demo test setup check gpu-test harness-matrix meaning clean

PY := .venv/bin/python

demo: setup
	.venv/bin/polarnode run --cpu --run-limit 6 --out out/demo --expect-reward examples/demo/pi.toml examples/demo/mini_swe_agent.toml

test:
	@tools/setup.sh test
	tools/check.sh

setup:
	@tools/setup.sh

gpu-test: setup
	$(PY) -m pytest -m gpu tests/test_gpu.py

# Every harness in every API it speaks, and the table of docs/harnesses.md: half an hour and some 8 GB of images the first time.
harness-matrix: setup
	$(PY) tools/harness_matrix.py

# Sessions of every harness, their rows through transformers, and the tables of docs/token-fidelity.md: half an hour on two quiet cores.
meaning: setup
	$(PY) tools/meaning.py

clean:
	rm -rf out .venv .mypy_cache .ruff_cache .pytest_cache .cache
