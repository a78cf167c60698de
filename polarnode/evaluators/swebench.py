"""`swebench`: judge instances of SWE-bench and SWE-Gym with the `swebench` package's log parsers and grader.

The agent's patch is applied to a clean copy of the instance's image, then the instance's own tests. Importing
`swebench.harness` would import docker, datasets and modal and read a .env file into the node's environment.
The parts that judge are imported without them, once, and sys.modules is restored afterwards. They are no
public interface, so that other versions of the package are refused.

Rows of swebench 5 bring `eval_script` and `log_parser`. Other rows need a test command: the task's, or the
one that SWE-Gym's fork of the package runs for the repository. Invariants: Polar's config keys are accepted
unchanged, a row that cannot be judged is refused at submission, no file of the agent stands in the place of a
test, and a log must hold the script's marks exactly once. A wrong image or row is an EvaluatorError; a wrong
patch is a reward of 0.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata, util
from types import ModuleType
from typing import Any, Final, cast

from attrs import frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused, boundary
from polarnode.core.ports import NOT_RUN, Runtime
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import contract, patches
from polarnode.evaluators.contract import NAME, Evaluator, Finished, ProgramResult, run_script, shown

# ── config ─────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class SwebenchConfig:
    """The shape of `evaluator.config`."""

    instance: Mapping[str, Json]
    test_command: str | None = None
    install_command: str | None = None
    log_parser: str | None = None
    repo_dir: str = "/testbed"
    patch_command: str | None = None
    exclude_patterns: tuple[str, ...] = ()
    # git takes seconds, and a minute at a load of twenty times the cores, which is not the agent's fault.
    apply_timeout: float = 300.0
    test_timeout: float = 1800.0  # swebench's default for one instance; budgets.post_s applies too
    user: str | None = None


def read_config(config: Mapping[str, Json]) -> SwebenchConfig:
    """Parse `evaluator.config`. Refused with the field's name if it is wrong."""
    read = contract.read(config, SwebenchConfig)
    contract.absolute("repo_dir", read.repo_dir)
    contract.seconds("apply_timeout", read.apply_timeout)
    contract.seconds("test_timeout", read.test_timeout)
    contract.command("test_command", read.test_command)
    contract.command("install_command", read.install_command)
    contract.command("patch_command", read.patch_command)
    return read


def text(instance: Mapping[str, Json], name: str, *, default: str | None = None) -> str:
    """Read a column that must hold text."""
    value = instance.get(name)
    if isinstance(value, str) and value:
        return value
    if default is not None and value in (None, ""):
        return default
    raise _column_refusal(name, "must be a text" if value not in (None, "") else "is missing from this row")


def names(instance: Mapping[str, Json], name: str) -> tuple[str, ...]:
    """Read a column of test names: a list, or a list as JSON text as in the published datasets."""
    value: object = instance.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _column_refusal(name, f"is no JSON: {error}") from error
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(each, str) for each in value)
    ):
        raise _column_refusal(name, "must be a list of names of tests")
    return tuple(value)


def _column_refusal(name: str, message: str) -> Refused:
    return Refused(f"instance.{name} {message}", path=f"{contract.ROOT}.instance.{name}")


# ── package ────────────────────────────────────────────────────────────────────

VERSION = "5.0.2"
INSTALL = f"pip install --no-deps swebench=={VERSION} unidiff"
PACKAGES: Final = ("swebench", "swebench.harness")  # the __init__ of these imports everything else
ABSENT: Final = (
    "datasets",
    "dotenv",
)  # imported by swebench.harness.utils for functions that are not called here
Parser = Callable[[str, Any], Mapping[str, str]]


@frozen(kw_only=True)
class Package:
    """The parts of the swebench package that the evaluator uses."""

    parsers: Mapping[str, Parser]
    make_test_spec: Callable[[dict[str, Any]], Any]
    get_eval_report: Callable[..., dict[str, Any]]
    test_spec: Callable[..., Any]
    start: str
    end: str
    exit_code: str


def load() -> Package:
    """Import the package's parts. If that is impossible, raise Refused, which says how to install it."""
    try:
        found = metadata.version("swebench")
    except metadata.PackageNotFoundError:
        raise Refused(
            f"the swebench evaluator needs the swebench package on the node: {INSTALL}",
            path="$.evaluator.name",
        ) from None
    if found != VERSION:
        raise Refused(
            f"the swebench evaluator needs swebench {VERSION} and the node has {found}: {INSTALL}",
            path="$.evaluator.name",
        )
    return _load()


