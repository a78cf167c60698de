"""Every rule of the token contract is held by some test: a mutant of each, and none survives. `mutants.py`
says how, `mutant_rules.py` which.

To look at one: `python tests/kits/mutants.py "the stop token is dropped"`.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mutant_rules import MUTANTS
from mutants import ROOT, Mutant

NAMES = [mutant.name for mutant in MUTANTS]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What became of every mutant, by name: one process loads the libraries, and a fork of it tests each."""
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "kits" / "mutants.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.JSONDecoder()  # a fork's pytest may put its dot behind a line
    found = [told.raw_decode(line)[0] for line in ran.stdout.splitlines() if line.startswith("{")]
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {outcome["name"]: outcome for outcome in found}


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_mutant_fails_its_tests(mutant: Mutant, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[mutant.name]
    assert outcome["code"] != 0, f"it survives {', '.join(mutant.tests)}: no test holds this rule"
    assert outcome["killed"], f"its tests did not run (pytest's {outcome['code']}): {outcome['said']}"


def test_mutants_name_existing_tests() -> None:
    """A test that fails anyway kills every mutant. These are run with the rest of the suite; here only that
    they are there, and mutants many.
    """
    assert len(MUTANTS) >= 30
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []
    files = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_moved_rule_is_reported() -> None:
    gone = Mutant(name="gone", module="polarnode.merge.attach", old="no such text", new="", tests=())
    with pytest.raises(
        LookupError,
        match=r"rule moved: polarnode.merge.attach holds 'no such text' 0 times; update the mutant 'gone'",
    ):
        gone.changed()
