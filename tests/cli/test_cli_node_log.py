"""node.log tells what a node did: its start, tasks, ends of sessions, consumers and its stop, a line each."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from fleet_kit import KIT, hollow_task

from polarnode.client import PolarnodeClient

SERVE = [sys.executable, str(KIT / "hollow_cli.py"), "serve", "--engine", "simulated", "--gpus", "0"]
STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO polarnode\.[\w.]+ ")


def test_node_log_tells_its_week(tmp_path: Path) -> None:
    state = tmp_path / "state"
    argv = [*SERVE, "--port", "0", "--state-dir", str(state), "--allow-import", "session_kit"]
    environment = os.environ | {"POLARNODE_NODE_ID": "n0", "POLARNODE_MEMORY_RESERVE_MB": "1"}
    environment |= {"POLARNODE_DISK_RESERVE_MB": "1", "POLARNODE_PODMAN_DIR": str(tmp_path / "podman")}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=KIT, env=environment) as child:
        try:
            assert child.stdout is not None
            found = next(match for line in child.stdout if (match := re.search(r"serving on (\S+)", line)))
            client = PolarnodeClient(found[1], patience_s=30.0)
            client.submit(hollow_task(task_id="t", samples=1, seconds=0.1))
            assert list(client.trajectories(task_id="t", consumer="trainer", ack=True))
            client.forget_consumer("trainer")
            client.submit(hollow_task(task_id="slow", samples=2, seconds=600))
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 0
        finally:
            child.kill()
    lines = (state / "node.log").read_text().splitlines()
    own = [STAMP.sub("", line) for line in lines if STAMP.match(line)]
    text = "\n".join(own)
    for pattern in (
        r"^node n0 starts: polarnode \S+, process \d+$",
        r"^node n0 serves model simulated:tiny: it takes tasks$",
        r"^task t is taken: 1 sessions of shell$",
        r"^session \w+ of task t is over: completed, reward \S+, 1 turns, \d+ tokens, 0\.\d s$",
        r"^consumer trainer is new, after event 0$",
        r"^consumer trainer reads after event 0$",
        r"^consumer trainer left after event \d$",
        r"^consumer trainer was forgotten$",
        r"^node n0 stops: \d sessions are ended and saved$",
        r"^session \w+ of task slow is over: cancelled, .*: .+$",
        r"^node n0 has stopped$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{json.dumps(lines, indent=1)}"
    assert own[0].startswith("node n0 starts")
    assert own[-1] == "node n0 has stopped"
