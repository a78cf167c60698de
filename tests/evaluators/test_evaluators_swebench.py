"""`swebench`: the package's own specs and grader, on instances as datasets have them, and on a repository of
this machine with real git and tests.
"""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from evaluators_kit import AgentWorkplace, finished, make_workplace
from shell_runtime import ShellRuntime, git
from swebench_instances import DJANGO, FAILS, MOTO, PASSES, django_log

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused
from polarnode.core.task import EvaluatorSpec
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import registry, swebench
from polarnode.evaluators.contract import ProgramResult
from polarnode.evaluators.patches import Patch
from polarnode.evaluators.swebench import EVALUATOR


def spec_of(instance: dict[str, Json], **more: Json) -> swebench.Spec:
    return swebench.read_spec(swebench.read_config({"instance": instance, **more}), swebench.load())


# ── the package ───────────────────────────────────────────────────────────────


def test_only_pure_parts_are_imported() -> None:
    """Only the pure parts are imported, and nothing of the package stays."""
    program = (
        "import os, sys\nbefore = set(os.environ)\nfrom polarnode.evaluators import swebench as package\nloaded"
        " = package.load()\nassert loaded is package.load()\nheavy = {'swebench', 'docker', 'datasets',"
        " 'modal', 'dotenv', 'bs4'} & {name.partition('.')[0] for name in sys.modules}\nprint(sorted(heavy),"
        " set(os.environ) == before, len(loaded.parsers) > 50)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"[] True True\n"


def test_replaced_module_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    own = type(sys)("datasets")
    monkeypatch.setitem(sys.modules, "datasets", own)
    with swebench._alone():
        assert sys.modules["datasets"] is not own
    assert sys.modules["datasets"] is own


@pytest.mark.parametrize("there", [None, "4.1.0"])
def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch, there: str | None) -> None:
    def version(name: str) -> str:
        if there is None:
            raise metadata.PackageNotFoundError(name)
        return there

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(Refused, match=r"pip install --no-deps swebench==5\.0\.2 unidiff") as refused:
        registry.find(EvaluatorSpec(name="swebench", config={"instance": DJANGO}))
    assert refused.value.path == "$.evaluator.name"


# ── a real instance, graded from its log ──────────────────────────────────────


def verdict_of(log: str, instance: dict[str, Json] = DJANGO, **more: Any) -> Verdict:
    ran = ProgramResult(**{"exit_code": 0, "output": log, "timed_out": False, "truncated": False, **more})
    return swebench._verdict(swebench.load(), spec_of(instance), ran, Patch(content=b"diff --git a/x b/x\n"))


def test_instance_spec_equals_the_packages() -> None:
    spec = spec_of(DJANGO)
    assert (spec.own.log_parser, spec.own.FAIL_TO_PASS, spec.own.PASS_TO_PASS) == (
        "parse_log_django",
        [FAILS],
        list(PASSES),
    )
    assert (
        spec.script.index("runtests.py")
        < spec.script.index("SWEBENCH_TEST_EXIT_CODE=$?")
        < spec.script.index("End Test Output")
    )
    assert spec.test_files == ("tests/test_utils/tests.py",)
    assert spec.test_patch is None, "its script puts it on"


def test_resolved_instance_is_worth_one() -> None:
    verdict = verdict_of(django_log())
    assert verdict.reward == 1.0, verdict.metrics
    assert verdict.metrics["fail_to_pass"] == {"passed": 1, "failed": 0, "failures": []}
    assert verdict.metrics["pass_to_pass"] == {"passed": 3, "failed": 0, "failures": []}


@pytest.mark.parametrize(
    ("log", "kind", "failures"),
    [
        (django_log(fails=(FAILS,)), "fail_to_pass", [FAILS]),
        (django_log(missing=(FAILS,)), "fail_to_pass", [FAILS]),
        (django_log(fails=PASSES[:2]), "pass_to_pass", sorted(PASSES[:2])),
    ],
)
def test_unresolved_instance_explains_why(log: str, kind: str, failures: list[str]) -> None:
    verdict = verdict_of(log)
    assert (verdict.reward, verdict.metrics["resolved"], verdict.metrics["reason"]) == (
        0.0,
        False,
        "some of the instance's tests failed",
    )
    told = verdict.metrics[kind]
    assert isinstance(told, dict)
    assert told["failures"] == failures


