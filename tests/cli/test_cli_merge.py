"""merge: rows on stdout or in a file, everything else on stderr."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from polarnode.cli import recordings
from polarnode.cli.main import main


def invoked(*args: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["merge", *args], input=stdin)


def line(turn: Any, prompt: list[int], sampled: list[int], **more: Any) -> str:
    return json.dumps(
        {
            "session_id": "s",
            "turn_id": turn,
            "prompt_ids": prompt,
            "sampled_ids": sampled,
            "logprobs": [-0.5] * len(sampled),
        }
        | more
    )


def written(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines) + "\n")
    return file


def test_rows_to_stdout_counts_to_stderr(tmp_path: Path) -> None:
    result = invoked(
        str(
            written(
                tmp_path / "calls.jsonl",
                line(1, [1], [2]),
                line(2, [1, 2, 3], [4]),
                line(3, [9], [8], weight_version="w"),
            )
        )
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(row) for row in result.stdout.splitlines()]
    assert [list(row) for row in rows] == [
        ["session_id", "token_ids", "loss_mask", "logprobs", "turn_spans", "version_spans"]
    ] * 2
    assert [row["token_ids"] for row in rows] == [[1, 2, 3, 4], [9, 8]]
    assert result.stderr == (
        "3 records, 1 sessions, 2 rows; 3 sampled tokens, 3 trainable; "
        "1 broken (a prompt without the reply before it), 0 retries, 0 empty, 0 bad lines\n"
    )


def test_stdin_is_merged_into_file(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    result = invoked("-", "-o", str(out), stdin=line(1, [1], [2]).encode())
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(out.read_text())["token_ids"] == [1, 2]
    assert list(tmp_path.iterdir()) == [out]


def test_invalid_line_exits_1_after_merge(tmp_path: Path) -> None:
    bad = line(2, [1, 2, 3], [4], logprobs=[])
    result = invoked(str(written(tmp_path / "c", line(1, [1], [2]), "", bad, "no\x1b", line(4, [1, 2], [5]))))
    assert result.exit_code == 1
    told = result.stderr.splitlines()
    assert (
        told[0]
        == "line 3: logprobs has 0 numbers for 1 sampled_ids: give the engine's logprob of each sampled id"
    )
    assert told[1].startswith("line 4: it is not JSON")
    assert told[2].startswith("4 records, 1 sessions, 1 rows; 2 sampled tokens, 2 trainable")
    assert told[2].endswith("2 bad lines")
    assert "\x1b" not in result.stderr
    assert json.loads(result.stdout)["token_ids"] == [1, 2, 5]


def test_empty_file_is_no_fault(tmp_path: Path) -> None:
    result = invoked(str(written(tmp_path / "c")))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("0 records, 0 sessions, 0 rows")


def test_unwritable_output_is_one_sentence(tmp_path: Path) -> None:
    result = invoked(str(written(tmp_path / "c", line(1, [1], [2]))), "-o", str(tmp_path / "gone" / "rows"))
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.output


def test_python_call_gives_same_result(tmp_path: Path) -> None:
    assert recordings.merge(written(tmp_path / "c", line(1, [1], [2])), tmp_path / "rows") == 0
    assert (tmp_path / "rows").read_text().count("\n") == 1
