"""`test_on_output`: apply the agent's patch to a clean runtime and compare the status of each test.

Polar's config is accepted unchanged and gets Polar's verdict, with one stricter rule: where two lines name
the same test, the worse status counts, so that a PASSED printed by the tested code hides no failure.
"""

import json
import re
from collections.abc import Iterable, Mapping

from attrs import evolve, frozen

from polarnode.core.conversation import Json
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import contract, patches
from polarnode.evaluators.contract import Evaluator, Finished, ProgramResult, run_script, shown

STATUSES = ("PASSED", "SKIPPED", "FAILED", "ERROR")  # from better to worse
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m|\r")


@frozen(kw_only=True)
class TestOnOutputConfig:
    """The shape of `evaluator.config`."""

    __test__ = False  # pytest takes a class of this name for tests

    test_command: str
    expected_output_json: Mapping[str, str] | str
    repo_dir: str = "/testbed"
    base_commit: str | None = None
    patch_command: str | None = None
    exclude_patterns: tuple[str, ...] = ()
    # git needs seconds, and a minute on a machine with twenty times the load of its cores, which is not the
    # agent's fault.
    apply_timeout: float = 300.0
    test_timeout: float = 1200.0  # Polar's and SWE-bench's order of magnitude; budgets.post_s holds as well
    user: str | None = None


def read_config(config: Mapping[str, Json]) -> TestOnOutputConfig:
    """The config, or a refusal naming the field."""
    read = contract.read(config, TestOnOutputConfig)
    contract.command("test_command", read.test_command)
    contract.command("patch_command", read.patch_command)
    contract.absolute("repo_dir", read.repo_dir)
    contract.seconds("apply_timeout", read.apply_timeout)
    contract.seconds("test_timeout", read.test_timeout)
    if not expected(read):
        raise contract.refused("expected_output_json", "must name at least one test and its status")
    return read


def check(config: Mapping[str, Json]) -> None:
    """Refuse at submission what would fail after the run."""
    read_config(config)


def expected(config: TestOnOutputConfig) -> dict[str, str]:
    """The status that each test must have, by its short name."""
    value: object = config.expected_output_json
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise contract.refused("expected_output_json", f"is no JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise contract.refused(
            "expected_output_json", "must be an object of test names and statuses, or its text"
        )
    for name, status in value.items():
        if status not in STATUSES:
            raise contract.refused(
                "expected_output_json",
                f"expects {status!r:.40} of {name:.80}: it must be one of {', '.join(STATUSES)}",
            )
    return _worst((short(name), str(status)) for name, status in value.items())


async def evaluate(finished: Finished) -> Verdict:
    """Return 1.0 if every test has its expected status and no other test was seen, else 0.0."""
    config = read_config(finished.config)
    of = _agent_repository(config)
    moved = await patches.carried(finished, of)
    if isinstance(moved, patches.UnusablePatch):
        return Verdict(reward=0.0, metrics={"resolved": False, "reason": moved.reason})
    await finished.prepare()
    ran = await run_script(
        finished.runtime,
        config.test_command,
        within_s=config.test_timeout,
        user=config.user,
        workdir=config.repo_dir,
    )
    why = require_statuses(finished, ran)
    found = _verdict(expected(config), ran, moved)
    return evolve(found, metrics={**found.metrics, **why})


def require_statuses(finished: Finished, ran: ProgramResult) -> dict[str, Json]:
    """Raise EvaluatorError where no test was seen because a program could not run."""
    return {} if statuses(ran.output) else contract.require_test_ran(finished, ran.exit_code, ran.tail)


def _agent_repository(config: TestOnOutputConfig) -> patches.Repository:
    return patches.Repository(
        folder=config.repo_dir,
        base=config.base_commit,
        user=config.user,
        command=config.patch_command,
        exclude=config.exclude_patterns,
        within_s=config.apply_timeout,
    )


def _verdict(wanted: Mapping[str, str], ran: ProgramResult, patch: patches.Patch) -> Verdict:
    seen = {} if ran.timed_out else statuses(ran.output)
    resolved = seen == wanted
    metrics: dict[str, Json] = {
        "resolved": resolved,
        "expected": len(wanted),
        "seen": len(seen),
        **ran.metrics,
        "patch": patch.metrics,
    }
    if not resolved:
        metrics["different"] = shown(
            f"{name}: {seen[name]}, not {wanted[name]}"
            for name in wanted.keys() & seen.keys()
            if seen[name] != wanted[name]
        )
        metrics["missing"] = shown(wanted.keys() - seen.keys())
        metrics["unexpected"] = shown(f"{name}: {seen[name]}" for name in seen.keys() - wanted.keys())
        metrics["reason"] = (
            "the tests ran out of time"
            if ran.timed_out
            else "the tests did not come to what was expected of them"
        )
    return Verdict(reward=float(resolved), metrics=metrics)


# ── output of pytest -rA ───────────────────────────────────────────────────────


def statuses(output: str) -> dict[str, str]:
    """The status of each test that a line begins with, by its short name."""
    pairs = ((_TERMINAL_CODES.sub("", line).strip().split(maxsplit=1)) for line in output.split("\n"))
    return _worst((short(pair[1]), pair[0]) for pair in pairs if len(pair) == 2 and pair[0] in STATUSES)


def short(name: str) -> str:
    """A test's name without its file: `method` or `Class.method`, without pytest's suffix after a dash."""
    parts = name.split(" - ")[0].split("::")
    return ".".join(parts[-2:]) if len(parts) > 2 else parts[-1]


def _worst(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, status in pairs:
        if name and STATUSES.index(status) >= STATUSES.index(found.get(name, status)):
            found[name] = status
    return found


EVALUATOR = Evaluator(name="test_on_output", evaluate=evaluate, check=check, fresh=True, copies=False)
