"""`program_cases`: run the agent's program once per case and compare its outputs in the node.

Each case gives a program its input and states what it must print, write and exit with. The programs run where
the agent's work is, as the runtime's user. No test runs there: the expected values never leave the node, and
results are compared here, by plain functions over bounded bytes. So the agent's code reaches nothing by which
it could change a comparison.

Invariants: the node's clock, and no clock in the container, ends a program; every process of a case is ended
before its files are read and before the next case; no link, pipe or device is read; what a program prints is
data, which is compared as UTF-8 and is never a pattern or code. Whatever a program does wrong fails its case
and raises no error.
"""

import re
from collections.abc import Mapping, Sequence
from typing import cast

import regex
from attrs import define, evolve, field, frozen

from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import ContentFault, PolarnodeError, SpoiltRuntime
from polarnode.core.ports import LOST, NOT_RUN, Ended, TimedProgram
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import contract
from polarnode.evaluators.command import REMOVE_SCRIPT
from polarnode.evaluators.contract import NAME, NAMES, Evaluator, Finished, is_finite

# ── config ────────────────────────────────────────────────────────────────────

MAX_CASES = 1000  # each takes about 0.1 s, and post_s is 300
# The most bytes of each stream and file of a case that are compared. The expected content is part of the
# task.
OUTPUT_BYTES = 1 << 20
MAX_PATTERN_BYTES = 64 << 10  # the most characters of an output that a pattern is compared with
MAX_PATTERN_S = 0.1  # a pattern that backtracks holds the node's event loop for at most this long
TAIL = 300  # characters of a failed case's output kept in the metrics; there are up to 50 of them


@frozen(kw_only=True)
class ExpectedOutput:
    """What an output must be, by exactly one of the first five fields.

    `text`: equal when blanks at the ends of lines and empty lines at the end are ignored. `exact`: equal byte
    for byte. `numbers`: these numbers, separated by blanks, and nothing else. `json`: this JSON value.
    Numbers of both may differ by `tolerance`, which is relative to an expected number above 1. `pattern`: a
    regular expression that matches the whole output.
    """

    text: str | None = None
    exact: str | None = None
    numbers: tuple[float, ...] | None = None
    json: Json = None
    pattern: str | None = None
    tolerance: float = 1e-9


Wanted = str | ExpectedOutput  # a string is Expected(text=...)


@frozen(kw_only=True)
class Case:
    """One run of a program, and its expected results. `exit_code` None accepts every code."""

    name: str | None = None
    argv: tuple[str, ...] = ()
    stdin: str = ""
    files: Mapping[str, str] = field(factory=dict)
    env: Mapping[str, str] = field(factory=dict)
    exit_code: int | None = 0
    stdout: Wanted | None = None
    stderr: Wanted | None = None
    outputs: Mapping[str, Wanted] = field(factory=dict)
    timeout: float | None = None
    weight: float = 1.0


@frozen(kw_only=True)
class ProgramCasesConfig:
    """The shape of `evaluator.config`."""

    cases: tuple[Case, ...]
    argv: tuple[str, ...] = ()
    score: str = "all"
    timeout: float = 10.0  # an interpreter that starts on a busy machine takes seconds
    total_timeout: float = (
        240.0  # below the default post_s of 300, so that slow programs fail and are no error
    )
    user: str | None = None


def read_config(config: Mapping[str, Json]) -> ProgramCasesConfig:
    """The config, or a refusal naming the field."""
    read = contract.read(config, ProgramCasesConfig)
    if not 0 < len(read.cases) <= MAX_CASES:
        raise contract.refused("cases", f"must have 1 to {MAX_CASES} cases")
    if read.score not in ("all", "fraction"):
        raise contract.refused("score", f'is {read.score!r:.40}: it is "all" or "fraction"')
    contract.seconds("timeout", read.timeout)
    contract.seconds("total_timeout", read.total_timeout)
    cases = tuple(
        evolve(case, argv=case.argv or read.argv, timeout=case.timeout or read.timeout) for case in read.cases
    )
    for index, case in enumerate(cases):
        _check_case(f"cases[{index}]", case)
    return evolve(read, cases=cases)