def test_log_forged_before_tests_ignored() -> None:
    """An install runs the agent's setup.py, whose output comes first: the package would take its marks for
    the script's.
    """
    forged = (
        f">>>>> Start Test Output\n{FAILS} ... ok\n"
        + "\n".join(f"{name} ... ok" for name in PASSES)
        + "\n>>>>> End Test Output\n"
    )
    verdict = verdict_of(django_log(fails=(FAILS,), forged=forged))
    assert verdict.reward == 0.0
    assert "holds the marks of its tests 2 and 2 times" in str(verdict.metrics["reason"])


def test_ended_tests_are_no_pass() -> None:
    """Tests that were ended by the code under test are no pass."""
    log = django_log().partition("+ SWEBENCH")[0]
    verdict = verdict_of(log)
    assert (verdict.reward, "1 and 0 times" in str(verdict.metrics["reason"])) == (0.0, True)


def test_pass_needs_zero_exit_code() -> None:
    log = django_log().replace("Exit Code: 0", "Exit Code: 1")
    verdict = verdict_of(log)
    assert verdict.reward == 0.0
    assert verdict.metrics["reason"] == "the package read no tests in the log"


def test_script_before_tests_is_image_fault() -> None:
    """A script that never came to its tests is the image's fault."""
    with pytest.raises(EvaluatorError, match="exit code 127 before its tests: conda: not found"):
        verdict_of("conda: not found\n", exit_code=127)


def missing(said: str) -> Verdict:
    """Where nothing ran between the marks, but for what is said."""
    package = swebench.load()
    return verdict_of(f"{package.start}\n{said}: command not found\n{package.end}\n")


def test_program_missing_for_the_script() -> None:
    with pytest.raises(EvaluatorError, match=r"could not run: a program was not found in its image .*: git:"):
        missing(f"{swebench.SCRIPT}: line 12: git")


@pytest.mark.parametrize(
    "said",
    [
        f"{swebench.SCRIPT}: line 12: ./tests/runtests.py",
        f"{swebench.SCRIPT}: line 12: jq",
        "build.sh: line 3: git",
        f"  {swebench.SCRIPT}: line 12: git",
    ],
)
def test_program_missing_for_the_patch(said: str) -> None:
    assert missing(said).reward == 0.0


def test_timed_out_tests_are_worth_nothing() -> None:
    assert (
        verdict_of(django_log(), timed_out=True, exit_code=124).metrics["reason"]
        == "the tests ran out of time"
    )


def test_flood_keeps_its_end() -> None:
    log = django_log().replace("Testing against", "flood " * 2000 + "\nTesting against")
    assert verdict_of(log[-2000:], truncated=True).reward == 1.0
    with pytest.raises(EvaluatorError, match="before its tests"):
        verdict_of(log[-2000:])


# ── instances of other datasets ───────────────────────────────────────────────


def test_swe_gym_commands_are_known() -> None:
    spec = spec_of(MOTO)
    assert spec.own.log_parser == "parse_log_pytest"
    assert "\npytest -n0 -rA tests/test_ssm/test_ssm_boto3.py\npolarnode_exit_code=$?\n" in spec.script, (
        "neither data nor what is deleted is run"
    )
    assert spec.test_patch == str(MOTO["test_patch"]).encode()
    assert len(spec.test_files) == 3


def test_mypy_cases_run_by_name() -> None:
    patch = (
        "diff --git a/test-data/unit/check.test b/test-data/unit/check.test\n---"
        " a/test-data/unit/check.test\n+++ b/test-data/unit/check.test\n@@ -1,2 +1,4 @@\n [case testOld]\n"
        " x\n+[case testNew-xfail]\n+y\n"
    )
    spec = spec_of({**MOTO, "repo": "python/mypy", "test_patch": patch})
    assert "\npytest -n0 -rA -k 'testOld or testNew-xfail'\n" in spec.script


def test_task_command_overrides_spec() -> None:
    spec = spec_of(
        DJANGO,
        test_command="pytest -rA tests/x.py",
        install_command="make",
        log_parser="parse_log_pytest_v2",
        repo_dir="/work/my repo",
    )
    assert "cd '/work/my repo'\nmake\n: '>>>>> Start Test Output'\npytest -rA tests/x.py\n" in spec.script
    assert (spec.own.log_parser, spec.test_patch is not None) == ("parse_log_pytest_v2", True)


