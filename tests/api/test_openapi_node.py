"""The document against a whole node: what the routes to the engine, to captures and of Polar's face answer is
what it promises.
"""

import sys
from pathlib import Path

import pytest
import trio
from attrs import evolve

from polarnode.core.errors import Refused
from polarnode.core.task import HarnessSpec, TaskSpec
from polarnode.node.config import NodeConfig
from polarnode.node.opening import open_node
from polarnode.node.serving import serve_control_plane

SPEC = TaskSpec(instruction="Do it.", harness=HarnessSpec(name="pi"))
PROGRAM = Path(sys.executable).with_name("schemathesis")
# See tests/api/test_openapi.py. What was deleted here is ended, and still told (`use_after_free`). A stream
# has no end; a group of processes is waited for until it is there.
ASKED = (
    *(
        "--checks",
        "all",
        "--exclude-checks",
        "positive_data_acceptance,allow_header_conformance,use_after_free",
    ),
    *(
        "--exclude-path-regex",
        r"^/(events|v1/trajectories/stream|v1/sessions/live|v1/weights/groups|v1/tasks|rollout/task/submit)$",
    ),
    *("--max-examples", "10", "--seed", "1", "--no-color"),
)


@pytest.mark.podman
async def test_node_keeps_its_document(tmp_path: Path) -> None:
    """But for new tasks, each of which would start containers: those are in tests/api/test_openapi.py."""
    settings = NodeConfig(
        engine="simulated", gpus=(0,), port=0, state_dir=str(tmp_path / "state"), warm=0, token="secret"
    )
    with trio.fail_after(600):
        async with open_node(settings, report=print) as node, serve_control_plane(node) as address:
            # while it is here: its own sockets are no place for its callbacks
            for own in (f"http://127.0.0.1:{address.port}", node.captures.base_url):
                with pytest.raises(Refused, match="a socket of this node itself"):
                    node.callbacks.check(evolve(SPEC, callback_url=f"{own}/v1/tasks"))
            assert any(port in range(22_000, 30_000) for ports in node.callbacks.own_ports for port in ports)
            command = [
                PROGRAM,
                "run",
                f"http://127.0.0.1:{address.port}/v1/openapi.json",
                "-H",
                "Authorization: Bearer secret",
                *ASKED,
            ]
            said = await trio.run_process(command, capture_stdout=True, check=False, cwd=tmp_path)
    print(said.stdout.decode()[-3000:])
    assert said.returncode == 0, said.stdout.decode()[-12_000:]
