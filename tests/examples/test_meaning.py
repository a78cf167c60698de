"""examples/meaning: what it finds in rows as they are, and in rows tokenised again; and that it can say no.

The session is made here with the embedded checkpoint and nothing of polarnode: two turns, the first one's
letters sampled one by one, as a policy under training does now and then.
"""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polarnode.node.config import TINY_MODEL

ROOT = Path(__file__).parents[2]
CALL = '{"name": "look", "arguments": {"at":"kiwi"}}'  # a template writes a blank behind the colon
ASKED = [{"role": "user", "content": "Look at the kiwi."}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "It is green."}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}

# torch and transformers warn of themselves
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def meaning() -> Any:
    """The program as a module: `examples` is a folder of the checkout, which nobody installs."""
    sys.path.insert(0, str(ROOT))
    try:
        from examples.meaning import __main__, checkpoint, retold

        yield SimpleNamespace(main=__main__.main, retold=retold, checkpoint=checkpoint.Checkpoint(TINY_MODEL))
    finally:
        sys.path.remove(str(ROOT))


class Maker:
    """A session of the checkpoint's own, written down as polarnode exports one."""

    def __init__(self, meaning: Any) -> None:
        self.ids, self.text = meaning.checkpoint.encoded, meaning.checkpoint.text
        self.rendered = meaning.checkpoint.rendered

    def trajectory(self, first: list[int], second: list[int]) -> dict[str, Any]:
        prompt = self.ids(self.rendered(ASKED, [TOOL], asking=True, thinking=None))
        between = self.ids(
            "\n<|im_start|>user\n<tool_response>\nIt is"
            " green.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        row = prompt + first + between + second
        spans = [(len(prompt), len(prompt + first)), (len(row) - len(second), len(row))]
        logprobs, mask = (
            logprobs_of(row, spans),
            [int(any(start <= at < end for start, end in spans)) for at in range(len(row))],
        )
        trace = {"token_ids": row, "loss_mask": mask, "logprobs": logprobs, "offset": 0}
        trace["turn_spans"] = [
            {"turn": turn, "start": start, "end": end} for turn, (start, end) in enumerate(spans)
        ]
        call = {"type": "tool_call", "id": "c1", "name": "look", "arguments": '{"at":"kiwi"}'}
        turns = [
            turn(0, None, prompt, first, [{"type": "text", "text": "kiwi"}, call]),
            turn(1, 0, between, second, [{"type": "text", "text": "Green."}]),
        ]
        return {
            "session_id": "s",
            "harness": {"name": "toy", "version": "1"},
            "turns": turns,
            "traces": [trace],
        }

    def spelled(self) -> list[int]:
        """The first answer, its first word letter by letter."""
        return [
            *(token for letter in "kiwi" for token in self.ids(letter)),
            *self.ids(f"\n<tool_call>\n{CALL}\n</tool_call><|im_end|>"),
        ]

    def plain(self) -> list[int]:
        """An answer that its own template writes just so."""
        return self.ids(
            'kiwi\n<tool_call>\n{"name": "look", "arguments": {"at": "kiwi"}}\n</tool_call><|im_end|>'
        )


def turn(
    index: int, parent: int | None, delta: list[int], sampled: list[int], parts: list[dict[str, Any]]
) -> dict[str, Any]:
    used = {"temperature": 0.7, "top_p": None}
    made = {
        "index": index,
        "parent": parent,
        "prompt_delta": delta,
        "close_length": 0,
        "sampled": sampled,
        "sampling": {"used": used},
    }
    return {**made, "answer": {"parts": parts}}


def logprobs_of(row: list[int], spans: list[tuple[int, int]]) -> list[float]:
    """By transformers, here and not by what is tested; 0 where nothing was sampled."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = (
            AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
            .eval()(torch.tensor([row]))
            .logits[0]
        )
    own = torch.log_softmax(logits / 0.7, dim=-1)
    return [
        float(own[at - 1, row[at]]) if any(start <= at < end for start, end in spans) else 0.0
        for at in range(len(row))
    ]


@pytest.fixture(scope="module")
def made(meaning: Any) -> dict[str, Any]:
    maker = Maker(meaning)
    return maker.trajectory(maker.spelled(), maker.ids("Green.<|im_end|>"))


@pytest.fixture(scope="module")
def usual(meaning: Any) -> dict[str, Any]:
    maker = Maker(meaning)
    return maker.trajectory(maker.plain(), maker.ids("Green.<|im_end|>"))


def recorded(folder: Path, *, arguments: str = '{"at":"kiwi"}', text: str = "kiwi") -> Path:
    """Both requests of the session, as `--record-requests` writes them: the second echoes the first
    answer.
    """
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    echo = {"role": "assistant", "content": text, "tool_calls": [call]}
    for number, messages in enumerate((ASKED, [*ASKED, echo, RESULT]), 1):
        body = {"model": "m", "messages": messages, "tools": [TOOL]}
        said = {"method": "POST", "target": "/v1/chat/completions", "headers": [], "body": body}
        file = folder / "requests" / "s" / f"{number:02}-request.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(said))
    return folder / "requests"


def run(meaning: Any, folder: Path, *trajectories: dict[str, Any], requests: Path | None = None) -> int:
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in trajectories))
    return int(meaning.main([str(file), *(["--requests", str(requests)] if requests else [])]))


def line(said: str, table: int, name: str = "toy") -> list[str]:
    """The cells of a harness's line in the first, second or third table."""
    lines = [each for each in said.splitlines() if each.startswith(f"| {name} |")]
    return [cell.strip() for cell in lines[table].strip("|").split("|")]


def test_program_imports_no_merging() -> None:
    source = "".join(path.read_text() for path in (ROOT / "examples" / "meaning").glob("*.py"))
    taken = {
        each.split()[1]
        for each in source.splitlines()
        if each.startswith(("from polarnode", "import polarnode"))
    }
    assert taken == {
        "polarnode.core.conversation",
        "polarnode.providers.contract",
        "polarnode.gateway.recorded_request",
    }


def test_unchanged_rows_mean_what_was_recorded(
    meaning: Any, made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(meaning, tmp_path, made) == 0
    said = capsys.readouterr().out
    cells = line(said, 0, "toy at temperature 0.7")
    assert cells[1:6] == ["1", "2", "2", "1", str(sum(made["traces"][0]["loss_mask"]))]
    assert float(cells[6]) < 1e-4
    assert said.endswith("every recorded logprob is the model's own in the row as it is\n")


def test_letters_sampled_singly_are_lost(
    meaning: Any, made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And all that stands behind them is read with other eyes."""
    run(meaning, tmp_path, made)
    _, rows, turns, lost, off, worst, _ = line(capsys.readouterr().out, 1, "toy at temperature 0.7")
    assert (rows, turns) == ("1 of 1", "2 of 2")
    assert int(lost.split()[0]) == 4
    assert int(off.split()[0]) > 0
    assert float(worst) > 0.02


def test_exact_template_text_is_kept(
    meaning: Any, usual: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(meaning, tmp_path, usual, requests=recorded(tmp_path)) == 0
    said = capsys.readouterr().out
    for table in (1, 2):
        _, rows, turns, lost, off, worst, _, *more = line(said, table, "toy at temperature 0.7")
        assert (rows, turns, lost.split()[0], off.split()[0], worst) == ("0 of 1", "0 of 2", "0", "0", "0.00")
    assert more == ["1 for 1"]


def test_misspelled_call_breaks_the_row(
    meaning: Any, made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(meaning, tmp_path, made, requests=recorded(tmp_path))
    _, rows, turns, lost, off, _, _, pieces = line(capsys.readouterr().out, 2, "toy at temperature 0.7")
    assert (rows, turns, pieces) == ("1 of 1", "2 of 2", "2 for 1")
    assert int(lost.split()[0]) > 4
    assert int(off.split()[0]) > 0


def test_only_harness_changes_break_rows(
    meaning: Any, usual: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text left out: the first turn's tokens go with it, and the second is read behind another history."""
    run(meaning, tmp_path, usual, requests=recorded(tmp_path, text=""))
    said = capsys.readouterr().out
    assert line(said, 1, "toy at temperature 0.7")[1:3] == ["0 of 1", "0 of 2"]
    assert line(said, 2, "toy at temperature 0.7")[1:3] == ["1 of 1", "2 of 2"]
    assert int(line(said, 2, "toy at temperature 0.7")[4].split()[0]) > 0


def test_request_without_turns_is_skipped(
    meaning: Any, made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = recorded(tmp_path)
    (requests / "s" / "02-request.json").unlink()
    run(meaning, tmp_path, made, requests=requests)
    assert line(capsys.readouterr().out, 2, "toy at temperature 0.7")[1:] == [
        "–",
        "–",
        "–",
        "–",
        "–",
        "–",
        "0 for 0",
    ]


def other_logprob(value: dict[str, Any]) -> None:
    value["traces"][0]["logprobs"][value["traces"][0]["turn_spans"][1]["start"]] += 0.5


def other_token(value: dict[str, Any]) -> None:
    value["traces"][0]["token_ids"][value["traces"][0]["turn_spans"][0]["start"]] += 1


def other_prompt(value: dict[str, Any]) -> None:
    value["traces"][0]["token_ids"][value["traces"][0]["turn_spans"][1]["start"] - 1] += 1


def other_temperature(value: dict[str, Any]) -> None:
    for each in value["turns"]:
        each["sampling"]["used"]["temperature"] = 1.5


@pytest.mark.parametrize("change", [other_logprob, other_token, other_prompt, other_temperature])
def test_changed_trajectory_is_rejected(
    meaning: Any,
    made: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
) -> None:
    value = copy.deepcopy(made)
    change(value)
    assert run(meaning, tmp_path, made, value) == 1
    assert "logprobs differ by" in capsys.readouterr().out


def without_tokens(value: dict[str, Any]) -> None:
    value["turns"][0]["prompt_delta"] = None


def base64_arrays(value: dict[str, Any]) -> None:
    value["arrays"] = "base64"


def a_penalty(value: dict[str, Any]) -> None:
    value["turns"][0]["sampling"]["used"]["presence_penalty"] = 0.5


def not_a_number(value: dict[str, Any]) -> None:
    value["traces"][0]["logprobs"][value["traces"][0]["turn_spans"][1]["start"]] = None


def outside_the_sample(value: dict[str, Any]) -> None:
    value["traces"][0]["loss_mask"][0] = 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_tokens, "export them with turns=full"),
        (base64_arrays, "export them with arrays=json"),
        (a_penalty, "sampled with a penalty"),
        (not_a_number, "a logprob is no number"),
        (outside_the_sample, "not sampled by any turn"),
    ],
)
def test_uncheckable_trajectory_does_not_pass(
    meaning: Any,
    made: dict[str, Any],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    sentence: str,
) -> None:
    value = copy.deepcopy(made)
    change(value)
    with pytest.raises(SystemExit, match=sentence):
        run(meaning, tmp_path, value)


def test_nothing_to_check_is_no_success(
    meaning: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(meaning, tmp_path) == 1
    assert "there is nothing to check" in capsys.readouterr().out


def test_end_of_long_row_has_context(
    meaning: Any, made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slices of a row (`offset` tokens are before them) have the same logprobs as the row."""
    value = copy.deepcopy(made)
    trace = value["traces"][0]
    cut = trace["turn_spans"][0]["end"]
    last = {name: trace[name][cut:] for name in ("token_ids", "loss_mask", "logprobs")} | {"offset": cut}
    last["turn_spans"] = [
        {
            **trace["turn_spans"][1],
            "start": trace["turn_spans"][1]["start"] - cut,
            "end": trace["turn_spans"][1]["end"] - cut,
        }
    ]
    first = {name: trace[name][:cut] for name in ("token_ids", "loss_mask", "logprobs")} | {
        "offset": 0,
        "turn_spans": trace["turn_spans"][:1],
    }
    value["traces"] = [first, last]
    assert run(meaning, tmp_path, value) == 0
    assert line(capsys.readouterr().out, 0, "toy at temperature 0.7")[4:6] == [
        "2",
        str(sum(trace["loss_mask"])),
    ]


def test_scripted_tokens_are_not_the_models(
    meaning: Any, made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A steered engine gives it one choice a step: no logprob of it can be checked, and those behind
    it can.
    """
    value = copy.deepcopy(made)
    trace = value["traces"][0]
    start, end = trace["turn_spans"][0]["start"], trace["turn_spans"][0]["end"]
    trace["logprobs"][start:end] = [0.0] * (end - start)
    assert run(meaning, tmp_path, value) == 0
    cells = line(capsys.readouterr().out, 0, "toy behind a script at temperature 0.7")
    assert cells[5] == str(sum(trace["loss_mask"][end:]))


def test_common_runs_after_differences(meaning: Any) -> None:
    common = meaning.retold.common
    assert list(common([1, 2, 3], [1, 2, 3])) == [(0, 0), (1, 1), (2, 2)]
    assert list(common([1, 2, 3, 4], [1, 9, 9, 3, 4])) == [(0, 0), (2, 3), (3, 4)]
    assert list(common([1, 2], [])) == []
    assert list(common([], [1])) == []