def _check_case(at: str, case: Case) -> None:
    if not case.argv and (not case.outputs or case.stdin or case.stdout or case.stderr or case.files):
        raise contract.refused(f"{at}.argv", "is empty, as is config.argv: name the program, or only outputs")
    contract.seconds(f"{at}.timeout", case.timeout or 0)
    if not (is_finite(case.weight) and case.weight > 0):
        raise contract.refused(f"{at}.weight", "must be a number greater than 0")
    for name in (*case.files, *case.outputs):
        if not name.strip("/") or name.endswith("/") or ".." in name.split("/") or "\0" in name:
            raise contract.refused(
                at, f"names {name!r:.80}: name a file, absolute or in the workdir, without .."
            )
    wanted: tuple[Wanted | None, ...] = (case.stdout, case.stderr, *case.outputs.values())
    for each in wanted:
        if isinstance(each, ExpectedOutput):
            _check_expected(at, each)


def _check_expected(at: str, expected: ExpectedOutput) -> None:
    kinds = (expected.text, expected.exact, expected.numbers, expected.json, expected.pattern)
    if sum(kind is not None for kind in kinds) != 1:
        raise contract.refused(
            at, "expects an output as exactly one of text, exact, numbers, json and pattern"
        )
    if not (is_finite(expected.tolerance) and expected.tolerance >= 0):
        raise contract.refused(at, "has a tolerance that is no number of 0 or more")
    if expected.pattern is not None:
        try:
            regex.compile(expected.pattern)
        except regex.error as error:
            raise contract.refused(at, f"has a pattern that is no regular expression: {error}") from error


def check(config: Mapping[str, Json]) -> None:
    """Refuse at submission what would fail after the run."""
    read_config(config)


# ── comparison ────────────────────────────────────────────────────────────────

BLANK_CHARS = " \t\r\n\f\v"  # ASCII's: other blanks of Unicode are content
_NUMBER_PATTERN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def difference(output: bytes, expected: Wanted) -> str | None:
    """Why an output is not the expected one; None if it is. The reason does not reveal the expected value."""
    try:
        text = output.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    if isinstance(expected, str):
        return _text_difference(text, expected)
    if expected.exact is not None:
        return None if text == expected.exact else "it differs"
    if expected.numbers is not None:
        return _numbers_difference(text, expected.numbers, expected.tolerance)
    if expected.pattern is not None:
        return _pattern_difference(text, expected.pattern)
    if expected.text is not None:
        return _text_difference(text, expected.text)
    return _json_difference(output, expected.json, expected.tolerance)


def _text_difference(text: str, expected: str) -> str | None:
    seen, wanted = _lines(text), _lines(expected)
    if seen == wanted:
        return None
    pairs = zip(seen, wanted, strict=False)
    same = next(
        (place for place, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(seen), len(wanted))
    )
    return f"it differs in line {same + 1}"


def _lines(text: str) -> list[str]:
    return [line.rstrip(BLANK_CHARS) for line in text.rstrip(BLANK_CHARS).split("\n")]


def _numbers_difference(text: str, expected: Sequence[float], tolerance: float) -> str | None:
    # The text is split into no more pieces than needed, because the output may be a MiB of digits.
    pieces = re.split(f"[{BLANK_CHARS}]+", text.strip(BLANK_CHARS), maxsplit=len(expected))
    found = pieces if pieces != [""] else []
    if len(found) != len(expected):
        return f"it does not have {'fewer' if len(found) > len(expected) else 'more'} numbers"
    for place, (piece, wanted) in enumerate(zip(found, expected, strict=True)):
        if (
            len(piece) > NAME
            or not _NUMBER_PATTERN.fullmatch(piece)
            or not _close(float(piece), wanted, tolerance)
        ):
            return f"number {place + 1} differs"
    return None


