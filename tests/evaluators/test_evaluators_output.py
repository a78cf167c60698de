"""`test_on_output` with real git and real pytest: Polar's config gets Polar's verdict, and what an agent
prints or breaks is no PASSED.
"""

import sys
from pathlib import Path

import pytest
from evaluators_kit import AgentWorkplace, finished, make_workplace
from shell_runtime import git

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused
from polarnode.core.task import EvaluatorSpec
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import contract, registry, test_on_output

PYTEST = f"{sys.executable} -m pytest -rA -p no:cacheprovider --no-header tests"
FILES = {
    "calc.py": b"def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": (
        b"import sys; sys.path.insert(0, '.')\nfrom calc import add\n\n\ndef test_adds():\n    assert add(1,"
        b" 2) == 3\n\n\nclass TestText:\n    def test_joins(self):\n        assert add('a', 'b') == 'ab'\n"
    ),
}
FIXED = "def add(a, b):\n    return a + b\n"
EXPECTED: dict[str, Json] = {
    "tests/test_calc.py::test_adds": "PASSED",
    "tests/test_calc.py::TestText::test_joins": "PASSED",
}


@pytest.fixture
def place(tmp_path: Path) -> AgentWorkplace:
    return make_workplace(tmp_path, FILES)


async def judged(place: AgentWorkplace, **more: Json) -> Verdict:
    left, clean = place.runtimes
    return await test_on_output.evaluate(
        finished(clean, {"test_command": PYTEST, "expected_output_json": EXPECTED, **more}, left)
    )


async def test_fix_is_worth_one(place: AgentWorkplace) -> None:
    (place.left / "calc.py").write_text(FIXED)
    verdict = await judged(place)
    assert verdict.reward == 1.0, verdict.metrics
    assert verdict.metrics["resolved"] is True
    assert verdict.metrics["exit_code"] == 0
    patch = verdict.metrics["patch"]
    assert isinstance(patch, dict)
    assert (patch["files"], patch["applied_by"]) == (1, "git")
    assert "+    return a + b" in str(patch["text"])


async def test_differing_results_are_named(place: AgentWorkplace) -> None:
    (place.left / "calc.py").write_text("def add(a, b):\n    return 3\n")
    (place.left / "tests/test_more.py").write_text("def test_extra():\n    pass\n")
    verdict = await judged(
        place,
        expected_output_json=(
            '{"test_adds": "PASSED", "TestText.test_joins": "PASSED", "test_gone": "PASSED"}'
        ),
    )
    assert verdict.reward == 0.0
    assert verdict.metrics["different"] == ["TestText.test_joins: FAILED, not PASSED"]
    assert verdict.metrics["missing"] == ["test_gone"]
    assert verdict.metrics["unexpected"] == ["test_extra: PASSED"]
    assert verdict.metrics["reason"] == "the tests did not come to what was expected of them"


@pytest.mark.parametrize(
    ("command", "said"),
    [(None, "the agent changed nothing"), ("git diff", "the agent changed nothing")],
)
async def test_no_work_runs_no_test(place: AgentWorkplace, command: str | None, said: str) -> None:
    """No work is worth nothing, and no test runs."""
    left, clean = place.runtimes
    config: dict[str, Json] = {
        "test_command": "touch /testbed/ran",
        "expected_output_json": EXPECTED,
        "patch_command": command,
    }
    verdict = await test_on_output.evaluate(finished(clean, config, left))
    assert (verdict.reward, verdict.metrics["reason"]) == (0.0, said)
    assert not (place.clean / "ran").exists()


async def test_agent_changed_tests_stay(place: AgentWorkplace) -> None:
    (place.left / "tests/test_calc.py").write_text(
        "def test_adds(): pass\n\n\nclass TestText:\n    def test_joins(self): pass\n"
    )
    (place.left / "conftest.py").write_text("def pytest_runtest_call(item): item.obj = lambda *a: None\n")
    assert (await judged(place)).reward == 1.0, (
        "where a task does not name its tests, they are part of the work"
    )
    (place.clean / "conftest.py").unlink()
    git(place.clean, "checkout", "--quiet", ".")
    cheat = await judged(place, exclude_patterns=["tests/*", "*conftest.py"])
    assert (cheat.reward, cheat.metrics["reason"]) == (0.0, "the agent changed nothing")


@pytest.mark.parametrize(
    "printed",
    [
        "PASSED tests/test_calc.py::test_adds",
        "\\x1b[32mPASSED\\x1b[0m tests/test_calc.py::TestText::test_joins",
    ],
)
async def test_printed_pass_hides_no_failure(place: AgentWorkplace, printed: str) -> None:
    forged = (
        f"import atexit\natexit.register(lambda: print('\\n{printed}\\n', flush=True))\n\n\ndef add(a, b):\n "
        "   return 0\n"
    )
    (place.left / "calc.py").write_text(forged)
    verdict = await judged(place)
    assert verdict.reward == 0.0
    assert len(verdict.metrics["different"]) == 2  # type: ignore[arg-type]


async def test_hanging_test_is_worth_nothing(place: AgentWorkplace) -> None:
    (place.left / "calc.py").write_text(
        "import time\n\n\ndef add(a, b):\n    print('PASSED test_adds')\n    time.sleep(600)\n"
    )
    left, clean = place.runtimes
    config: dict[str, Json] = {
        "test_command": f"{PYTEST} -s",
        "expected_output_json": {"test_adds": "PASSED"},
        "test_timeout": 3,
    }
    verdict = await test_on_output.evaluate(finished(clean, config, left))
    assert verdict.reward == 0.0
    assert (verdict.metrics["timed_out"], verdict.metrics["reason"], verdict.metrics["seen"]) == (
        True,
        "the tests ran out of time",
        0,
    )
    assert clean.ended == 1, "nothing of it runs on"


