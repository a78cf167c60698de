"""The requests of a test apart: what `as-agent` writes, and what is answered."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from evaluators_kit import finished

from polarnode.core.errors import EvaluatorError, Refused
from polarnode.core.ports import LOST, Ended, Runtime, TimedProgram, TimedResult
from polarnode.core.task import EvaluatorPart, EvaluatorSpec
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import agent_programs, registry
from polarnode.evaluators.agent_programs import (
    MAX_DATA_BYTES,
    SPOOL_DIR,
    AgentRequests,
    Request,
    SeparateConfig,
    parse_request,
)
from polarnode.evaluators.contract import TestNotRun


@pytest.mark.parametrize(
    ("content", "request_"),
    [
        (b"1\0true\0", Request(argv=("true",), stdin=b"")),
        (b"2\0a b\0\0in\0put", Request(argv=("a b", ""), stdin=b"in\0put")),
        (b"", None),
        (b"0\0", None),
        (b"2\0one\0", None),
        (b"-1\0a\0", None),
        (b"x\0a\0", None),
        ("²\0a\0".encode(), None),
        (b"9" * 5000 + b"\0a\0", None),
        (b"99999999\0a\0", None),
        (b"1\0\xff\0", None),
    ],
)
def test_request_has_arguments_and_input(content: bytes, request_: Request | None) -> None:
    assert parse_request(content) == request_


@define(eq=False)
class Clean:
    """The files of a clean runtime."""

    files: dict[str, bytes] = field(factory=dict)
    order: list[str] = field(factory=list)

    async def read(self, path: str, *, limit: int) -> bytes | None:
        await trio.lowlevel.checkpoint()
        return self.files[path][:limit] if path in self.files else None

    async def put(self, files: dict[str, bytes], **more: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.files.update(files)
        self.order += files

    async def run(self, argv: Any, **more: Any) -> Ended:
        await trio.lowlevel.checkpoint()
        return Ended(exit_code=0, stdout=b"", stderr=b"")


@define(eq=False)
class Left:
    """The agent's container, of which a clock says how programs end."""

    workdir: str = "/work"


@define(eq=False)
class SaidClock:
    """A clock under which every program ends as said."""

    ended: Ended | None
    ran: list[TimedProgram] = field(factory=list)

    async def run(self, runtime: Runtime, program: TimedProgram) -> TimedResult:
        await trio.lowlevel.checkpoint()
        self.ran.append(program)
        return TimedResult(ended=self.ended, seconds=1.0)

    async def beside(self, work: Any, attend: Any) -> Any:
        raise NotImplementedError


def requests(clean: Clean, ended: Ended | None) -> AgentRequests:
    session = evolve(finished(clean, {}), clock=SaidClock(ended))  # type: ignore[arg-type]
    return AgentRequests(finished=session, separate=SeparateConfig(program_timeout=7.0), user=None)


async def reply(content: bytes, ended: Ended | None) -> tuple[bytes, bytes, bytes]:
    clean = Clean({f"{SPOOL_DIR}/1": content})
    assert await requests(clean, ended).attend()
    assert clean.order[-1] == f"{SPOOL_DIR}/1.exit", "what as-agent waits for comes last"
    return tuple(clean.files[f"{SPOOL_DIR}/1.{name}"] for name in ("exit", "out", "err"))  # type: ignore[return-value]


async def test_reply_is_the_programs_own() -> None:
    ended = Ended(exit_code=3, stdout=b"o", stderr=b"e")
    assert await reply(b"1\0x\0", ended) == (b"3\n", b"o", b"e")


@pytest.mark.parametrize(
    ("content", "ended", "code", "why"),
    [
        (b"1\0x\0", None, b"124\n", "ended after 7 seconds"),
        (b"junk", None, b"125\n", "a request is a program"),
        (b"1\0x\0" + bytes(MAX_DATA_BYTES), None, b"125\n", "arguments and input are longer than 8 MiB"),
        (
            b"1\0x\0",
            Ended(exit_code=0, stdout=bytes(MAX_DATA_BYTES + 1), stderr=b""),
            b"125\n",
            "longer than 8 MiB",
        ),
        (b"1\0x\0", Ended(exit_code=LOST, stdout=b"49", stderr=b""), b"125\n", "let itself be traced"),
    ],
)
async def test_unanswerable_request_is_explained(
    content: bytes, ended: Ended | None, code: bytes, why: str
) -> None:
    exit_code, stdout, stderr = await reply(content, ended)
    assert (exit_code, stdout) == (code, b"")
    assert why in stderr.decode()