def _close(value: float, wanted: float, tolerance: float) -> bool:
    return abs(value - wanted) <= tolerance * max(1.0, abs(wanted))


def _pattern_difference(text: str, pattern: str) -> str | None:
    if len(text) > MAX_PATTERN_BYTES:
        return f"it is longer than the {MAX_PATTERN_BYTES >> 10} KiB that a pattern is compared with"
    try:
        matched = regex.fullmatch(pattern, text, timeout=MAX_PATTERN_S)
    except TimeoutError:
        return f"the pattern did not match it within {MAX_PATTERN_S:g} s"
    return None if matched else "the pattern does not match it"


def _json_difference(output: bytes, expected: Json, tolerance: float) -> str | None:
    try:
        value = codec.read_json(output)
    except PolarnodeError:
        return "it is no JSON"
    return None if _same(value, expected, tolerance) else "it differs"


def _same(value: object, expected: Json, tolerance: float) -> bool:
    """Whether two JSON values are equal; true is not 1. It descends only as deep as the expected value."""
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_same(value[key], expected[key], tolerance) for key in expected)
        )
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(_same(one, other, tolerance) for one, other in zip(value, expected, strict=True))
        )
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and _close(float(cast(float, value)), expected, tolerance)
    return type(value) is type(expected) and value == expected


# ── running ───────────────────────────────────────────────────────────────────

# This runs as the programs' user, like REMOVE. If that user cannot remove or write a file, the case fails.
WRITE_SCRIPT = 'rm -rf -- "$1"; folder=$(dirname -- "$1"); mkdir -p -- "$folder" && cat > "$1"'


@frozen(kw_only=True)
class CaseResult:
    """The result of a case: why it failed (None if it passed), and how its program ended, if it ran to its
    end.
    """

    reason: str | None
    ended: Ended | None = None


@define(eq=False, kw_only=True)
class _CaseRunner:
    """The cases of one session, run one after another. `left_s`: seconds that remain for all of them."""

    finished: Finished
    config: ProgramCasesConfig
    left_s: float

    async def result(self, case: Case) -> CaseResult:
        """Run a case."""
        if not case.argv:
            return CaseResult(reason=await self._files(case))
        if (unprepared := await self._prepare(case)) is not None:
            return CaseResult(reason=f"its files could not be put there: {unprepared}")
        ran = await self._timed(case.argv, stdin=case.stdin, env=case.env, within_s=case.timeout)
        if ran.ended is None:
            return ran
        reason = _end_difference(case, ran.ended) or await self._files(case)
        if reason is not None and ran.ended.exit_code in NOT_RUN:
            await self._require_program(case.argv[0], ran.ended)
        return evolve(ran, reason=reason)

    async def _require_program(self, name: str, ended: Ended) -> None:
        """Raise EvaluatorError if a case's program is missing and it was not the agent's task to make it. The
        container is asked, because a program of the agent's may end with any exit code.
        """
        found = await self._timed(("sh", "-c", 'command -v -- "$1"', "sh", name), stdin="")
        if found.ended is None or found.ended.exit_code != 0:
            said = f'exec: "{name}": {contract.stderr_tail(ended.stderr or ended.stdout)}'
            contract.require_test_ran(self.finished, ended.exit_code, said)

    async def _prepare(self, case: Case) -> str | None:
        """Remove what an earlier run left at the outputs and write the case's files. Return why that
        failed.
        """
        scripts = [(("sh", "-c", REMOVE_SCRIPT, "sh", *case.outputs), "")] if case.outputs else []
        scripts += [(("sh", "-c", WRITE_SCRIPT, "sh", path), content) for path, content in case.files.items()]
        for argv, stdin in scripts:
            ran = await self._timed(argv, stdin=stdin)
            if ran.ended is None or ran.ended.exit_code != 0:
                return ran.reason or contract.stderr_tail(ran.ended.stderr if ran.ended else b"")
        return None

    async def _timed(
        self,
        argv: tuple[str, ...],
        *,
        stdin: str,
        env: Mapping[str, str] | None = None,
        within_s: float | None = None,
    ) -> CaseResult:
        within_s = min(within_s or self.config.timeout, self.left_s)
        if within_s <= 0:
            return CaseResult(reason=f"all cases together took longer than {self.config.total_timeout:g} s")
        program = TimedProgram(
            argv=argv,
            within_s=within_s,
            keep=OUTPUT_BYTES + 1,
            stdin=stdin.encode(),
            env=env or {},
            user=self.config.user,
        )
        try:
            end = await self.finished.clock.run(self.finished.runtime, program)
        except (ContentFault, SpoiltRuntime) as error:  # the agent made what prevents the run
            return CaseResult(reason=f"nothing could be run: {error}")
        self.left_s -= end.seconds
        late = f"it ran longer than {within_s:g} s" if end.ended is None else None
        return CaseResult(reason=late, ended=end.ended)

    async def _files(self, case: Case) -> str | None:
        for name, expected in case.outputs.items():
            path = codec.in_workdir(name, self.finished.runtime.workdir)
            content = await contract.content(self.finished.runtime, path, limit=OUTPUT_BYTES + 1)
            if content is None:
                return f"{name:.200} is no file"
            if reason := _bounded_difference(content, expected):
                return f"{name:.200}: {reason}"
        return None


