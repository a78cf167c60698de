"""A suggestion is made where it is likely, and not otherwise."""

import pytest

from polarnode.core.codec import read_task
from polarnode.core.errors import Refused
from polarnode.core.spelling import nearest, remedy


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("harnes", ("harness", "instruction"), "harness"),
        ("nun_samples", ("num_samples", "harness"), "num_samples"),
        ("run", ("run_s", "init_s"), "run_s"),
        ("clade_code", ("claude_code", "codex"), "claude_code"),
        ("rewrd", ("reward", "turns"), "reward"),
        ("sevre", ("serve", "merge"), "serve"),
        ("serve", ("merge", "watch"), None),
        ("arrays", ("carry", "runtime"), None),
        ("x" * 1000, ("x" * 999,), None),
    ],
)
def test_nearest_name_is_suggested(name: str, known: tuple[str, ...], meant: str | None) -> None:
    assert nearest(name, known) == meant


def test_all_names_follow_the_nearest() -> None:
    assert remedy("codx", ("pi", "codex")) == "did you mean codex? there are: codex, pi"
    assert remedy("zzz", ("pi", "codex")) == "there are: codex, pi"


def test_harness_may_be_bare_name() -> None:
    short, written = read_task({"instruction": "x", "harness": "pi"}), {"name": "pi"}
    assert short == read_task({"instruction": "x", "harness": written})
    with pytest.raises(Refused, match="harness must be a name or an object, not a number") as refused:
        read_task({"instruction": "x", "harness": 3})
    assert refused.value.path == "$.harness"
