"""Real harnesses, resumed: the files of a session before turn 3 in a fresh container, the harness's own verb,
and its first request is the recorded one, token for token.

Without POLARNODE_FORKS the lightest harness runs; `all` runs every one that resumes, in each of its APIs, and
names separated by commas those. POLARNODE_MATRIX_OUT names a file that takes a line of JSON for each:
`tools/fork_matrix.py` makes the table of docs/forks.md of it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import frozen
from fork_bench import SECRET, ForkBench, copied, digest, restored, shell
from live_kit import keep_row
from matrix_cases import Step
from podman_parts import settings

from polarnode.containers.images import ensure_images
from polarnode.containers.runtimes import open_runtimes
from polarnode.core.conversation import Conversation, ModelRequest
from polarnode.core.trajectory import Turn
from polarnode.gateway.fork_inheritance import ResumedSession
from polarnode.gateway.live_sessions import LiveSession
from polarnode.harnesses import HARNESSES
from polarnode.merge.attach import Plan
from polarnode.merge.lineage import Lineages
from polarnode.providers.volatile import RESUME_MARKER

pytestmark = [pytest.mark.podman, pytest.mark.harness]

WANTED = os.environ.get("POLARNODE_FORKS", "pi")
TURN = 3
INSTRUCTION = "Look around, write what you find to notes.txt, then say that you are done."
LINES = (
    "ls -la / > notes.txt; head -3 notes.txt",
    "date +%s%N >> notes.txt; mktemp; cat notes.txt | tail -2",  # no second run says the same
    "python3 -c 'import uuid; print(uuid.uuid4())' | tee -a notes.txt || od -An -N8 -tx8 /dev/urandom",
    "md5sum notes.txt | tee sum.txt",
    "wc -l *.txt",
)


def cases() -> Iterator[Any]:
    for harness in HARNESSES.values():
        for place, api in enumerate(harness.apis if harness.resume is not None else ()):
            yield parameter(harness.name, f"{harness.name}.{api}", {"api": api} if place else {})
    yield parameter("claude_code", "claude_code.bare", {"bare": True})


def parameter(harness: str, name: str, settings: dict[str, Any]) -> Any:
    wanted = WANTED == "all" or name in WANTED.split(",") or (harness == WANTED and not settings)
    skip = pytest.mark.skip(reason="not of CI's part: make fork-matrix runs it")
    return pytest.param(harness, settings, id=name, marks=() if wanted else skip)


@frozen(kw_only=True)
class Parent:
    """A session that ran to its end: its turns, the prompts asked of the engine, and what its containers held
    before turn TURN and at its end.
    """

    turns: tuple[Turn, ...]
    prompts: list[list[int]]
    files: bytes
    workdir: bytes
    conversation: Conversation


@pytest.mark.parametrize(("harness", "settings_"), list(cases()))
def test_resumed_harness_repeats_recorded_request(
    podman_works: None,
    tmp_path: Path,
    harness: str,
    settings_: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    async def main() -> dict[str, Any]:
        await ensure_images(settings(), [HARNESSES[harness].image], log=tmp_path / "build.log", report=print)
        async with open_runtimes(settings("forks", warm=0)) as runtimes:
            bench = ForkBench(runtimes=runtimes, folder=tmp_path, harness=harness, settings=settings_)
            bench.engine.script = [
                *(Step(f"Step {number}.", (shell(harness, line),)) for number, line in enumerate(LINES)),
                Step("It is written."),
            ]
            return await resumed(bench, await parent(bench))

    found = trio.run(main)
    keep_row({"case": request.node.callspec.id, "version": HARNESSES[harness].version, **found})
    print(found)
    assert [found[name] for name in ("key", "prompt", "workspace", "exit_code")] == [True, True, True, 0]


async def parent(bench: ForkBench) -> Parent:
    live = bench.session("parent", Lineages(session_id="forked", secret=SECRET))
    kept: dict[str, Any] = {}
    async with bench.opened(live) as runtime:

        async def held(plan: Plan, request: ModelRequest) -> None:
            if plan.index == TURN:
                kept["conversation"] = request.conversation
                kept["files"], kept["workdir"] = await copied(runtime), await digest(runtime)

        live.before_generation = held
        code = await bench.run(runtime, live, HARNESSES[bench.harness].launch, INSTRUCTION)
    turns = live.lineages.turns
    assert code == 0, bench.log(live).read_text()[-2000:]
    assert [turn.role for turn in turns] == ["main"] * (len(LINES) + 1)
    prompts = [list(order.prompt) for order in bench.engine.orders]
    return Parent(turns=turns, prompts=prompts, **kept)


async def resumed(bench: ForkBench, parent: Parent) -> dict[str, Any]:
    """What a fork before turn TURN did, as a row of the table."""
    lineages = Lineages.restore(session_id="forked", secret=SECRET, turns=parent.turns[:TURN])
    state = ResumedSession(
        parent="forked",
        turn=TURN,
        before_key=parent.turns[TURN].before_key,
        conversation=parent.conversation,
    )
    live: LiveSession = bench.session("fork", lineages)
    live.inherited.resumed = state
    before, began, first = len(bench.engine.orders), trio.current_time(), list[float]()

    async def asked(plan: Plan, request: ModelRequest) -> None:
        first.append(trio.current_time() - began)

    live.before_generation = asked
    resume = HARNESSES[bench.harness].resume
    assert resume is not None
    async with bench.opened(live) as runtime:
        await restored(runtime, parent.files)
        same = await digest(runtime) == parent.workdir
        code = await bench.run(runtime, live, resume, RESUME_MARKER)
    orders = bench.engine.orders[before:]
    if code or not orders:
        print(bench.log(live).read_text()[-2000:])
    return {
        "turn": TURN,
        "key": state.fault() is None,
        "prompt": bool(orders) and list(orders[0].prompt) == parent.prompts[TURN],
        "workspace": same,
        "requests": len(orders),
        "exit_code": code,
        "seconds": round(first[0], 1) if first else None,
        "kilobytes": len(parent.files) >> 10,
    }
