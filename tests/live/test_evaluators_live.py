"""Evaluators from files in a whole node: a repository that the task makes, an agent that works in it, tests
it never saw.
"""

from typing import Any

import pytest
from live_kit import ServingNode

pytestmark = [pytest.mark.podman, pytest.mark.engine]

REPO = "/work/repo"
MAKE = (
    f"mkdir -p {REPO}/tests; cd {REPO}; printf 'def add(a, b):\\n    return a - b\\n' > calc.py; git init -q;"
    " git add -A; git commit -qm one"
)
FIX = (
    f"cd {REPO}; sed -i 's/a - b/a + b/' calc.py; git add -A; git commit -qm mine; printf 'print()' >"
    " untracked.py"
)
BREAK = f"cd {REPO}; echo x > y; mkdir -p /tmp/mine; setsid -f sleep 4201991"
HIDDEN = (
    "import sys\nsys.path.insert(0, '.')\nfrom calc import add\nprint('PASSED' if add(1, 2) == 3 else"
    " 'FAILED', 'test_adds')\n"
)
HIDE = ["sh", "-c", f"printf '%s' \"$1\" > {REPO}/tests/hidden.py", "sh", HIDDEN]
HARBOR = {
    "test.sh": (
        f"cd {REPO}; python3 /tests/hidden.py | grep -q PASSED; echo $((1 - $?)) > /logs/verifier/reward.txt"
    ),
    "hidden.py": HIDDEN,
}
TEST_PATCH = (
    "diff --git a/tests/new.py b/tests/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/tests/new.py\n@@"
    f" -0,0 +1,{HIDDEN.count(chr(10))} @@\n"
)


def task(script: str, evaluator: dict[str, Any]) -> dict[str, Any]:
    return {
        "instruction": "Make add() add.",
        "harness": {"name": "shell", "command": ["sh", "-c", script]},
        "runtime": {"prepare": [{"argv": ["sh", "-c", MAKE]}], "eval_prepare": [{"argv": HIDE}]},
        "evaluator": evaluator,
    }


EVALUATORS: dict[str, dict[str, Any]] = {
    "test_on_output": {
        "config": {
            "test_command": "python3 tests/hidden.py",
            "expected_output_json": {"test_adds": "PASSED"},
            "repo_dir": REPO,
        },
    },
    "harbor": {"config": {"tests": HARBOR}},
    "harbor, fresh": {"config": {"tests": HARBOR}, "fresh_runtime": True},
    "command": {
        "config": {"script": f"cd {REPO} && python3 tests/hidden.py | grep PASSED"},
        "fresh_runtime": True,
    },
    "swebench": {
        "config": {
            "instance": {
                "instance_id": "local__calc-1",
                "repo": "local/calc",
                "base_commit": "HEAD",
                "test_patch": TEST_PATCH + "".join(f"+{line}\n" for line in HIDDEN.splitlines()),
                "FAIL_TO_PASS": ["test_adds"],
                "PASS_TO_PASS": [],
            },
            "test_command": "python3 tests/new.py",
            "repo_dir": REPO,
        }
    },
}


@pytest.fixture(scope="module")
def sessions(node: ServingNode) -> dict[str, tuple[str, str]]:
    """All at once: an agent that solves it and one that does not, for each evaluator."""
    found = {}
    for name, more in EVALUATORS.items():
        evaluator = {"name": name.partition(",")[0], **more}
        found[name] = (node.submit(**task(FIX, evaluator))[0], node.submit(**task(BREAK, evaluator))[0])
    return found


@pytest.mark.parametrize("name", EVALUATORS)
def test_evaluators_reward_only_fixed_work(
    node: ServingNode, sessions: dict[str, tuple[str, str]], name: str
) -> None:
    fixed, broken = (node.finished(session_id) for session_id in sessions[name])
    assert (fixed.reward, fixed.outcome.status) == (1.0, "completed"), (fixed.outcome, fixed.metrics)
    assert (broken.reward, broken.outcome.status) == (0.0, "completed"), (broken.outcome, broken.metrics)