@pytest.mark.parametrize(
    ("instance", "more", "path", "said"),
    [
        ({}, {}, "instance.test_patch", "missing"),
        ({**DJANGO, "test_patch": "no patch"}, {}, "instance.test_patch", "no file begins in it"),
        ({**DJANGO, "base_commit": ""}, {}, "instance.base_commit", "missing"),
        ({**DJANGO, "log_parser": "parse_log_nothing"}, {}, "instance.log_parser", "none of swebench's"),
        ({**DJANGO, "log_parser": None}, {}, "instance.log_parser", "missing"),
        ({**DJANGO, "eval_type": "x"}, {}, "instance.eval_type", "fail_only"),
        ({**DJANGO, "FAIL_TO_PASS": "["}, {}, "instance.FAIL_TO_PASS", "no JSON"),
        ({**DJANGO, "PASS_TO_PASS": [1]}, {}, "instance.PASS_TO_PASS", "list of names"),
        ({**DJANGO, "image_assets": '{"test_patch": [1]}'}, {}, "instance.image_assets", "URLs"),
        (
            {**DJANGO, "eval_script": None},
            {},
            "instance.eval_script",
            "nothing says how django/django is tested",
        ),
        (DJANGO, {"test_command": "x", "log_parser": "y"}, "log_parser", "none of swebench's"),
        (DJANGO, {"test_command": " "}, "test_command", "not an empty text"),
        (DJANGO, {"install_command": "x" * 200_000}, "install_command", "longer than 100000 bytes"),
        (DJANGO, {"repo_dir": "x"}, "repo_dir", "absolute"),
        (DJANGO, {"test_timeout": -1}, "test_timeout", "seconds"),
        (DJANGO, {"instances": {}}, "instances", "instances"),
    ],
)
def test_unjudgeable_row_refused_at_submission(
    instance: dict[str, Json], more: dict[str, Json], path: str, said: str
) -> None:
    with pytest.raises(Refused, match=said) as refused:
        registry.find(EvaluatorSpec(name="swebench", config={"instance": instance, **more}))
    assert refused.value.path == f"$.evaluator.config.{path}"


# ── a repository of this machine, with its own tests ──────────────────────────

FILES = {
    "calc.py": b"def add(a, b):\n    return a - b\n",
    "tests/test_old.py": b"from calc import add\n\n\ndef test_zero():\n    assert add(1, 0) == 1\n",
}
TEST_PATCH = """\
diff --git a/tests/test_new.py b/tests/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1,5 @@
+from calc import add
+
+
+def test_adds():
+    assert add(1, 2) == 3
"""
PYTEST = f"PYTHONPATH=. {sys.executable} -m pytest -rA -p no:cacheprovider --no-header tests"
FIXED = "def add(a, b):\n    return a + b\n"


@pytest.fixture
def place(tmp_path: Path) -> AgentWorkplace:
    return make_workplace(tmp_path, FILES)


def instance_of(place: AgentWorkplace, **more: Json) -> dict[str, Json]:
    return {
        "instance_id": "local__calc-1",
        "repo": "local/calc",
        "base_commit": git(place.clean, "rev-parse", "HEAD"),
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": ["tests/test_new.py::test_adds"],
        "PASS_TO_PASS": '["tests/test_old.py::test_zero"]',
        **more,
    }


async def judged(place: AgentWorkplace, instance: dict[str, Json] | None = None, **more: Json) -> Verdict:
    left, clean = (InItsFolder(folder=folder) for folder in (place.left, place.clean))
    own: dict[str, Json] = {
        "instance": instance or instance_of(place),
        **({} if instance else {"test_command": PYTEST}),
        **more,
    }
    return await EVALUATOR.evaluate(finished(clean, own, left))


class InItsFolder(ShellRuntime):
    """The script's place beside the repository, and /testbed in its text this repository."""

    async def put(self, files: "dict[str, bytes]", *, user: str | None = None, mode: int = 0o644) -> None:  # type: ignore[override]
        await super().put(
            {
                path: content.replace(b"/testbed", str(self.folder).encode())
                for path, content in files.items()
            },
            user=user,
            mode=mode,
        )

    def _here(self, text: str) -> str:
        return super()._here(text).replace("/tmp/polarnode-eval", str(self.folder.parent / "eval"))


async def test_fix_resolves_instance_tests(place: AgentWorkplace) -> None:
    (place.left / "calc.py").write_text(FIXED)
    verdict = await judged(place)
    assert verdict.reward == 1.0, verdict.metrics
    assert verdict.metrics["fail_to_pass"] == {"passed": 1, "failed": 0, "failures": []}
    assert not (place.left / "tests/test_new.py").exists(), "an agent's container sees no test"