async def test_requests_are_ordered_and_bounded() -> None:
    ended = Ended(exit_code=0, stdout=b"", stderr=b"")
    clean = Clean({f"{SPOOL_DIR}/{number}": f"1\0{number}\0".encode() for number in (1, 2, 4)})
    asked = requests(clean, ended)
    assert [await asked.attend() for _ in range(3)] == [True, True, False]
    assert [program.argv for program in asked.finished.clock.ran] == [("1",), ("2",)]  # type: ignore[attr-defined]
    asked.count = agent_programs.MOST_REQUESTS
    clean.files[f"{SPOOL_DIR}/{asked.count + 1}"] = b"1\0x\0"
    assert await asked.attend()
    assert b"may run 10000 programs" in clean.files[f"{SPOOL_DIR}/10001.err"]


@define(eq=False)
class ListedClock(SaidClock):
    """Each program ends as the next of a list says, and a test as one whose program is missing."""

    ends: list[Ended] = field(factory=list)

    async def run(self, runtime: Runtime, program: TimedProgram) -> TimedResult:
        self.ended = self.ends.pop(0)
        return await super().run(runtime, program)

    async def beside(self, work: Any, attend: Any) -> Any:
        assert await attend()
        return await work()


@pytest.mark.parametrize(("there", "reward"), [(0, 0.0), (127, None)])
async def test_agent_program_cannot_fake_missing_test(there: int, reward: float | None) -> None:
    """A program of the agent's cannot make a test look missing."""
    ends = [Ended(exit_code=code, stdout=b"", stderr=b"") for code in (127, there)]
    clean = Clean({f"{SPOOL_DIR}/1": b"1\0./prog\0"})
    session = evolve(finished(clean, {}), clock=ListedClock(None, ends=ends), left=Left())  # type: ignore[arg-type]

    async def test() -> Verdict:
        await trio.lowlevel.checkpoint()
        raise TestNotRun("the test ended with exit code 127")

    async def judged() -> Verdict:
        return await agent_programs.judged(session, SeparateConfig(), None, test)

    if reward is None:
        with pytest.raises(EvaluatorError, match="exit code 127"):
            await judged()
    else:
        found = await judged()
        assert (found.reward, found.metrics["reason"]) == (
            reward,
            "a program of the agent's ended with exit code 127, and the test with it",
        )


def test_script_writes_readable_requests(tmp_path: Path) -> None:
    script = agent_programs.SCRIPT.replace(SPOOL_DIR, str(tmp_path))
    (tmp_path / "1").write_bytes(b"taken")
    (tmp_path / "2.out").write_bytes(b"o\0")
    (tmp_path / "2.err").write_bytes(b"e")
    (tmp_path / "2.exit").write_bytes(b"9\n")
    kept = script.replace(': > "$mine"', f'cp "$mine" {tmp_path}/kept')
    done = subprocess.run(
        ["sh", "-c", kept, "as-agent", "a b", "", "*\n"], input=b"in\0", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (9, b"o\0", b"e")
    assert parse_request((tmp_path / "kept").read_bytes()) == Request(argv=("a b", "", "*\n"), stdin=b"in\0")
    assert (tmp_path / "next").read_text() == "3\n"


# ── config ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["command", "harbor"])
def test_separate_test_gets_clean_container(name: str) -> None:
    config: dict[str, Any] = {"script": "x"} if name == "command" else {"tests": {"test.sh": "x"}}
    shared = registry.find(EvaluatorSpec(name=name, config=config))
    apart = registry.find(EvaluatorSpec(name=name, config={**config, "separate": {}}))
    assert (shared.fresh, shared.copies) == (False, True)
    assert (apart.fresh, apart.copies) == (True, False)


def test_separate_part_shares_no_workdir() -> None:
    """A separate part shares no container with one that needs the workdir."""
    apart = EvaluatorPart(name="command", config={"script": "x", "separate": {}})
    beside = EvaluatorPart(name="command", config={"script": "x"})
    with pytest.raises(Refused, match="cannot share a runtime"):
        registry.find(EvaluatorSpec(parts=(apart, beside)))
    found = registry.find(EvaluatorSpec(parts=(apart, EvaluatorPart(name="session_completed"))))
    assert (found.fresh, found.copies) == (True, False)


@pytest.mark.parametrize("path", ["", "/", "a/", "../a", "a/../../b", "a\0"])
def test_plain_file_is_named_by_path(path: str) -> None:
    with pytest.raises(Refused, match="name a file"):
        registry.find(
            EvaluatorSpec(name="command", config={"script": "x", "separate": {"plain_files": [path]}})
        )


async def test_separate_test_avoids_agent_container() -> None:
    async def test() -> Any:
        raise AssertionError("it ran")

    with pytest.raises(EvaluatorError, match="clean container"):
        await agent_programs.judged(finished(Clean(), {}), SeparateConfig(), None, test)  # type: ignore[arg-type]
