"""`swebench`: judge instances of SWE-bench and SWE-Gym with the `swebench` package's log parsers and grader.

The agent's patch is applied to a clean copy of the instance's image, then the instance's own tests.
Invariant: no file of the agent stands in the place of a test, and a log must hold the script's marks
exactly once. A wrong image or row is an EvaluatorError; a wrong patch is a reward of 0.
"""

import os
from collections.abc import Mapping
from typing import Any, cast

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, boundary
from polarnode.core.ports import Runtime
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import patches, swebench_specs
from polarnode.evaluators.contract import Evaluator, Finished, ProgramResult, run_script, shown
from polarnode.evaluators.swebench_specs import Package, Spec, SwebenchConfig, read_config, read_spec

SCRIPT = "/tmp/polarnode-eval/eval.sh"
KINDS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def check(config: Mapping[str, Json]) -> None:
    """Refuse at submission what would fail after the run: a row that cannot be judged, or a node without the
    package.
    """
    read_spec(read_config(config), swebench_specs.load())


async def evaluate(finished: Finished) -> Verdict:
    """1.0 where the instance is resolved, else 0.0."""
    config, package = read_config(finished.config), swebench_specs.load()
    spec = read_spec(config, package)
    of = _repository(config, spec)
    moved = await patches.moved(finished.left, finished.runtime, of)
    if isinstance(moved, patches.Unusable):
        return _worthless(moved.reason)
    if instead := await patches.no_folders(finished.runtime, of, spec.test_files):
        return _worthless(
            f"something else stands where the instance's tests have a folder: {instead[0][:200]}"
        )
    await finished.prepare()
    await _place_tests(finished.runtime, config, spec)
    await finished.runtime.put({SCRIPT: spec.script.encode()}, user=config.user, mode=0o755)
    ran = await run_script(
        finished.runtime,
        f"bash {SCRIPT}",
        within_s=config.test_timeout,
        user=config.user,
        workdir=config.repo_dir,
    )
    return _verdict(package, spec, ran, moved)


def _worthless(reason: str) -> Verdict:
    return Verdict(reward=0.0, metrics={"resolved": False, "reason": reason})


def _repository(config: SwebenchConfig, spec: Spec) -> patches.Repository:
    return patches.Repository(
        folder=config.repo_dir,
        base=spec.base_commit,
        user=config.user,
        command=config.patch_command,
        exclude=(*config.exclude_patterns, *map(_literal, spec.test_files)),
        within_s=config.apply_timeout,
    )


def _literal(path: str) -> str:
    """A path as a pattern that matches nothing else."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


async def _place_tests(runtime: Runtime, config: SwebenchConfig, spec: Spec) -> None:
    """Put the instance's tests on, where its script does not; the agent's patch names none of their files."""
    if spec.test_patch is None:
        return
    of = patches.Repository(folder=config.repo_dir, user=config.user, within_s=config.apply_timeout)
    placed = await patches.apply(runtime, patches.Patch(content=spec.test_patch), of)
    if isinstance(placed, patches.Unusable):
        raise EvaluatorError(f"the instance's tests do not fit its image: {placed.reason}")


def _verdict(package: Package, spec: Spec, ran: ProgramResult, patch: patches.Patch) -> Verdict:
    metrics: dict[str, Json] = {"resolved": False, **ran.metrics, "patch": patch.metrics}
    if ran.timed_out:
        return Verdict(reward=0.0, metrics={**metrics, "reason": "the tests ran out of time"})
    log = _log(package, ran)
    marks = (log.count(package.start), log.count(package.end))
    if marks[0] == 0:
        raise EvaluatorError(
            f"the instance's script ended with exit code {ran.exit_code} before its tests: {ran.tail}"
        )
    if marks != (1, 1):
        reason = (
            f"the log holds the marks of its tests {marks[0]} and {marks[1]} times: something else than the"
            " script printed or ended them"
        )
        return Verdict(reward=0.0, metrics={**metrics, "reason": reason})
    report = graded(package, spec, log)
    resolved = bool(report["resolved"])
    return Verdict(
        reward=float(resolved), metrics={**metrics, **_report_metrics(report), "resolved": resolved}
    )


def _log(package: Package, ran: ProgramResult) -> str:
    """The log; where only its end is kept, with the first mark before that."""
    return (
        f"{package.start}\n{ran.output}" if ran.truncated and package.start not in ran.output else ran.output
    )


def graded(package: Package, spec: Spec, log: str) -> Mapping[str, Any]:
    """The package's report on a log. It reads files, so that the log is one in memory."""
    name = spec.own.instance_id
    prediction = {"instance_id": name, "model_name_or_path": "polarnode", "model_patch": ""}
    with (
        boundary(EvaluatorError, "swebench's grader failed"),
        os.fdopen(os.memfd_create("test_output"), "wb") as file,
    ):
        file.write(log.encode("utf-8", "replace"))
        file.flush()
        report = package.get_eval_report(
            test_spec=spec.own,
            prediction=prediction,
            test_log_path=f"/proc/self/fd/{file.fileno()}",
            include_tests_status=True,
        )
    return cast(Mapping[str, Any], report[name])


def _report_metrics(report: Mapping[str, Any]) -> dict[str, Json]:
    """Counts, and the names of what failed."""
    metrics: dict[str, Json] = {}
    status = report.get("tests_status")
    if status is None:
        metrics["reason"] = report.get("infra_failure_reason") or "the package read no tests in the log"
        return metrics
    for kind in KINDS:
        passed, failed = status[kind]["success"], status[kind]["failure"]
        metrics[kind.lower()] = {"passed": len(passed), "failed": len(failed), "failures": shown(failed)}
    if not report["resolved"]:
        metrics["reason"] = "some of the instance's tests failed"
    return metrics


EVALUATOR = Evaluator(name="swebench", evaluate=evaluate, check=check, fresh=True, copies=False)
