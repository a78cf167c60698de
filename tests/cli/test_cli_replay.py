"""replay: a line a request, and nothing else on stdout."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from polarnode.cli import recordings
from polarnode.cli.file_commands import FILE_COMMANDS
from polarnode.cli.main import main
from polarnode.core import codec
from polarnode.core.arrays import floats, ids
from polarnode.core.codec.json import dump_json
from polarnode.core.trajectory import Outcome, Trajectory, Turn, VersionSpan
from polarnode.merge.builders import prefix_merging
from polarnode.node.config import TINY_MODEL
from polarnode.tokens.tokenizer import load_tokenizer

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


def test_json_has_object_per_request(tmp_path: Path) -> None:
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


def test_refused_request_exits_1(tmp_path: Path) -> None:
    write(tmp_path, 1, {"model": "m", "messages": [{"role": "nobody", "content": "x"}]})
    (tmp_path / "02-request.json").write_text("not json")
    result = invoked(str(tmp_path), "--json")
    assert result.exit_code == 1
    one, two = lines(result)
    assert one["provider"] == "openai_chat"
    assert one["error"].startswith("$.messages[0]")
    assert two["provider"] is None
    assert "JSON" in two["error"]


def test_table_with_totals(tmp_path: Path) -> None:
    talk(tmp_path)
    result = invoked(str(tmp_path))
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in recordings.COLUMNS)
    assert "all: 2 requests, 2 turns in 1 lineages (1 main)" in result.stdout


def test_folder_without_requests_is_refused(tmp_path: Path) -> None:
    result = invoked(str(tmp_path))
    assert result.exit_code != 0
    assert "NN-request.json" in result.output


def test_other_tokenizer_needs_no_weights(tmp_path: Path, qwen3_folder: Path) -> None:
    talk(tmp_path)
    one, two = (
        lines(invoked(str(tmp_path), "--json", *more)) for more in ([], ["--tokenizer", str(qwen3_folder)])
    )
    assert [line["kind"] for line in one] == [line["kind"] for line in two] == ["root", "extend"]
    assert one[0]["prompt_tokens"] != two[0]["prompt_tokens"]


def test_invalid_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    talk(tmp_path)
    result = invoked(str(tmp_path), "--tokenizer", str(tmp_path))
    assert result.exit_code == 1
    assert "tokenizer" in result.output
    assert "Traceback" not in result.output


def recording(folder: Path, seconds: str) -> None:
    write(folder, 1, body(("user", "list")))
    write(folder, 2, body(("user", "list"), ("assistant", "done"), ("user", f"It took\n{seconds} s in all")))
    (folder / "02-response.txt").write_text("HTTP/1.1 200\r\n\r\n{}")


def test_recordings_compared_to_first_difference(tmp_path: Path) -> None:
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
    assert "compare one session on each side" in result.output


def test_missing_counterpart_is_reported(tmp_path: Path) -> None:
    recording(tmp_path / "a", "1")
    recording(tmp_path / "b", "1")
    write(tmp_path / "b", 3, body(("user", "new")))
    (tmp_path / "b" / "04-request.json").write_text("not json")
    result = invoked(str(tmp_path / "a"), "--against", str(tmp_path / "b"))
    assert result.exit_code == 1
    assert "2 of 2 prompts equal; OTHER has 3 requests" in result.stdout
    assert "03-request.json of OTHER has no counterpart" in result.stdout
    assert "not read: 04-request.json" in result.stdout


def test_incomparable_inputs_are_refused(tmp_path: Path) -> None:
    recording(tmp_path / "a", "1")
    (tmp_path / "empty").mkdir()
    result = invoked(str(tmp_path / "a"), "--against", str(tmp_path / "empty"))
    assert result.exit_code == 1
    assert "NN-request.json" in result.output
    result = invoked(str(tmp_path / "a"), "--against", str(tmp_path / "a"), "--tokenizer", str(tmp_path))
    assert result.exit_code == 2
    assert "leave --tokenizer out" in result.output
    (tmp_path / "t.jsonl").write_text("{}")
    result = invoked(str(tmp_path / "a"), "--against", str(tmp_path / "t.jsonl"))
    assert result.exit_code == 1
    assert "two folders of recordings, or two files" in result.output
    result = invoked(str(tmp_path / "t.jsonl"))
    assert result.exit_code == 2
    assert "--against" in result.output


# ── trajectories ──────────────────────────────────────────────────────────────


def trajectory(session: str, minute: str, **more: Any) -> Trajectory:
    """A session of two turns and a side call, merged as a node merges."""
    tokenizer = load_tokenizer(TINY_MODEL)
    turns: list[Turn] = []
    for parent, prompt in ((None, "List it.\n"), (0, f"Nov 24 18:{minute} a.txt\n"), (None, "Title?\n")):
        delta, sample = ids(tokenizer.encode_plain(prompt)), ids(tokenizer.encode_plain("I do.\n"))
        before = 0 if parent is None else turns[parent].prompt_length + len(turns[parent].sampled)
        turns.append(
            Turn(
                session_id=session,
                index=len(turns),
                provider="anthropic",
                lineage=0 if parent is not None or not turns else 1,
                parent=parent,
                kind="root" if parent is None else "extend",
                reason="first" if parent is None else "appended",
                prompt_delta=delta,
                prompt_length=before + len(delta),
                sampled=sample,
                logprobs=floats([-0.5] * len(sample)),
                version_spans=(VersionSpan(version="0", start=0, end=len(sample)),),
            )
        )
    return Trajectory(
        session_id=session,
        task_id="t",
        group_id="t",
        sample_index=0,
        outcome=Outcome(status="completed"),
        reward=None,
        traces=prefix_merging(tuple(turns), more).traces,
        turns=tuple(turns),
    )


def lines_of(file: Path, *trajectories: Trajectory) -> str:
    file.write_bytes(b"".join(dump_json(codec.trajectory_json(each)) + b"\n" for each in trajectories))
    return str(file)


def test_row_prompts_of_files_are_compared(tmp_path: Path) -> None:
    one = lines_of(tmp_path / "one.jsonl", trajectory("a", "03"))
    other = lines_of(tmp_path / "other.jsonl", trajectory("b", "04"))
    result = invoked(one, "--against", other, "--json", "--tokenizer", str(TINY_MODEL))
    (found,) = lines(result)
    assert result.exit_code == 1
    assert (found["session"], found["against"], found["requests"], found["equal"]) == ("a", "b", 3, 2)
    first = found["first"]
    assert (first["file"], first["against_file"]) == ("turn 1", "turn 1")
    assert (first["words"], first["against_words"]) == ("03", "04")
    assert first["before"].endswith("I do.\nNov 24 18:")
    assert first["after"] == " a.txt\n"
    place = int(first["part"].removeprefix("token "))
    whole = trajectory("a", "03").traces[0].token_ids
    assert b"".join(map(load_tokenizer(TINY_MODEL).token_bytes, whole[:place])).decode().endswith("18:0")
    result = invoked(one, "--against", one)
    assert (result.exit_code, result.stdout.splitlines()) == (0, ["a against a", "3 of 3 prompts equal"])
    result = invoked(one, "--against", other, "--json")
    assert lines(result)[0]["first"]["words"] == str(whole[place]), "ids without a tokenizer"


def test_rows_with_partial_prompts_are_refused(tmp_path: Path) -> None:
    parts = lines_of(tmp_path / "parts.jsonl", trajectory("a", "03", max_row_tokens=12))
    result = invoked(parts, "--against", parts)
    assert result.exit_code == 1
    assert "without max_row_tokens" in result.output


def test_file_sessions_are_paired_by_id(tmp_path: Path) -> None:
    one = lines_of(tmp_path / "one.jsonl", trajectory("a", "03"), trajectory("b", "03"))
    other = lines_of(tmp_path / "other.jsonl", trajectory("b", "03"), trajectory("a", "04"))
    found = lines(invoked(one, "--against", other, "--json"))
    assert [(line["session"], line["same"]) for line in found] == [("a", False), ("b", True)]
    result = invoked(one, "--against", lines_of(tmp_path / "third.jsonl", trajectory("b", "03")))
    assert result.exit_code == 1
    assert "a: only in one of" in result.output


def test_file_commands_are_registered() -> None:
    assert [main.commands[each.name or ""] for each in FILE_COMMANDS] == list(FILE_COMMANDS)