@cache
def _load() -> Package:
    with _alone():
        constants = import_module("swebench.harness.constants")
        grading = import_module("swebench.harness.grading")
        utils = import_module("swebench.harness.utils")
        types = import_module("swebench.types")
    return Package(
        parsers=grading.PARSER_REGISTRY,
        make_test_spec=utils.make_test_spec,
        get_eval_report=grading.get_eval_report,
        test_spec=types.TestSpec,
        start=constants.START_TEST_OUTPUT,
        end=constants.END_TEST_OUTPUT,
        exit_code=constants.TEST_EXIT_CODE,
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Inside this context the packages are imported without their __init__ and the absent modules are stubs.
    On exit sys.modules is restored.
    """
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_swebench_module(name)}
    try:
        sys.modules.update({name: _package(name) for name in PACKAGES})
        sys.modules.update({name: _StubModule(name) for name in ABSENT})
        yield
    finally:
        for name in [name for name in sys.modules if _is_swebench_module(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_swebench_module(name: str) -> bool:
    return name.partition(".")[0] in ("swebench", *ABSENT)


def _package(name: str) -> ModuleType:
    """An empty package that only has the path of its modules."""
    top = util.find_spec(name.partition(".")[0])
    if top is None or not top.submodule_search_locations:
        raise Refused(f"the swebench package cannot be read: {INSTALL}", path="$.evaluator.name")
    module = ModuleType(name)
    module.__path__ = [f"{top.submodule_search_locations[0]}/{'/'.join(name.split('.')[1:])}".rstrip("/")]
    return module


class _StubModule(ModuleType):
    """A module whose every attribute is a function that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*arguments: object, **named: object) -> None:
    return None


# ── specs ──────────────────────────────────────────────────────────────────────

# Files with these endings are not passed to the test runner, as in swebench's own constant.
NOT_TEST_SUFFIXES = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
PYTEST = "parse_log_pytest"
# This mode requires a status for every test. The package's other mode counts a missing test as passed.
BOTH = "pass_and_fail"
CASES: Final = re.compile(r"\[case ([^\]\s]+)\]")


@frozen(kw_only=True)
class Command:
    """A repository's test command. With `cases` the command takes names of mypy's test cases, not files."""

    test: str
    before: str = ""
    cases: bool = False


# The test commands of SWE-Gym's fork of the package, by repository in lower case; all outputs are parsed as
# pytest's. Install steps that need the network are left out and compile steps are kept: the images are
# already installed.
SWE_GYM: Final[Mapping[str, Command]] = {
    "getmoto/moto": Command(test="pytest -n0 -rA"),
    "python/mypy": Command(test="pytest -n0 -rA -k", cases=True),
    "conan-io/conan": Command(test="pytest -n0 -rA", before='export PYTHONPATH="${PYTHONPATH:-}:$(pwd)"'),
    "dask/dask": Command(test="pytest -n0 -rA --color=no"),
    "project-monai/monai": Command(test="pytest -rA"),
    "iterative/dvc": Command(test="pytest -rA"),
    "bokeh/bokeh": Command(test="pytest -rA -n0"),
    "modin-project/modin": Command(test="pytest -n0 -rA"),
    "pydantic/pydantic": Command(
        test="pytest -rA --tb=short -vv -o console_output_style=classic --no-header"
    ),
    "pandas-dev/pandas": Command(
        test="pytest -rA --tb=long",
        before="python -m pip install -ve . --no-build-isolation -Ceditable-verbose=true",
    ),
    "facebookresearch/hydra": Command(test="pytest -rA --tb=long"),
}


@frozen(kw_only=True)
class Spec:
    """How one instance is tested.

    `test_patch` is applied before `script` runs, unless the script does it. `own` is the package's TestSpec.
    `test_files` are the paths that the test patch names; the agent's versions of them are discarded.
    """

    own: Any
    script: str
    base_commit: str
    test_files: tuple[str, ...]
    test_patch: bytes | None = None


