"""`polarnode view --bundle`: what is written, and what is refused. tests/web/test_page_browser.py looks at the pages."""

import json
from pathlib import Path

from click.testing import CliRunner
from journal_samples import make_trajectory

from polarnode.cli import view
from polarnode.cli.main import main
from polarnode.core import codec


def file_of(folder: Path, *lines: bytes) -> Path:
    found = folder / "trajectories.jsonl"
    found.write_bytes(b"\n".join(lines))
    return found


LINE = codec.dump_json(codec.trajectory_json(make_trajectory("s"), turns="full"))


def test_bundle_omits_damaged_lines(tmp_path: Path) -> None:
    file = file_of(tmp_path, LINE, b'{"unreadable": {"reason": "x"}}')
    done = CliRunner().invoke(main, ["view", "--from", str(file), "--bundle", str(tmp_path / "out")])
    assert (done.exit_code, "serve it with any web server" in done.output.replace("\n", " ")) == (0, True), (
        done.output
    )
    assert (tmp_path / "out" / "index.html").is_file()
    sessions = tmp_path / "out" / "data" / "sessions"
    assert sorted(str(each.relative_to(sessions)) for each in sessions.rglob("*.json")) == [
        "s.json",
        "s/forks.json",
    ]
    pieces = json.loads((tmp_path / "out" / "data" / "trajectories" / "s.json").read_text())["pieces"]
    assert pieces["tokens"]["1000"] == " 1000", "without its model's tokenizer a token is its id"


def test_nonempty_folder_is_not_written(tmp_path: Path) -> None:
    file = file_of(tmp_path, LINE)
    done = CliRunner().invoke(main, ["view", "--from", str(file), "--bundle", str(tmp_path)])
    assert done.exit_code != 0
    assert "is not an empty folder" in done.output


def test_invalid_trajectory_file_is_refused(tmp_path: Path) -> None:
    for line, words in ((b"[]", "no trajectory"), (b"{", "line 1"), (b"", "is empty")):
        done = CliRunner().invoke(main, ["view", "--from", str(file_of(tmp_path, line))])
        assert done.exit_code != 0
        assert words in done.output
    assert view.__doc__
