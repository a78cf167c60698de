"""Evaluators in a session: where the task's eval_prepare stands between the agent's work and its tests, and
which can not be told together.
"""

from pathlib import Path
from typing import Any

import pytest
import session_kit
from fakes_runtime import at_once
from session_kit import agent, town
from trio.abc import Clock

from polarnode.core.errors import Refused
from polarnode.core.task import EvaluatorPart, EvaluatorSpec, PrepareStep, RuntimeSpec
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import registry
from polarnode.evaluators.contract import Evaluator, Finished


async def _sees(finished: Finished) -> Verdict:
    """Whether the hidden tests were there when it began, and whether they are once it has asked for them."""
    before = await finished.runtime.read("/work/hidden")
    await finished.prepare()
    after = await finished.runtime.read("/work/hidden")
    return Verdict(reward=1.0, metrics={"before": before is not None, "after": after is not None})


SEES = Evaluator(name="sees", evaluate=_sees, check=lambda config: None)
TAKES_ITSELF = Evaluator(name="takes", evaluate=_sees, check=lambda config: None, fresh=True, copies=False)


def hide(call: Any) -> int:
    call.runtime.files["/work/hidden"] = call.runtime.files.get("/work/hidden", b"") + b"x"
    return 0


@pytest.mark.parametrize(("evaluator", "before"), [(SEES, True), (TAKES_ITSELF, False)])
async def test_hidden_tests_come_after_work(
    autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluator: Evaluator, before: bool
) -> None:
    """Hidden tests come once, and after the work."""
    # whose evaluators a town's tasks may name
    monkeypatch.setattr(session_kit, "OURS", evaluator, raising=False)
    runtime = RuntimeSpec(eval_prepare=(PrepareStep(argv=("hide",)),))
    async with town(tmp_path, {"agent": agent(), "hide": at_once(hide)}) as place:
        found = await place.one(runtime=runtime, evaluator=EvaluatorSpec(import_path="session_kit:OURS"))
        assert (found.reward, found.metrics["evaluation"]) == (1.0, {"before": before, "after": True})
        assert place.runtimes.opened[-1].files["/work/hidden"] == b"x"


def test_two_clean_workdir_parts_are_refused() -> None:
    """Two parts that put the work onto a clean workdir are refused."""
    config = {"test_command": "x", "expected_output_json": {"a": "PASSED"}}
    part = EvaluatorPart(name="test_on_output", config=config)
    with pytest.raises(
        Refused,
        match=r"test_on_output\[1\] and test_on_output\[2\] both put the agent's work onto a clean workdir",
    ) as refused:
        registry.find(EvaluatorSpec(parts=(EvaluatorPart(), part, part)))
    assert refused.value.path == "$.evaluator.parts[2]"