def read_spec(config: SwebenchConfig, package: Package) -> Spec:
    """The instance's spec. Refused if neither its row nor the task says how it is tested."""
    instance = config.instance
    test_patch = text(instance, "test_patch").encode()
    files = patches.paths(test_patch)
    if not files:
        raise Refused(
            "instance.test_patch is no patch in git's format: no file begins in it",
            path=f"{contract.ROOT}.instance.test_patch",
        )
    base, repo = text(instance, "base_commit"), text(instance, "repo")
    if config.test_command is None and instance.get("eval_script"):
        own = package.make_test_spec(_row(instance, package))
        return Spec(own=own, script=own.eval_script, base_commit=base, test_files=files)
    command = (
        Command(test=config.test_command) if config.test_command is not None else SWE_GYM.get(repo.lower())
    )
    if command is None:
        raise Refused(
            f"nothing says how {repo} is tested: take the dataset's rows of swebench 5, which have"
            " eval_script and log_parser, or give a test_command",
            path=f"{contract.ROOT}.instance.eval_script",
        )
    lines = _lines(config, command, test_patch, files, package)
    return Spec(
        own=_own(config, lines, package),
        script=_script(lines),
        base_commit=base,
        test_files=files,
        test_patch=test_patch,
    )


# ── rows with a script ─────────────────────────────────────────────────────────


def _row(instance: Mapping[str, Json], package: Package) -> dict[str, Any]:
    """Check the columns from which the package makes its spec: the package itself does not report what is
    wrong.
    """
    if instance.get("image_assets") not in (None, "", "{}", {}):
        raise Refused(
            "instance.image_assets are fetched from their URLs, which is not done here",
            path=f"{contract.ROOT}.instance.image_assets",
        )
    return {
        "instance_id": text(instance, "instance_id"),
        "image": text(instance, "image", default="-"),
        "repo": text(instance, "repo"),
        "version": text(instance, "version", default="-"),
        "FAIL_TO_PASS": list(names(instance, "FAIL_TO_PASS")),
        "PASS_TO_PASS": list(names(instance, "PASS_TO_PASS")),
        "log_parser": _parser_of(text(instance, "log_parser"), package, "instance.log_parser"),
        "eval_type": _eval_type(text(instance, "eval_type", default=BOTH)),
        "eval_script": text(instance, "eval_script"),
    }


def _eval_type(name: str) -> str:
    if name not in (BOTH, "fail_only"):
        raise Refused(
            f"instance.eval_type is {name!r:.40}: it is {BOTH} or fail_only",
            path=f"{contract.ROOT}.instance.eval_type",
        )
    return name


def _parser_of(parser: str, package: Package, name: str) -> str:
    if parser not in package.parsers:
        raise Refused(
            f"{name} {parser!r:.60} is none of swebench's: {', '.join(sorted(package.parsers))}",
            path=f"{contract.ROOT}.{name}",
        )
    return parser


# ── rows with a test command ───────────────────────────────────────────────────


def _own(config: SwebenchConfig, lines: list[str], package: Package) -> Any:
    instance = config.instance
    return package.test_spec(
        instance_id=text(instance, "instance_id"),
        image=text(instance, "image", default="-"),
        eval_script_list=lines,
        repo=text(instance, "repo"),
        version=text(instance, "version", default="-"),
        FAIL_TO_PASS=list(names(instance, "FAIL_TO_PASS")),
        PASS_TO_PASS=list(names(instance, "PASS_TO_PASS")),
        log_parser=_parser_of(config.log_parser or PYTEST, package, "log_parser"),
        eval_type=BOTH,
    )


def _lines(
    config: SwebenchConfig, command: Command, test_patch: bytes, files: tuple[str, ...], package: Package
) -> list[str]:
    """The script in the package's order: environment, install, then the test between two marks, then its exit
    code.
    """
    tests = (
        command.test
        if config.test_command is not None
        else f"{command.test} {_chosen_tests(command, test_patch, files)}"
    )
    return [
        (
            "if [ -f /opt/miniconda3/bin/activate ]; then set +ux; . /opt/miniconda3/bin/activate; conda"
            " activate testbed; set -ux; fi"
        ),
        f"cd {shlex.quote(config.repo_dir)}",
        *filter(None, [command.before, config.install_command]),
        f": '{package.start}'",
        tests,
        "polarnode_exit_code=$?",
        f": '{package.end}'",
        f'echo "{package.exit_code}: $polarnode_exit_code"',
    ]


def _script(lines: list[str]) -> str:
    return "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"


