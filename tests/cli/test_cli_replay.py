"""replay: a line a request, and nothing else on stdout."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from polarnode.cli import recordings
from polarnode.cli.main import main

FIELDS = [
    "file",
    "provider",
    "kind",
    "parent",
    "lineage",
    "reason",
    "role",
    "prompt_tokens",
    "new_tokens",
    "error",
]
BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "run", "parameters": {"type": "object", "properties": {}}},
}


def invoked(*args: str) -> Result:
    return CliRunner().invoke(main, ["replay", *args])


def write(folder: Path, number: int, body: Any, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "method": "POST",
        "target": "/sessions/s/v1/chat/completions",
        "headers": [["content-type", "application/json"]],
        "body": body,
    }
    (folder / f"{number:02}-request.json").write_text(json.dumps(said | more))


def body(*messages: tuple[str, str]) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": role, "content": content} for role, content in messages],
        "tools": [BASH],
    }


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def talk(folder: Path) -> None:
    write(folder, 9, body(("system", "be good"), ("user", "hello")))
    write(folder, 10, body(("system", "be good"), ("user", "hello"), ("assistant", "hi"), ("user", "more")))


def test_json_is_one_object_a_line_with_every_field(tmp_path: Path) -> None:
    talk(tmp_path / "one" / "deep")
    write(tmp_path / "two", 1, None, method="GET", target="/sessions/s/api/tags")
    result = invoked(str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    found = lines(result)
    assert [list(line) for line in found] == [FIELDS] * 3
    assert [line["file"] for line in found] == [
        "one/deep/09-request.json",
        "one/deep/10-request.json",
        "two/01-request.json",
    ]
    assert [line["kind"] for line in found] == ["root", "extend", None]
    assert found[1]["parent"] == "one/deep/09-request.json"
    assert found[1]["prompt_tokens"] > found[0]["prompt_tokens"] > found[1]["new_tokens"] > 0
    assert found[2] == dict.fromkeys(FIELDS) | {"file": "two/01-request.json"}
    assert "3 requests, 2 turns in 1 lineages (1 main)" in result.stderr


def test_a_refused_request_is_named_and_ends_the_verb_with_1(tmp_path: Path) -> None:
    write(tmp_path, 1, {"model": "m", "messages": [{"role": "nobody", "content": "x"}]})
    (tmp_path / "02-request.json").write_text("not json")
    result = invoked(str(tmp_path), "--json")
    assert result.exit_code == 1
    one, two = lines(result)
    assert one["provider"] == "openai_chat"
    assert one["error"].startswith("$.messages[0]")
    assert two["provider"] is None
    assert "JSON" in two["error"]


def test_a_person_reads_a_table_and_totals(tmp_path: Path) -> None:
    talk(tmp_path)
    result = invoked(str(tmp_path))
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in recordings.COLUMNS)
    assert "all: 2 requests, 2 turns in 1 lineages (1 main)" in result.stdout


def test_a_folder_without_requests_is_refused_with_its_remedy(tmp_path: Path) -> None:
    result = invoked(str(tmp_path))
    assert result.exit_code != 0
    assert "NN-request.json" in result.output


def test_another_tokenizer_needs_no_weights(tmp_path: Path, qwen3_folder: Path) -> None:
    talk(tmp_path)
    one, two = (
        lines(invoked(str(tmp_path), "--json", *more)) for more in ([], ["--tokenizer", str(qwen3_folder)])
    )
    assert [line["kind"] for line in one] == [line["kind"] for line in two] == ["root", "extend"]
    assert one[0]["prompt_tokens"] != two[0]["prompt_tokens"]


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    talk(tmp_path)
    result = invoked(str(tmp_path), "--tokenizer", str(tmp_path))
    assert result.exit_code == 1
    assert "tokenizer" in result.output
    assert "Traceback" not in result.output


def recording(folder: Path, seconds: str) -> None:
    write(folder, 1, body(("user", "list")))
    write(folder, 2, body(("user", "list"), ("assistant", "done"), ("user", f"It took\n{seconds} s in all")))
    (folder / "02-response.txt").write_text("HTTP/1.1 200\r\n\r\n{}")


def test_two_recordings_are_compared_to_their_first_difference(tmp_path: Path) -> None:
    for name, seconds in (("a", "0.31"), ("b", "0.32"), ("c", "0.31")):
        recording(tmp_path / name, seconds)
    one = str(tmp_path / "a")
    result = invoked(one, "--against", str(tmp_path / "b"))
    assert result.exit_code == 1
    assert "1 of 2 prompts equal" in result.stdout
    assert "02-request.json and 02-request.json, in message 3 (user)" in result.stdout
    assert result.stdout.splitlines()[-4:] == [
        '  before  "user: It took\\n0."',
        '  DIR     "31"',
        '  OTHER   "32"',
        '  after   " s in all"',
    ]
    result = invoked(one, "--against", str(tmp_path / "b"), "--json")
    (found,) = lines(result)
    assert result.exit_code == 1
    assert found == {
        "session": "a",
        "against": "b",
        "same": False,
        "requests": 2,
        "against_requests": 2,
        "equal": 1,
        "first": {
            "file": "02-request.json",
            "against_file": "02-request.json",
            "part": "message 3 (user)",
            "before": "user: It took\n0.",
            "words": "31",
            "against_words": "32",
            "after": " s in all",
        },
        "errors": [],
    }
    result = invoked(one, "--against", str(tmp_path / "c"))
    assert (result.exit_code, result.stdout.splitlines()[1:]) == (0, ["2 of 2 prompts equal"])


def test_sessions_are_paired_by_name(tmp_path: Path) -> None:
    for side, seconds in (("one", "1"), ("two", "2")):
        recording(tmp_path / side / "s1", "1")
        recording(tmp_path / side / "s2", seconds)
    result = invoked(str(tmp_path / "one"), "--against", str(tmp_path / "two"), "--json")
    assert result.exit_code == 1
    assert [(line["session"], line["against"], line["same"]) for line in lines(result)] == [
        ("s1", "s1", True),
        ("s2", "s2", False),
    ]
    write(tmp_path / "two" / "s3", 1, body(("user", "x")))
    result = invoked(str(tmp_path / "one"), "--against", str(tmp_path / "two"))
    assert result.exit_code == 1
    assert "s3: only in one of" in result.output
    assert "one session's folder on each side" in result.output


def test_a_missing_counterpart_and_what_is_not_read_are_said(tmp_path: Path) -> None:
    recording(tmp_path / "a", "1")
    recording(tmp_path / "b", "1")
    write(tmp_path / "b", 3, body(("user", "new")))
    (tmp_path / "b" / "04-request.json").write_text("not json")
    result = invoked(str(tmp_path / "a"), "--against", str(tmp_path / "b"))
    assert result.exit_code == 1
    assert "2 of 2 prompts equal; OTHER has 3 requests" in result.stdout
    assert "03-request.json of OTHER has no counterpart" in result.stdout
    assert "not read: 04-request.json" in result.stdout


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    recording(tmp_path / "a", "1")
    (tmp_path / "empty").mkdir()
    result = invoked(str(tmp_path / "a"), "--against", str(tmp_path / "empty"))
    assert result.exit_code == 1
    assert "NN-request.json" in result.output
    result = invoked(str(tmp_path / "a"), "--against", str(tmp_path / "a"), "--tokenizer", str(tmp_path))
    assert result.exit_code == 2
    assert "leave --tokenizer out" in result.output