def _end_difference(case: Case, ended: Ended) -> str | None:
    if ended.exit_code == LOST:
        return "it let itself be traced (PTRACE_TRACEME), so that its exit code is lost"
    if case.exit_code is not None and ended.exit_code != case.exit_code:
        return f"it ended with exit code {ended.exit_code}"
    streams = (("stdout", ended.stdout, case.stdout), ("stderr", ended.stderr, case.stderr))
    for name, output, expected in streams:
        if expected is not None and (reason := _bounded_difference(output, expected)):
            return f"{name}: {reason}"
    return None


def _bounded_difference(output: bytes, expected: Wanted) -> str | None:
    if len(output) > OUTPUT_BYTES:
        return f"it is longer than {OUTPUT_BYTES >> 20} MiB"
    return difference(output, expected)


async def evaluate(finished: Finished) -> Verdict:
    """Return 1.0 if every case passed, else 0.0; with the score `fraction`, the passed share of all
    weights.
    """
    config = read_config(finished.config)
    run = _CaseRunner(finished=finished, config=config, left_s=config.total_timeout)
    return _verdict(config, [await run.result(case) for case in config.cases])


def _verdict(config: ProgramCasesConfig, results: Sequence[CaseResult]) -> Verdict:
    both = list(zip(config.cases, results, strict=True))
    passed = [case.weight for case, result in both if result.reason is None]
    reward = sum(passed) / sum(case.weight for case in config.cases)
    if config.score == "all":
        reward = float(len(passed) == len(both))
    failed: list[Json] = [
        {"name": (case.name or f"case {place}")[:NAME], "reason": result.reason, **_metrics(result.ended)}
        for place, (case, result) in enumerate(both, start=1)
        if result.reason is not None
    ]
    metrics: dict[str, Json] = {"cases": len(both), "passed": len(passed)}
    return Verdict(reward=reward, metrics={**metrics, **({"failed": failed[:NAMES]} if failed else {})})


def _metrics(ended: Ended | None) -> dict[str, Json]:
    if ended is None:
        return {}
    tail = (ended.stdout[-4 * TAIL :] + ended.stderr[-4 * TAIL :]).decode("utf-8", "replace")[-TAIL:]
    return {"exit_code": ended.exit_code, "output_tail": tail}


EVALUATOR = Evaluator(name="program_cases", evaluate=evaluate, check=check, only_programs=True)
