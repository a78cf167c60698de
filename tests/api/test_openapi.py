"""The document of the control plane is true: schemathesis asks what it says may be asked, and what it says
may not, and compares the answers.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import trio
from control_plane_parts import Caller, TaskTaker, open_plane, other_room_extensions
from journal_samples import make_trajectory
from journal_writes import publish_end

from polarnode.api.app import EVERY, PARAMETERS, control_plane, document
from polarnode.api.query import READERS
from polarnode.api.routes import ControlRoutes
from polarnode.integrations.polar.extension import OPERATIONS
from polarnode.integrations.sglang_operations import OPERATIONS as SGLANG
from polarnode.journal.journal import open_journal

ALL = {**EVERY, **OPERATIONS, **SGLANG}  # with Polar's and SGLang's
PROGRAM = Path(sys.executable).with_name("schemathesis")
# Its own word for what a schema allows and a law refuses (a group's numbers against each other, a name's
# letters) would be a failure: 400 is right. `Allow` names GET at /v1/trajectories/ack, and rightly: a session
# of that name would be there. `use_after_free`: DELETE of a task ends its sessions, and keeps it.
UNFIT = "positive_data_acceptance,allow_header_conformance,use_after_free"
CHECKS = ("--checks", "all", "--exclude-checks", UNFIT)
# Streams do not end; their answers are read in tests/api/test_control_plane.py, test_live_changes.py.
STREAMS = "^/v1/(trajectories/stream|sessions/live)$"
ASKED = ("--exclude-path-regex", STREAMS, "--max-examples", "25", "--seed", "1", "--no-color")


async def test_routes_keep_the_document(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        for name in ("a", "b"):
            trajectory = make_trajectory(name, turns=2)
            for turn in trajectory.turns:
                plane.journal.writer.record_turn(turn)
            publish_end(plane.journal, trajectory)
        await plane.journal.writer.flush()
        command = [
            PROGRAM,
            "run",
            f"{plane.url}/v1/openapi.json",
            "-H",
            "Authorization: Bearer secret",
            *CHECKS,
            *ASKED,
        ]
        said = await trio.run_process(command, capture_stdout=True, check=False, cwd=tmp_path)
    assert said.returncode == 0, said.stdout.decode()[-6000:]


async def served(path: Path) -> tuple[set[tuple[str, str]], dict[str, Any]]:
    """The routes of a control plane, and its document."""
    async with open_plane(path / "journal.sqlite") as plane:
        said = (await Caller(url=plane.url).get("/v1/openapi.json")).json()
    return {(method.upper(), where) for where, methods in said["paths"].items() for method in methods}, said


async def test_every_route_is_documented(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1.0) as journal:
        app = control_plane(
            ControlRoutes(service=TaskTaker(journal=journal)).rows(),
            token=None,
            extensions=other_room_extensions(journal),
        )
    rules = {
        (method, rule.rule)
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert rules == set(ALL)


async def test_control_plane_documents_served_routes(tmp_path: Path) -> None:
    told, _ = await served(tmp_path)
    assert told <= {(method, re.sub(r"<(?:path:)?(\w+)>", r"{\1}", path)) for method, path in ALL}
    assert ("POST", "/v1/tasks") in told


async def test_answers_match_their_schemas(tmp_path: Path) -> None:
    """Whole answers, with something in them: schemathesis mostly asks for what is not there."""
    _, said = await served(tmp_path)
    async with open_plane(tmp_path / "full.sqlite") as plane:
        caller = Caller(url=plane.url)
        task = (await caller.post("/v1/tasks", {"instruction": "x", "harness": {"command": ["true"]}})).json()
        trajectory = make_trajectory("s", turns=2)
        for turn in trajectory.turns:
            plane.journal.writer.record_turn(turn)
        publish_end(plane.journal, trajectory)
        await plane.journal.writer.flush()
        for path, at in (
            ("/v1/tasks", "/v1/tasks"),
            ("/v1/tasks/{task_id}", f"/v1/tasks/{task['task_id']}"),
            ("/v1/trajectories/{session_id}", "/v1/trajectories/s"),
            ("/v1/sessions/{session_id}", "/v1/sessions/s"),
        ):
            shape = said["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            found = (await caller.get(at)).json()
            jsonschema_rs.validator_for({**shape, "components": said["components"]}).validate(found)


def test_every_parameter_is_documented() -> None:
    assert PARAMETERS.keys() == READERS.keys()


@pytest.mark.parametrize("token", [True, False])
def test_document_is_valid_openapi(token: bool) -> None:
    said: Any = document(ALL, ALL, token=token)
    assert said["openapi"] == "3.1.0"
    names = [each["operationId"] for item in said["paths"].values() for each in item.values()]
    assert len(names) == len(set(names))
    locked = [each for item in said["paths"].values() for each in item.values() if "security" in each]
    assert bool(locked) == token
    json.dumps(said)
