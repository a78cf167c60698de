"""What a policy samples behind a harness's own work means what its row says: plain transformers finds the
recorded logprobs in it.

The embedded policy knows the prompts of two harnesses and hardly begins to work in the others. So a script
leads it there, on the steered engine: a shell call, a file written, and then the policy is free, at
temperature 1, behind everything the harness made of those turns. What runs is chosen as in
`test_harness_matrix.py`; with POLARNODE_MEANING_OUT the sessions are kept there, for `tools/meaning.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_kit import ServingNode, meaning_folder, until
from matrix_cases import LED, Case

from polarnode.core import codec
from polarnode.core.trajectory import Trajectory

pytestmark = [pytest.mark.podman, pytest.mark.engine, pytest.mark.harness]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 2400.0  # seconds, as for the matrix: what was submitted before is run before
WANTED = os.environ.get("POLARNODE_MATRIX", "ci")


def wanted(case: Case) -> bool:
    return case.in_ci if WANTED == "ci" else WANTED == "all" or case.name in WANTED.split(",")


def parameters() -> list[object]:
    skip = pytest.mark.skip(reason="not of CI's part: make meaning runs it")
    return [pytest.param(case, id=case.name, marks=() if wanted(case) else skip) for case in LED]


@pytest.fixture(scope="module")
def sessions(steered: ServingNode) -> dict[str, str]:
    """The free turns are the policy's own: it may talk on, or call forever."""
    own = {"sampling": {"temperature": 1.0, "max_tokens": 384}, "budgets": {"run_s": 420.0, "max_turns": 6}}
    return {case.name: steered.submit(**{**case.task(), **own})[0] for case in filter(wanted, LED)}


@pytest.mark.parametrize("case", parameters())
def test_sampled_rows_keep_their_meaning(
    steered: ServingNode, sessions: dict[str, str], case: Case, tmp_path: Path
) -> None:
    """What is sampled behind a script is what its row says."""
    session = sessions[case.name]
    until(
        lambda: steered.client.session(session)["session"]["outcome"],
        f"case {case.name} is over",
        within=PATIENCE_S,
    )
    trajectory = steered.client.trajectory(session, turns="full")
    file = kept(trajectory, tmp_path)
    said = {tuple(line["ids"]) for line in steered.forced(session)}
    free = [turn for turn in trajectory.turns if turn.sampled and tuple(turn.sampled) not in said]
    assert free, f"the policy never spoke: {trajectory.outcome}, {[turn.state for turn in trajectory.turns]}"
    assert any(turn.prompt_length > trajectory.turns[0].prompt_length for turn in free), (
        "it speaks behind the script"
    )
    requests = (meaning_folder() or steered.state_dir.parent) / "requests"
    done = subprocess.run(
        [sys.executable, "-m", "examples.meaning", str(file), "--requests", str(requests)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def kept(trajectory: Trajectory, folder: Path) -> Path:
    """A file of this trajectory alone; where they are wanted, it is also put to the others."""
    line = codec.dump_json(codec.trajectory_json(trajectory, turns="full")) + b"\n"
    file = folder / "trajectories.jsonl"
    file.write_bytes(line)
    if (wanted_at := meaning_folder()) is not None:
        with (wanted_at / "led.jsonl").open("ab") as others:
            others.write(line)
    return file
