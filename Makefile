# `make demo` runs 16 sessions on the embedded model, `make test` runs all checks. Each installs what it needs.
.PHONY: chaos fleet-chaos demo gpu gpu-lock test setup check gpu-test fuzz harness-matrix fork-matrix distill meaning resolution learn learn-lora learn-ablations learn-tree learn-trl wheel-check docs clean

PY := .venv/bin/python

demo: setup
	@.venv/bin/polarnode run --cpu --run-limit 6 --out out/demo --expect-reward examples/demo/pi.toml examples/demo/mini_swe_agent.toml; \
	code=$$?; cat examples/demo/after.txt; exit $$code

test:
	@tools/setup.sh test
	tools/check.sh

setup:
	@tools/setup.sh

gpu-test: setup
	$(PY) -m pytest -m gpu tests/test_gpu.py

# Measure what one GPU shows, in parts of eight minutes that go on where they were cut off: out/gpu. DRY=1 plays them on the CPU, in three minutes.
gpu: setup
	$(PY) benchmarks/gpu.py $(if $(DRY),--dry-run --out out/gpu-dry,--out out/gpu) $(if $(PARTS),--parts $(PARTS))

# Resolve the environment of a GPU host again, on any machine: tools/constraints-gpu.txt. Two minutes.
gpu-lock: setup
	$(PY) tools/lock_gpu.py

# Play the fuzz targets of tests/fuzz for MINUTES together; TARGET=api_google plays one. COVERAGE=1 chooses inputs by coverage, with atheris.
MINUTES ?= 30
fuzz: setup
	$(PY) tools/fuzz.py --minutes $(MINUTES) $(if $(TARGET),--target $(TARGET)) $(if $(COVERAGE),--coverage)

# Run every harness in every API that it speaks, and write the table of docs/harnesses.md: half an hour, some 8 GB of images the first time.
harness-matrix: setup
	$(PY) tools/harness_matrix.py

# Fork a session of every harness that resumes, in each of its APIs, and write the table of docs/forks.md: three minutes, and images the first time.
fork-matrix: setup
	$(PY) tools/fork_matrix.py

# Run sessions of every harness, check their rows in transformers, write the tables of docs/token-fidelity.md: half an hour on two idle cores.
meaning: setup
	$(PY) tools/meaning.py

# Resolve `pip install polarnode` beside each trainer's own requirements, and write the table of docs/trainers/environment.md: some minutes.
resolution: setup
	$(PY) tools/resolution.py

# Kill, stop, fill and damage a node for half an hour, and count: out/chaos/chaos.json. `make chaos MINUTES=5` is shorter, SEED=7 gives a run again.
chaos: setup
	$(PY) benchmarks/chaos.py --rounds 15 --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) --keep out/chaos

# Kill and stop nodes that share a log, readers and PostgreSQL for an hour, and count: out/fleet-chaos.json. `make fleet-chaos MINUTES=5 NODES=3` is shorter.
fleet-chaos: MINUTES = 60
fleet-chaos: setup
	@mkdir -p out
	$(PY) benchmarks/fleet.py --nodes $(or $(NODES),8) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --json out/fleet-chaos.json

# Run the GRPO loop of docs/learning.md on its own node: OUT/report.json, curve.svg, log.jsonl. It must reach, on the 96 held-out tasks, 0.8 less two
# standard deviations. `make learn NODES=2` does it on a fleet of two nodes of its own.
learn: setup
	$(PY) -m examples.grpo --out out/grpo --stop-at 0.88 --expect 0.72 $(if $(NODES),--nodes $(NODES))

# Distil the weights that `make learn` left behind into the embedded model again, by their logprobs alone: OUT/report.json, curve.svg, log.jsonl. It must
# do better on the 96 held-out tasks than that model does.
distill: setup
	$(PY) -m examples.grpo --teacher out/grpo --out out/distill --prompts 32 --samples 1 --steps 5 --expect 0.66

# The same with an adapter, which learns less (docs/learning.md#lora): the base's weights stay as they are.
learn-lora: setup
	$(PY) -m examples.grpo --lora 16 --out out/grpo-lora --stop-at 0.88

learn-ablations: setup
	$(PY) -m examples.grpo.ablations --out out/grpo-ablations

# Forks against flat groups, on one budget of sampled tokens: docs/learning.md#trees.
learn-tree: setup
	$(PY) -m examples.grpo.trees --out out/grpo-trees

# TRL is in an environment of its own, on top of the node's.
learn-trl: setup
	$(PY) tools/trl_environment.py
	TRL_EXPERIMENTAL_SILENCE=1 .venv/trl/bin/python -m examples.grpo.with_trl --out out/grpo-trl --steps 7

# Make the wheel from a clean clone, install it with [node] in an empty environment, run the README's first task there: some minutes, a package index.
wheel-check:
	@tools/wheel_check.sh

# The pages of docs/ as one searchable site: out/site. `python3 -m http.server --directory out/site` shows it; it needs no network.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo out/site/index.html

clean:
	rm -rf out .venv .mypy_cache .ruff_cache .pytest_cache .cache