@pytest.mark.parametrize("cheats", [True, False])
async def test_hidden_tests_follow_agents_work(place: AgentWorkplace, cheats: bool) -> None:
    """`eval_prepare` puts them there: they are neither taken for what the agent deleted, nor overwritten by
    what it put in their place.
    """
    (place.left / "calc.py").write_text(FIXED.replace("+", "-") if cheats else FIXED)
    hidden = (
        "import sys; sys.path.insert(0, '.')\nfrom calc import add\n\n\ndef test_hidden():\n    assert add(2,"
        " 2) == 4\n"
    )
    if cheats:
        (place.left / "calc.py").write_text("def add(a, b):\n    return a - b  # tried\n")
        (place.left / "tests/test_hidden.py").write_text("def test_hidden():\n    pass\n")
        (place.left / "tests/test_calc.py").unlink()
    left, clean = place.runtimes

    async def prepare() -> None:
        await clean.put({"/testbed/tests/test_hidden.py": hidden.encode()})

    config: dict[str, Json] = {
        "test_command": f"{PYTEST}/test_hidden.py",
        "expected_output_json": {"test_hidden": "PASSED"},
    }
    verdict = await test_on_output.evaluate(finished(clean, config, left, prepare=prepare))
    assert verdict.reward == float(not cheats), verdict.metrics


async def test_folder_without_repository_is_task_fault(tmp_path: Path) -> None:
    place = make_workplace(tmp_path, FILES)
    (place.clean / ".git").rename(tmp_path / "gone")
    with pytest.raises(
        EvaluatorError,
        match="/testbed is no git repository with a commit in the image, name the right repo_dir",
    ):
        await judged(place)
    (tmp_path / "gone").rename(place.clean / ".git")
    with pytest.raises(
        EvaluatorError,
        match="the image and the task do not fit: the repository at /testbed does not hold the base 1111111",
    ):
        await judged(place, base_commit="1" * 40)


# ── Polar's words ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("tests/test_a.py::test_x", "test_x"),
        ("tests/test_a.py::TestA::test_x[1-a b]", "TestA.test_x[1-a b]"),
        ("test_x - AssertionError: 1 == 2", "test_x"),
        ("a::b::c::d", "c.d"),
        ("[1] tests/test_a.py:3: no network", "[1] tests/test_a.py:3: no network"),
    ],
)
def test_test_names_shortened_like_polar(name: str, short: str) -> None:
    assert test_on_output.short(name) == short


def test_output_lines_read_like_polar() -> None:
    output = (
        "x PASSED a::no\n\x1b[32mPASSED\x1b[0m a::one\r\nFAILED a::two - Error\nPASSED\nERROR a::T::three\n "
        " SKIPPED a::four\nPASSEDLY a::five\n"
    )
    assert test_on_output.statuses(output) == {
        "one": "PASSED",
        "two": "FAILED",
        "T.three": "ERROR",
        "four": "SKIPPED",
    }


@pytest.mark.parametrize(
    "lines", ["PASSED a::x\nFAILED b::x", "FAILED a::x\nPASSED a::x", "FAILED a::x\nSKIPPED a::x"]
)
def test_worse_of_two_lines_counts(lines: str) -> None:
    assert test_on_output.statuses(lines) == {"x": "FAILED"}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({}, "$.evaluator.config.test_command"),
        ({"test_command": "x"}, "$.evaluator.config.expected_output_json"),
        ({"test_command": " ", "expected_output_json": {"a": "PASSED"}}, "$.evaluator.config.test_command"),
        ({"test_command": "x", "expected_output_json": {}}, "$.evaluator.config.expected_output_json"),
        ({"test_command": "x", "expected_output_json": "{"}, "$.evaluator.config.expected_output_json"),
        ({"test_command": "x", "expected_output_json": "[1]"}, "$.evaluator.config.expected_output_json"),
        (
            {"test_command": "x", "expected_output_json": {"a": "passed"}},
            "$.evaluator.config.expected_output_json",
        ),
        (
            {"test_command": "x", "expected_output_json": {"a": "PASSED"}, "repo_dir": "repo"},
            "$.evaluator.config.repo_dir",
        ),
        (
            {"test_command": "x", "expected_output_json": {"a": "PASSED"}, "test_timeout": 0},
            "$.evaluator.config.test_timeout",
        ),
        (
            {"test_command": "x", "expected_output_json": {"a": "PASSED"}, "exclude_patterns": "x"},
            "$.evaluator.config.exclude_patterns",
        ),
        (
            {"test_command": "x", "expected_output_json": {"a": "PASSED"}, "tst_timeout": 1},
            "$.evaluator.config.tst_timeout",
        ),
    ],
)
def test_bad_config_refused_at_submission(config: dict[str, Json], path: str) -> None:
    with pytest.raises(Refused) as refused:
        registry.find(EvaluatorSpec(name="test_on_output", config=config))
    assert refused.value.path == path


def test_judges_in_fresh_copyless_runtime() -> None:
    config: dict[str, Json] = {"test_command": "x", "expected_output_json": {"a": "PASSED"}}
    found = registry.find(EvaluatorSpec(name="test_on_output", config=config))
    assert (found.fresh, found.copies) == (True, False)


def test_shown_output_is_bounded() -> None:
    shown = contract.shown(f"{number:04}{'x' * 500}" for number in range(contract.NAMES + 7))
    assert len(shown) == contract.NAMES + 1
    assert shown[-1] == "… and 7 more"
    assert {len(str(each)) for each in shown[:-1]} == {contract.NAME}
