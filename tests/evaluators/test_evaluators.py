"""Evaluators: a verdict from what a session left, and a sentence where none can be given."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from session_kit import no_judge

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused
from polarnode.core.ports import Ended, Runtime
from polarnode.core.task import EvaluatorSpec
from polarnode.core.trajectory import Outcome, Turn, Verdict
from polarnode.evaluators import command, registry
from polarnode.evaluators.contract import Evaluator, Finished
from polarnode.rollouts.evaluation import NodeClock


class Shelf:
    """A runtime of files and one scripted program; enough for an evaluator, which only runs, reads and
    writes.
    """

    id = "shelf"
    workdir = "/work"

    def __init__(
        self, program: Callable[["Shelf", Sequence[str]], Ended], files: dict[str, bytes] | None = None
    ) -> None:
        self.program, self.files, self.ran = program, files or {}, list[tuple[str, ...]]()

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
    ) -> Ended:
        self.ran.append(tuple(argv))
        if argv[0] == "rm":
            self.files.pop(argv[-1], None)
            return Ended(exit_code=0, stdout=b"", stderr=b"")
        return self.program(self, argv)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        found = self.files.get(path)
        return found[:limit] if found is not None else None

    async def put(self, files: Mapping[str, bytes], *, user: str | None = None, mode: int = 0o644) -> None:
        self.files.update(files)

    async def end_processes(self) -> None: ...


def ends(exit_code: int, **written: bytes) -> Callable[[Shelf, Sequence[str]], Ended]:
    def program(shelf: Shelf, argv: Sequence[str]) -> Ended:
        shelf.files.update({f"/{name}": text for name, text in written.items()})
        return Ended(exit_code=exit_code, stdout=b"out\n", stderr=b"err\n")

    return program


def finished(runtime: Runtime, config: dict[str, Json], **outcome: Any) -> Finished:
    turn = Turn(
        session_id="s",
        index=0,
        provider="p",
        lineage=0,
        parent=None,
        kind="root",
        reason="first",
        prompt_delta=ids([1]),
        prompt_length=1,
        sampled=ids([2]),
        logprobs=floats([-1]),
    )
    return Finished(
        runtime=runtime,
        left=runtime,
        clock=NodeClock(),
        judge=no_judge,
        outcome=Outcome(**{"status": "completed", **outcome}),
        turns=(turn,),
        instruction="i",
        config=config,
        metadata={},
    )


@pytest.mark.parametrize(("exit_code", "reward"), [(0, 1.0), (1, 0.0), (137, 0.0)])
async def test_command_uses_exit_code(exit_code: int, reward: float) -> None:
    verdict = await command.evaluate(finished(Shelf(ends(exit_code)), {"argv": ["true"]}))
    assert verdict.reward == reward
    assert verdict.metrics["output_tail"] == "out\nerr\n"


@pytest.mark.parametrize(
    ("written", "reward"), [(b"0.25\n", 0.25), (b'{"reward": 2, "passed": 3}', 2.0), (b"-1", -1.0)]
)
async def test_command_uses_reward_file(written: bytes, reward: float) -> None:
    verdict = await command.evaluate(
        finished(Shelf(ends(1, reward=written)), {"script": "x", "reward_file": "/reward"})
    )
    assert verdict.reward == reward
    assert verdict.metrics.get("passed") == (3 if b"passed" in written else None)


@pytest.mark.parametrize(
    "written", [b"", b"yes", b"true", b'"1"', b"NaN", b"1e19", b"[1]", b"{}", b"[" * 5000]
)
async def test_non_numeric_reward_is_an_error(written: bytes) -> None:
    """A reward that is no number is an error, not a zero."""
    with pytest.raises(EvaluatorError):
        await command.evaluate(
            finished(Shelf(ends(0, reward=written)), {"script": "x", "reward_file": "/reward"})
        )


async def test_leftover_reward_removed_before_test() -> None:
    shelf = Shelf(ends(0), {"/reward": b"1"})
    with pytest.raises(EvaluatorError, match="wrote no /reward"):
        await command.evaluate(finished(shelf, {"script": "x", "reward_file": "/reward"}))


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({}, "$.evaluator.config"),
        ({"argv": ["a"], "script": "b"}, "$.evaluator.config"),
        ({"script": "b", "reward_file": "r"}, "$.evaluator.config.reward_file"),
        ({"script": 1}, "$.evaluator.config.script"),
        ({"scrpt": "x"}, "$.evaluator.config.scrpt"),
    ],
)
def test_bad_config_refused_at_submission(config: dict[str, Json], path: str) -> None:
    with pytest.raises(Refused) as refused:
        registry.find(EvaluatorSpec(name="command", config=config))
    assert refused.value.path == path


@pytest.mark.parametrize(("status", "reward"), [("completed", 1.0), ("failed", 0.0), ("timeout", 0.0)])
async def test_session_completed_rewards_the_outcome(status: str, reward: float) -> None:
    assert (await command.evaluate_completed(finished(Shelf(ends(0)), {}, status=status))).reward == reward
    with pytest.raises(Refused, match="no setting x"):
        command.check_completed({"x": 1})


async def half(finished: Finished) -> Verdict:
    return Verdict(reward=0.5)


OWN = Evaluator(name="half", evaluate=half, check=lambda config: None)


async def test_imported_evaluator_is_used() -> None:
    found = registry.find(EvaluatorSpec(import_path=f"{__name__}:OWN"), allowed_imports=("*",))
    assert (await found.evaluate(finished(Shelf(ends(0)), {}))).reward == 0.5
    with pytest.raises(Refused, match=r"there are: command, harbor, .*session_completed"):
        registry.find(EvaluatorSpec(name="judge"))
