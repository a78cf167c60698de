from pathlib import Path


def test_out() -> None:
    assert Path("/app/out.txt").read_text().strip() == "ok"