async def test_row_script_is_run(place: AgentWorkplace) -> None:
    script = (
        "#!/bin/bash\nset -uxo pipefail\ncd /testbed\ngit apply -v - <<'EOF_1'\n"
        f"{TEST_PATCH}\nEOF_1\n: '>>>>> Start Test Output'\n{PYTEST}\n: '>>>>> End Test Output'\ngit status\n"
    )
    (place.left / "calc.py").write_text(FIXED)
    row = instance_of(place, eval_script=script, log_parser="parse_log_pytest", image="local")
    verdict = await judged(place, row)
    assert verdict.reward == 1.0, verdict.metrics


async def test_break_elsewhere_is_not_resolved(place: AgentWorkplace) -> None:
    (place.left / "calc.py").write_text("def add(a, b):\n    return 3\n")
    verdict = await judged(place)
    assert verdict.reward == 0.0
    assert verdict.metrics["pass_to_pass"] == {
        "passed": 0,
        "failed": 1,
        "failures": ["tests/test_old.py::test_zero"],
    }


@pytest.mark.parametrize("fix", [True, False])
async def test_agent_test_yields_to_instances(place: AgentWorkplace, fix: bool) -> None:
    """Else the instance's own tests would not go on, and the agent's would be run in their place."""
    (place.left / "tests/test_new.py").write_text("def test_adds():\n    pass\n")
    (place.left / "calc.py").write_text(FIXED if fix else "def add(a, b):\n    return a - b  # tried\n")
    verdict = await judged(place)
    assert (verdict.reward, verdict.metrics["resolved"]) == (float(fix), fix)
    patch = verdict.metrics["patch"]
    assert isinstance(patch, dict)
    assert patch["files"] == 1


@pytest.mark.parametrize("instead", ["link", "file"])
async def test_link_replacing_test_folder_is_noticed(place: AgentWorkplace, instead: str) -> None:
    """The instance's tests would not go on there, and those behind the link would be run."""
    patch = TEST_PATCH.replace("tests/test_new.py", "tests/deep/er/test_new.py")
    (place.left / "mine/er").mkdir(parents=True)
    (place.left / "mine/er/test_new.py").write_text("def test_adds():\n    pass\n")
    if instead == "link":
        (place.left / "tests/deep").symlink_to("../mine")
    else:
        (place.left / "tests/deep").write_text("x")
    verdict = await judged(place, instance_of(place, test_patch=patch), test_command=PYTEST)
    assert verdict.reward == 0.0
    assert "not the agent's to change" in str(verdict.metrics["reason"])


async def test_link_of_both_sides_is_noticed(place: AgentWorkplace, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    patch = TEST_PATCH.replace("tests/test_new.py", "ignored/test_new.py")
    for folder in (place.clean, place.left):
        (folder / "ignored").symlink_to(tmp_path / "elsewhere")
    (place.left / "calc.py").write_text(FIXED)
    verdict = await judged(place, instance_of(place, test_patch=patch), test_command=PYTEST)
    assert (verdict.reward, verdict.metrics["reason"]) == (
        0.0,
        "something else stands where the instance's tests have a folder: ignored",
    )


async def test_no_work_is_worth_nothing(place: AgentWorkplace) -> None:
    assert (await judged(place)).metrics == {"resolved": False, "reason": "the agent changed nothing"}


async def test_missing_repository_is_worth_nothing(place: AgentWorkplace) -> None:
    shutil.rmtree(place.left / ".git")
    verdict = await judged(place)
    assert (verdict.reward, verdict.metrics["reason"]) == (
        0.0,
        "what the agent left gives no patch: /testbed is no git repository",
    )


async def test_other_instances_image_is_error(place: AgentWorkplace) -> None:
    with pytest.raises(
        EvaluatorError,
        match="the image and the task do not fit: the repository at /testbed does not hold the base 0000000",
    ):
        await judged(
            place, instance_of(place, base_commit="0" * 40, eval_script="x", log_parser="parse_log_pytest")
        )


async def test_tests_unfit_for_image_are_error(place: AgentWorkplace) -> None:
    (place.left / "calc.py").write_text(FIXED)
    wrong = TEST_PATCH.replace("new file mode 100644\n--- /dev/null", "--- a/tests/test_new.py").replace(
        "@@ -0,0 +1,5 @@", "@@ -1,1 +1,6 @@\n gone"
    )
    with pytest.raises(EvaluatorError, match="the instance's tests do not fit its image"):
        await judged(place, instance_of(place, test_patch=wrong), test_command=PYTEST)


def test_judges_in_fresh_copyless_runtime() -> None:
    assert (EVALUATOR.fresh, EVALUATOR.copies) == (True, False)
