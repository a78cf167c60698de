"""Sessions whose calls are held for their place in the engine's cache, and which are frozen meanwhile: they
lose nothing, and a node that is killed with them recovers them as any others.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from podman_parts import kept_limits
from recovery_kit import ServingNode, account, ledgers_in_logs, place_at, short_temporary, texts_of, until

pytestmark = pytest.mark.podman

SESSIONS = 5
TURNS = 20
# A cache that two of these sessions fill before their end. A session takes 20 turns of 0.33 s: longer than a
# busy machine starts its container, so that sessions overlap and calls are held in both lives.
SETTINGS = """
engine = "simulated"
warm = 0
init_limit = 2
[simulated]
tokens_per_s = 100.0
first_token_s = 0.01
answer_tokens = 32
kv_tokens = 2400
"""
# a node whose machine is short of memory while a file exists: its reading alone is made up
NODE = """
import sys
from pathlib import Path
from attrs import evolve
from polarnode.node import opening

short, real = Path(sys.argv.pop(1)), opening.read_machine

def read_machine(*arguments):
    machine = real(*arguments)
    return evolve(machine, memory_mb=1.0) if short.exists() else machine

opening.read_machine = read_machine
from polarnode.cli import main
main()
"""


def residency(node: ServingNode) -> dict[str, Any]:
    return dict(node.host()["residency"])


def frozen(node: ServingNode) -> int:
    return int(node.status()["runtimes"]["frozen"])


@kept_limits  # who is frozen is in a control group of their own
def test_held_and_frozen_sessions_survive_kill(podman_works: None, tmp_path: Path) -> None:
    """Held and frozen sessions lose nothing, and survive a kill."""
    short = tmp_path / "short"
    with short_temporary() as temporary:
        place = place_at(tmp_path, temporary, settings=SETTINGS)
        place = evolve(
            place,
            program=(
                sys.executable,
                "-c",
                NODE,
                str(short),
                *place.program[place.program.index("--config") :],
            ),
        )
        task = place.task(num_samples=SESSIONS, retries=1, turns=TURNS, budgets={"run_s": 600.0})
        with place.serving() as node:
            task_id = node.client.submit(task).task_id
            until(lambda: residency(node)["held"], "a call is held")
            assert frozen(node) == 0, "memory suffices"
            short.touch()
            until(lambda: frozen(node), "a held session is frozen")
            node.process.kill()
            node.process.wait()
        with place.serving() as node:
            until(lambda: frozen(node), "a held session of the next life is frozen")
            short.unlink()
            until(lambda: not frozen(node), "it is thawed")
            until(lambda: node.client.task(task_id)["finished"], "all sessions end")
    found = account(place.state_dir)
    assert [each.outcome.status for each in found.tasks[task_id]] == ["completed"] * SESSIONS
    assert {each.attempt for each in found.tasks[task_id]} <= {0, 1}
    assert sum(each.attempt for each in found.tasks[task_id]) > 0, "the kill met some"
    assert max(each.timing.held_s for each in found.tasks[task_id]) > 0
    answered = sorted(
        ledger.texts for ledger in ledgers_in_logs(place.state_dir) if len(ledger.texts) == TURNS
    )
    assert sorted(texts_of(each) for each in found.tasks[task_id]) == answered
