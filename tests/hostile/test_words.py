"""What a harness says is shown to people: in their terminal nothing of it is obeyed."""

import os
import re
import subprocess
import sys

import pytest
from hostile_kit import Arena
from live_kit import TOKEN

pytestmark = pytest.mark.podman

SAY = """
    import sys
    from inside import ask, call, tell, turn
    turn("\\x1b]0;owned\\x07 \\x1b[2J\\x9b31m [red]markup[/red] \\u202e backwards")
    sys.stdout.write("\\x1b]52;c;b3duZWQ=\\x07\\x1b[2J\\x1b[1;1H\\x1bP+q\\x1b\\\\[bold]last words[/bold]\\x9b2J \\r\\b\\b\\n")
    sys.stdout.flush()
    sys.exit("\\x1b[31mfailed\\x1b]8;;http://evil.example\\x07here\\x1b]8;;\\x07")
"""


def polarnode(arena: Arena, *arguments: str) -> str:
    """What a verb prints, as a terminal gets it."""
    url = f"http://127.0.0.1:{arena.node.port}"
    argv = [sys.executable, "-c", "from polarnode.cli import main; main()", *arguments, "--url", url]
    environment = {**os.environ, "POLARNODE_TOKEN": TOKEN, "FORCE_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(argv, env=environment, capture_output=True, check=True)
    # a live table goes back to its first line, which it clears
    return re.sub(r"\r(\x1b\[1A)*\x1b\[2K", "", (done.stdout + done.stderr).decode())


def test_no_escape_sequence_reaches_terminal(arena: Arena) -> None:
    trajectory = arena.attack(SAY, evaluator={"name": "session_completed"})
    assert (trajectory.outcome.status, trajectory.outcome.exit_code) == ("failed", 1)
    assert "last words" in str(trajectory.outcome.log_tail)
    shown = polarnode(arena, "watch", "--task", trajectory.task_id) + polarnode(
        arena, "inspect", trajectory.session_id
    )
    assert trajectory.session_id[:8] in shown
    harmful = ("\x1b]", "\x1b[2J", "\x1bP", "\x9b", "\x07", "\r", "\b", "\x1b[1;1H")
    assert [each for each in harmful if each in shown] == []
    assert "[bold]" not in shown or "last words" in shown
