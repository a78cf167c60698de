"""The rows of canonical sessions, token for token, as they are kept in tests/data/golden: whoever changes one
sees it in review.

`python tests/kits/golden_kit.py` writes the files anew; read the change of each before it is committed.
"""

import json

import pytest
from golden_kit import FOLDER, SESSIONS, golden


@pytest.mark.parametrize("name", SESSIONS)
def test_session_rows_match_golden_files(name: str) -> None:
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    found = golden(name)
    assert found["turns"] == kept["turns"]
    assert found["left_out"] == kept["left_out"]
    # what a person can read first
    assert [row["reads"] for row in found["rows"]] == [row["reads"] for row in kept["rows"]]
    assert found == kept


def test_no_golden_file_left_over() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(SESSIONS)