def _chosen_tests(command: Command, test_patch: bytes, files: tuple[str, ...]) -> str:
    """The tests to run: the files that exist after the test patch, or names of mypy's test cases."""
    if command.cases:
        return shlex.quote(" or ".join(dict.fromkeys(CASES.findall(test_patch.decode("utf-8", "replace")))))
    gone = {path for path, section in patches.sections(test_patch) if b"\ndeleted file mode " in section}
    return shlex.join(path for path in files if path not in gone and not path.endswith(NOT_TEST_SUFFIXES))


# ── evaluation ────────────────────────────────────────────────────────────────

SCRIPT = "/tmp/polarnode-eval/eval.sh"
KINDS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def check(config: Mapping[str, Json]) -> None:
    """Refuse at submission what would fail after the run: a row that cannot be judged, or a node without the
    package.
    """
    read_spec(read_config(config), load())


async def evaluate(finished: Finished) -> Verdict:
    """Return 1.0 if the instance is resolved, else 0.0."""
    config, package = read_config(finished.config), load()
    spec = read_spec(config, package)
    of = _agent_repository(config, spec)
    moved = await patches.carried(finished, of)
    if isinstance(moved, patches.UnusablePatch):
        return _zero_verdict(moved.reason)
    if instead := await patches.paths_not_folders(finished.runtime, of, spec.test_files):
        return _zero_verdict(
            f"something else stands where the instance's tests have a folder: {instead[0][:200]}"
        )
    await finished.prepare()
    await _place_tests(finished.runtime, config, spec)
    # The script belongs to root, so that the tested code cannot rewrite it while bash reads it.
    await finished.runtime.put({SCRIPT: spec.script.encode()}, user="0", mode=0o755)
    ran = await run_script(
        finished.runtime,
        f"bash {SCRIPT}",
        within_s=config.test_timeout,
        user=config.user,
        workdir=config.repo_dir,
    )
    return _verdict(package, spec, ran, moved)


def _zero_verdict(reason: str) -> Verdict:
    return Verdict(reward=0.0, metrics={"resolved": False, "reason": reason})


def _agent_repository(config: SwebenchConfig, spec: Spec) -> patches.Repository:
    return patches.Repository(
        folder=config.repo_dir,
        base=spec.base_commit,
        user=config.user,
        command=config.patch_command,
        exclude=(*config.exclude_patterns, *map(_literal_pattern, spec.test_files)),
        within_s=config.apply_timeout,
    )


def _literal_pattern(path: str) -> str:
    """Return a pattern that matches this path and nothing else."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


async def _place_tests(runtime: Runtime, config: SwebenchConfig, spec: Spec) -> None:
    """Apply the instance's test patch, unless its script does that. The agent's patch names no file of it."""
    if spec.test_patch is None:
        return
    of = patches.Repository(folder=config.repo_dir, user=config.user, within_s=config.apply_timeout)
    placed = await patches.apply(runtime, patches.Patch(content=spec.test_patch), of)
    if isinstance(placed, patches.UnusablePatch):
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
    report = grade_log(package, spec, log)
    resolved = bool(report["resolved"])
    if not resolved and (missing := _missing_program(report, spec.script, log)):
        raise EvaluatorError(f"the instance's tests could not run: {NOT_RUN[127]} ({missing})")
    return Verdict(
        reward=float(resolved), metrics={**metrics, **_report_metrics(report), "resolved": resolved}
    )


# bash's report of a missing program in the instance's script. Reports of other scripts, and of programs that
# are named by a path, do not count, because those may come from the agent's patch.
MISSING_PROGRAM = re.compile(
    rf"^{re.escape(SCRIPT)}: line \d+: (?P<name>[^\s/:]+): command not found$", re.MULTILINE
)


def _missing_program(report: Mapping[str, Any], script: str, log: str) -> str | None:
    """The log's line about a program that the script runs and that was not found; None if a test passed."""
    status = report.get("tests_status") or {}
    if any(status[kind]["success"] for kind in KINDS if kind in status):
        return None
    run = set(script.split())
    return next((each[0][:NAME] for each in MISSING_PROGRAM.finditer(log) if each["name"] in run), None)


def _log(package: Package, ran: ProgramResult) -> str:
    """The log of the tests. If only its end was kept, the first mark is put before it."""
    return (
        f"{package.start}\n{ran.output}" if ran.truncated and package.start not in ran.output else ran.output
    )


def grade_log(package: Package, spec: Spec, log: str) -> Mapping[str, Any]:
    """Return the package's report on a log. The package reads a file, so the log is put into one in
    memory.
    """
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
