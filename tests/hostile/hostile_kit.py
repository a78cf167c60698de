"""A node under attack, watched from outside: sessions that mean ill, one that does not, and bounds on what
the node may cost.

The rules for whoever edits it. An attack is a Python script run by the `shell` harness in a container of the
node, next to `inside.py`. What must hold is asked three times: of the session (its turns kept, its outcome
honest), of the peaceful sibling (it goes on), of the node and the machine (`check_unharmed`, after every
test). Nothing waits for a time to pass; nothing asserts how long something took.
"""

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field
from live_kit import PROGRAM, ServingNode, containers, serving, until

from polarnode.core.trajectory import Trajectory

INSIDE = Path(__file__).with_name("inside.py")
# Less than a task's defaults: what an attack must exhaust is soon exhausted. No copy is kept of workspaces
# that differ in every test.
SMALL = {"image": "base", "memory_mb": 192, "pids": 64, "disk_mb": 256, "reuse_prepared": False}
BUDGETS = {"init_s": 300, "run_s": 240, "post_s": 240}
REPORTED = {
    "name": "command",
    "config": {"script": "cp /work/report.json /tmp/verdict.json", "reward_file": "/tmp/verdict.json"},
}
# MiB the node's own process may grow to: it is at some 500 with transformers loaded, and a flood it kept
# would be gigabytes
NODE_MB = 1500
# descriptors it may have open between tests, with a session or two alive; a leak is hundreds of a connection
# flood
NODE_FILES = 400

SETTINGS = """
engine = "simulated"
cpu = true
run_limit = 6
ready_limit = 1
init_limit = 2
warm = 0
egress = ["allowed.example", "localhost"]

[simulated]
tokens_per_s = 0
first_token_s = 0
prefill_tokens_per_s = 0
calling_turns = 0
"""

PEACEFUL = """
import time
from inside import turn, tell
while True:
    tell(status=turn())
    time.sleep(0.2)
"""


@define(eq=False)
class Arena:
    """A node that is attacked. `peaceful` is a session that does nothing but make turns."""

    node: ServingNode
    peaceful: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.peaceful = self.start(PEACEFUL, budgets={**BUDGETS, "run_s": 3600})
        until(lambda: self._turns() > 0, "the peaceful session begins")

    def start(self, script: str, **task: Any) -> str:
        """Submit one session of a script; its id. `runtime`, `evaluator` and `budgets` are the task's."""
        assert self.node.process.poll() is None, "an attack before this one ended the node"
        runtime = {**SMALL, **task.pop("runtime", {})}
        files = [
            {"path": "inside.py", "text": INSIDE.read_text()},
            {"path": "attack.py", "text": textwrap.dedent(script)},
        ]
        given = {
            "instruction": "Attack.",
            "harness": {"name": "shell", "command": ["python3", "attack.py"], "env": task.pop("env", {})},
            "runtime": {**runtime, "files": [*files, *runtime.get("files", [])]},
            "budgets": {"retries": 0, **BUDGETS, **task.pop("budgets", {})},
            "evaluator": task.pop("evaluator", REPORTED),
            **task,
        }
        return self.node.submit(**given)[0]

    def attack(self, script: str, *, hangs_up: bool = False, **task: Any) -> Trajectory:
        """A script's session from start to end: its trajectory. Each must have kept the one turn or more it
        made, complete unless the script hangs up on its own calls.
        """
        trajectory = self.node.finished(self.start(script, **task))
        cut = [turn for turn in trajectory.turns if turn.state != "complete"]
        assert all(hangs_up and turn.state == "partial" for turn in cut), [turn.state for turn in cut]
        assert len(trajectory.turns) > len(cut), f"no turn was kept: {trajectory.outcome}"
        trained = {span.turn for trace in trajectory.traces for span in trace.turn_spans}
        lost = {turn.index for turn in trajectory.turns} - trained
        assert lost <= {turn.index for turn in cut if not len(turn.sampled)}, (
            "every captured turn is in a trace"
        )
        return trajectory

    def log(self, trajectory: Trajectory) -> str:
        return self.node.log(trajectory.session_id)

    # ── what must hold after every attack ─────────────────────────────────────

    def check_unharmed(self) -> None:
        """The node answers, costs what it may, and its peaceful session makes turns."""
        assert self.node.process.poll() is None, self.node.said()[-3000:]
        before = self._turns()
        until(
            lambda: self._turns() > before + 1,
            f"the peaceful session goes on after {before} turns; its log:"
            f" {self.node.log(self.peaceful)[-500:]}",
        )
        until(lambda: len(self.node.status()["sessions"]) == 1, "no other session is left")
        until(
            lambda: len(self.node.containers()) == 1,
            f"no other container is left: {[each['Names'] for each in self.node.containers()]}",
        )
        assert self.memory_mb() < NODE_MB
        until(lambda: self.files() < NODE_FILES, f"descriptors are closed: {self.files()}")

    def memory_mb(self) -> int:
        """MiB resident of the node's own process."""
        return self._status_mb("VmRSS")

    @contextmanager
    def growing_at_most(self, mb: int) -> Iterator[None]:
        """The node's memory at its highest within the block, against what it was before."""
        before = self.memory_mb()
        # the kernel's mark of the highest begins anew
        Path(f"/proc/{self.node.process.pid}/clear_refs").write_text("5")
        yield
        grown = self._status_mb("VmHWM") - before
        assert grown < mb, f"the node grew by {grown} MiB"

    def _status_mb(self, name: str) -> int:
        status = Path(f"/proc/{self.node.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name)) // 1024

    def files(self) -> int:
        """Descriptors the node has open."""
        return len(os.listdir(f"/proc/{self.node.process.pid}/fd"))

    def _turns(self) -> int:
        record = self.node.client.session(self.peaceful)["session"]
        assert record["outcome"] is None, f"the peaceful session ended: {record['outcome']}"
        return int(record["turns"])


def reported(trajectory: Trajectory) -> dict[str, Any]:
    """What a script told, handed on by its evaluator."""
    assert trajectory.outcome.status == "completed", trajectory.outcome
    found = trajectory.metrics["evaluation"]
    assert isinstance(found, dict), found
    return found


@contextmanager
def open_arena(folder: Path, temporary: Path) -> Iterator[Arena]:
    settings = folder / "node.toml"
    settings.write_text(SETTINGS)
    with serving(folder / "state", temporary, program=(*PROGRAM, "--config", str(settings))) as node:
        yield Arena(node)
    assert containers(node.node_id) == []
