"""How an instance is tested: the script its row brings, or one made of a test command.

Rows of swebench 5 bring `eval_script` and `log_parser`, and the package makes its spec of them. Others (SWE-Gym, one's own) have a command:
the task's, or the one SWE-Gym's own fork of the package runs for that repository. The rule for whoever edits it: what tests are, the row says;
a test file never comes from the agent.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.evaluators import patch_sections, settings
from polarnode.evaluators.swebench.config import SwebenchConfig, names, text
from polarnode.evaluators.swebench.package import Package

NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")  # swebench's: what a runner is not given
PYTEST = "parse_log_pytest"
BOTH = "pass_and_fail"  # every test's status is looked for; the package's other way takes silence for success
CASES: Final = re.compile(r"\[case ([^\]\s]+)\]")


@frozen(kw_only=True)
class Command:
    """A repository's test command. `cases`: it is given names of mypy's cases instead of files."""

    test: str
    before: str = ""
    cases: bool = False


# What SWE-Gym's fork of the package runs, by repository in lower case; all are read as pytest prints. Its installs reach for the network and
# are left out but for what compiles: the images are installed already.
SWE_GYM: Final[Mapping[str, Command]] = {
    "getmoto/moto": Command(test="pytest -n0 -rA"),
    "python/mypy": Command(test="pytest -n0 -rA -k", cases=True),
    "conan-io/conan": Command(test="pytest -n0 -rA", before='export PYTHONPATH="${PYTHONPATH:-}:$(pwd)"'),
    "dask/dask": Command(test="pytest -n0 -rA --color=no"),
    "project-monai/monai": Command(test="pytest -rA"),
    "iterative/dvc": Command(test="pytest -rA"),
    "bokeh/bokeh": Command(test="pytest -rA -n0"),
    "modin-project/modin": Command(test="pytest -n0 -rA"),
    "pydantic/pydantic": Command(test="pytest -rA --tb=short -vv -o console_output_style=classic --no-header"),
    "pandas-dev/pandas": Command(test="pytest -rA --tb=long", before="python -m pip install -ve . --no-build-isolation -Ceditable-verbose=true"),
    "facebookresearch/hydra": Command(test="pytest -rA --tb=long"),
}


@frozen(kw_only=True)
class Spec:
    """One instance, ready to be judged. `test_patch` is put on before `script` runs, where the script does not do it itself.

    `own` is the package's TestSpec; `test_files` are the paths that the test patch names, which are never the agent's.
    """

    own: Any
    script: str
    base_commit: str
    test_files: tuple[str, ...]
    test_patch: bytes | None = None


def read_spec(config: SwebenchConfig, package: Package) -> Spec:
    """The instance's spec. Refused where neither its row nor the task says how it is tested."""
    instance = config.instance
    test_patch = text(instance, "test_patch").encode()
    files = patch_sections.paths(test_patch)
    if not files:
        raise Refused("instance.test_patch is no patch in git's format: no file begins in it", path=f"{settings.ROOT}.instance.test_patch")
    base, repo = text(instance, "base_commit"), text(instance, "repo")
    if config.test_command is None and instance.get("eval_script"):
        own = package.make_test_spec(_row(instance, package))
        return Spec(own=own, script=own.eval_script, base_commit=base, test_files=files)
    command = Command(test=config.test_command) if config.test_command is not None else SWE_GYM.get(repo.lower())
    if command is None:
        raise Refused(
            f"nothing says how {repo} is tested: take the dataset's rows of swebench 5, which have eval_script and log_parser, or give a test_command",
            path=f"{settings.ROOT}.instance.eval_script",
        )
    lines = _lines(config, command, test_patch, files, package)
    return Spec(own=_own(config, lines, package), script=_script(lines), base_commit=base, test_files=files, test_patch=test_patch)


# ── a row that brings its script ──────────────────────────────────────────────


def _row(instance: Mapping[str, Json], package: Package) -> dict[str, Any]:
    """What the package makes its spec of, looked at first: it does not say what is wrong with a row."""
    if instance.get("image_assets") not in (None, "", "{}", {}):
        raise Refused("instance.image_assets are fetched from their URLs, which is not done here", path=f"{settings.ROOT}.instance.image_assets")
    return {
        "instance_id": text(instance, "instance_id"),
        "image": text(instance, "image", default="-"),
        "repo": text(instance, "repo"),
        "version": text(instance, "version", default="-"),
        "FAIL_TO_PASS": list(names(instance, "FAIL_TO_PASS")),
        "PASS_TO_PASS": list(names(instance, "PASS_TO_PASS")),
        "log_parser": _known(text(instance, "log_parser"), package, "instance.log_parser"),
        "eval_type": _eval_type(text(instance, "eval_type", default=BOTH)),
        "eval_script": text(instance, "eval_script"),
    }


def _eval_type(name: str) -> str:
    if name not in (BOTH, "fail_only"):
        raise Refused(f"instance.eval_type is {name!r:.40}: it is {BOTH} or fail_only", path=f"{settings.ROOT}.instance.eval_type")
    return name


def _known(parser: str, package: Package, name: str) -> str:
    if parser not in package.parsers:
        raise Refused(f"{name} {parser!r:.60} is none of swebench's: {', '.join(sorted(package.parsers))}", path=f"{settings.ROOT}.{name}")
    return parser


# ── a command ─────────────────────────────────────────────────────────────────


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
        log_parser=_known(config.log_parser or PYTEST, package, "log_parser"),
        eval_type=BOTH,
    )


def _lines(config: SwebenchConfig, command: Command, test_patch: bytes, files: tuple[str, ...], package: Package) -> list[str]:
    """The package's own order: its environment, an install, then between two marks the test; its exit code behind them."""
    tests = command.test if config.test_command is not None else f"{command.test} {_chosen(command, test_patch, files)}"
    return [
        "if [ -f /opt/miniconda3/bin/activate ]; then set +ux; . /opt/miniconda3/bin/activate; conda activate testbed; set -ux; fi",
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


def _chosen(command: Command, test_patch: bytes, files: tuple[str, ...]) -> str:
    """Which tests are run: the files that the test patch leaves there, or mypy's cases by name."""
    if command.cases:
        return shlex.quote(" or ".join(dict.fromkeys(CASES.findall(test_patch.decode("utf-8", "replace")))))
    gone = {path for path, section in patch_sections.sections(test_patch) if b"\ndeleted file mode " in section}
    return shlex.join(path for path in files if path not in gone and not path.endswith(NO_TESTS))
