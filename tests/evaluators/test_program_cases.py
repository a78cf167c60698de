"""Cases of the agent's programs: how outputs are compared, what a config may ask, what a verdict says."""

from collections.abc import Mapping
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from evaluators_kit import finished

from polarnode.core.conversation import Json
from polarnode.core.errors import ContentFault, EvaluatorError, Refused, SpoiltRuntime
from polarnode.core.ports import LOST, Clock, Ended, Runtime, TimedProgram, TimedResult
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import program_cases
from polarnode.evaluators.program_cases import ExpectedOutput, difference

# ── comparison ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("a\nb\n", "a\nb"),
        ("a  \r\nb\t\n\n", "a\nb"),
        ("", ""),
        ("\n", ""),
        ("é\n", "é"),
        ("x", ExpectedOutput(text="x\n")),
        ("x", ExpectedOutput(exact="x")),
        ("1 2.5\n-3e2", ExpectedOutput(numbers=(1, 2.5, -300))),
        ("0.30000000000000004", ExpectedOutput(numbers=(0.3,))),
        ("1000001", ExpectedOutput(numbers=(1e6,), tolerance=1e-5)),
        ("", ExpectedOutput(numbers=())),
        ('{"b": [1, true, null], "a": 0.1}', ExpectedOutput(json={"a": 0.1, "b": [1.0, True, None]})),
        ("1e30", ExpectedOutput(json=1e30)),
        ("ab12\n", ExpectedOutput(pattern=r"ab\d+\s")),
    ],
)
def test_expected_output_passes(output: str, expected: str | ExpectedOutput) -> None:
    assert difference(output.encode(), expected) is None


@pytest.mark.parametrize(
    ("output", "expected", "why"),
    [
        (b"a\nc\n", "a\nb", "it differs in line 2"),
        (b"a\nb\nc", "a\nb", "it differs in line 3"),
        (b" a", "a", "it differs in line 1"),
        (b"\xff", "a", "it is not UTF-8"),
        # letters that look alike, blanks and line ends that only Unicode has, invisible letters, escapes
        ("\u0430".encode(), "a", "it differs in line 1"),
        ("a\u00a0".encode(), "a", "it differs in line 1"),
        ("a\u2028b".encode(), "a\nb", "it differs in line 1"),
        ("a\u200b".encode(), "a", "it differs in line 1"),
        (b"b\x1b[2Ka", "a", "it differs in line 1"),
        ("e\u0301".encode(), "\u00e9", "it differs in line 1"),
        (b"x\n", ExpectedOutput(exact="x"), "it differs"),
        (b"1 2", ExpectedOutput(numbers=(1.0,)), "it does not have fewer numbers"),
        (b"1", ExpectedOutput(numbers=(1.0, 2.0)), "it does not have more numbers"),
        (b"1e999", ExpectedOutput(numbers=(1.0,)), "number 1 differs"),
        (b"1 nan", ExpectedOutput(numbers=(1.0, 2.0)), "number 2 differs"),
        (b"inf", ExpectedOutput(numbers=(1.0,)), "number 1 differs"),
        (b"1_0", ExpectedOutput(numbers=(10.0,)), "number 1 differs"),
        ("\u0661".encode(), ExpectedOutput(numbers=(1.0,)), "number 1 differs"),
        (b"1" + b"0" * 5000, ExpectedOutput(numbers=(1.0,)), "number 1 differs"),
        (b"1", ExpectedOutput(json=True), "it differs"),
        (b"[1, 2]", ExpectedOutput(json=[1]), "it differs"),
        (b'{"a": 1, "b": 2}', ExpectedOutput(json={"a": 1}), "it differs"),
        (b"NaN", ExpectedOutput(json=1), "it is no JSON"),
        (b"[" * 100_000, ExpectedOutput(json=[1]), "it is no JSON"),
        (b"xab", ExpectedOutput(pattern="ab"), "the pattern does not match it"),
        (
            b"a" * 70_000,
            ExpectedOutput(pattern="a*"),
            "it is longer than the 64 KiB that a pattern is compared with",
        ),
    ],
)
def test_unexpected_output_fails(output: bytes, expected: str | ExpectedOutput, why: str) -> None:
    assert difference(output, expected) == why


def test_backtracking_pattern_is_ended() -> None:
    found = difference(b"a" * 5000 + b"!", ExpectedOutput(pattern="(a|a|b?a)+$"))
    assert found == "the pattern did not match it within 0.1 s"


# ── config ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"cases": []}, "cases"),
        ({"cases": [{}] * 1001, "argv": ["x"]}, "cases"),
        ({"cases": [{"stdout": "x"}]}, "cases[0].argv"),
        ({"cases": [{"outputs": {"a": "x"}, "stdin": "x"}]}, "cases[0].argv"),
        ({"cases": [{"argv": ["x"], "outputs": {"../a": "x"}}]}, "cases[0]"),
        ({"cases": [{"argv": ["x"], "files": {"a/": "x"}}]}, "cases[0]"),
        ({"cases": [{"argv": ["x"], "stdout": {}}]}, "cases[0]"),
        ({"cases": [{"argv": ["x"], "stdout": {"text": "a", "exact": "a"}}]}, "cases[0]"),
        ({"cases": [{"argv": ["x"], "stdout": {"pattern": "("}}]}, "cases[0]"),
        ({"cases": [{"argv": ["x"], "stdout": {"numbers": [1], "tolerance": -1}}]}, "cases[0]"),
        ({"cases": [{"argv": ["x"], "weight": 0}]}, "cases[0].weight"),
        ({"cases": [{"argv": ["x"], "timeout": -1}]}, "cases[0].timeout"),
        ({"cases": [{"argv": ["x"]}], "score": "most"}, "score"),
        ({"cases": [{"argv": ["x"]}], "total_timeout": 0}, "total_timeout"),
        ({"cases": [{"argv": ["x"], "expects": "x"}]}, "cases[0]"),
    ],
)
def test_bad_config_refused_with_field(config: dict[str, Json], path: str) -> None:
    with pytest.raises(Refused) as caught:
        program_cases.check(config)
    assert (caught.value.path or "").startswith(f"$.evaluator.config.{path}")


# ── verdict ───────────────────────────────────────────────────────────────────


@define(eq=False)
class SaidClock:
    """A clock under which each program takes a second and ends as its arguments say: `[exit code, stdout]`."""

    ran: list[TimedProgram] = field(factory=list)

    async def run(self, runtime: Runtime, program: TimedProgram) -> TimedResult:
        await trio.lowlevel.checkpoint()
        self.ran.append(program)
        if program.argv[0] == "raises":
            raise {"fault": ContentFault, "spoilt": SpoiltRuntime, "gone": EvaluatorError}[program.argv[1]](
                "so"
            )
        if program.argv == ("late",):
            return TimedResult(ended=None, seconds=program.within_s)
        if program.argv[0] == "sh":
            return TimedResult(ended=Ended(exit_code=0, stdout=b"", stderr=b""), seconds=0.0)
        code, stdout = program.argv
        return TimedResult(
            ended=Ended(exit_code=int(code), stdout=stdout.encode(), stderr=b"note"), seconds=1.0
        )

    async def beside(self, work: Any, attend: Any) -> Any:
        raise NotImplementedError


class Files:
    """A runtime that only has files."""

    workdir = "/work"

    def __init__(self, **files: bytes) -> None:
        self.files = {f"/work/{name}": content for name, content in files.items()}

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        await trio.lowlevel.checkpoint()
        if path.endswith("/unreadable"):
            raise ContentFault("reading it: Permission denied")
        content = self.files.get(path)
        return None if content is None else content[:limit]


async def judged(clock: Clock, *cases: Mapping[str, Json], files: Any = None, **config: Json) -> Verdict:
    session = finished(files or Files(), {"cases": [dict(case) for case in cases], **config})
    return await program_cases.evaluate(evolve(session, clock=clock))


async def test_cases_all_pass_or_weigh() -> None:
    """All cases must pass, or their weights count."""
    cases: tuple[dict[str, Json], ...] = (
        {"argv": ["0", "a"], "stdout": "a", "weight": 3},
        {"argv": ["1", "b"], "stdout": "b", "name": "second"},
    )
    verdict = await judged(SaidClock(), *cases)
    assert verdict.reward == 0.0
    assert verdict.metrics == {
        "cases": 2,
        "passed": 1,
        "failed": [
            {
                "name": "second",
                "reason": "it ended with exit code 1",
                "exit_code": 1,
                "output_tail": "bnote",
            }
        ],
    }
    assert (await judged(SaidClock(), *cases, score="fraction")).reward == 0.75
    assert (await judged(SaidClock(), cases[0])) == Verdict(reward=1.0, metrics={"cases": 1, "passed": 1})


async def test_case_spoilt_by_agent_fails() -> None:
    cases: tuple[dict[str, Json], ...] = (
        {"argv": ["raises", "fault"]},
        {"argv": ["raises", "spoilt"]},
        {"outputs": {"unreadable": "x"}},
        {"argv": ["0", "x"], "stdout": "x"},
    )
    verdict = await judged(SaidClock(), *cases, score="fraction")
    assert (verdict.reward, verdict.metrics["passed"]) == (1 / 4, 1)
    assert "nothing could be run: so" in str(verdict.metrics["failed"])
    with pytest.raises(EvaluatorError, match="so"):  # where nothing of the session is left
        await judged(SaidClock(), {"argv": ["raises", "gone"]})


async def test_lost_exit_code_fails() -> None:
    verdict = await judged(SaidClock(), {"argv": [str(LOST), "49"], "exit_code": None, "stdout": "49"})
    assert verdict.reward == 0.0
    assert "let itself be traced" in str(verdict.metrics["failed"])


async def test_expected_values_stay_secret() -> None:
    """No expected value reaches a program or the metrics."""
    clock = SaidClock()
    verdict = await judged(
        clock,
        {"argv": ["0", "x"], "stdout": "7351", "outputs": {"out": "7351"}, "env": {"A": "b"}, "stdin": "in"},
        {"argv": ["0", "x"], "stderr": {"pattern": "7351"}},
        {"outputs": {"out": {"json": 7351}}},
        files=Files(out=b"1"),
    )
    assert verdict.metrics["passed"] == 0
    assert "7351" not in str(clock.ran)
    assert "7351" not in str(verdict.metrics)


async def test_cases_share_one_time_limit() -> None:
    clock = SaidClock()
    late: Json = {"argv": ["late"], "timeout": 3.0}
    verdict = await judged(clock, *[late] * 4, total_timeout=7.0)  # type: ignore[arg-type]
    assert [program.within_s for program in clock.ran] == [3.0, 3.0, 1.0]
    assert [each["reason"] for each in verdict.metrics["failed"]] == [  # type: ignore[union-attr,call-overload,index]
        "it ran longer than 3 s",
        "it ran longer than 3 s",
        "it ran longer than 1 s",
        "all cases together took longer than 7 s",
    ]


async def test_output_over_bound_fails() -> None:
    large = b"x" * (program_cases.OUTPUT_BYTES + 1)
    verdict = await judged(SaidClock(), {"outputs": {"out": "x"}}, files=Files(out=large))
    assert verdict.metrics["failed"] == [{"name": "case 1", "reason": "out: it is longer than 1 MiB"}]
