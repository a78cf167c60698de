"""examples/verify.py: it shares no code with polarnode, and it must be able to say no."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarnode.node.config import TINY_MODEL

ROOT = Path(__file__).parents[2]
VERIFY = ROOT / "examples" / "verify.py"
PROMPT, SAMPLES = [5, 6, 7, 8], ([9, 10, 11], [12, 13])

# torch and transformers warn of themselves
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module, so that not each test loads torch anew."""
    spec = importlib.util.spec_from_file_location("verify", VERIFY)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def honest(model: Any) -> dict[str, Any]:
    """A trajectory of two turns whose logprobs are the model's own, made here with nothing of polarnode."""
    import torch

    between = [14, 15]
    ids = PROMPT + SAMPLES[0] + between + SAMPLES[1]
    mask = [0] * 4 + [1] * 3 + [0] * 2 + [1] * 2
    with torch.no_grad():
        own = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1] / 0.7, dim=-1)
    logprobs = [0.0] + [float(own[at, token]) for at, token in enumerate(ids[1:])]
    spans = [{"turn": 0, "start": 4, "end": 7}, {"turn": 1, "start": 9, "end": 11}]
    trace = {
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": [p * m for p, m in zip(logprobs, mask, strict=True)],
        "turn_spans": spans,
    }
    return {
        "session_id": "s",
        "traces": [trace],
        "turns": [row(span["turn"], ids[: span["start"]]) for span in spans],
    }


def row(index: int, prompt: list[int]) -> dict[str, Any]:
    digest = hashlib.sha256(array("i", prompt).tobytes()).hexdigest()
    return {
        "index": index,
        "prompt_length": len(prompt),
        "prompt_sha256": digest,
        "sampling": {"used": {"temperature": 0.7, "top_p": None}},
    }


def verify(
    folder: Path, *trajectories: dict[str, Any], more: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in trajectories))
    return subprocess.run(
        [sys.executable, str(VERIFY), str(file), *more], capture_output=True, text=True, check=False
    )


def test_script_imports_no_polarnode() -> None:
    source = VERIFY.read_text()
    assert "import polarnode" not in source
    assert "from polarnode" not in source


def test_honest_trajectory_passes(tmp_path: Path, honest: dict[str, Any]) -> None:
    done = verify(tmp_path, honest, honest)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 traces, 10 trainable tokens, largest difference of a logprob ")
    assert "every turn's prompt is an exact prefix of its trace" in done.stdout


def other_logprob(value: dict[str, Any]) -> None:
    value["traces"][0]["logprobs"][5] += 0.5


def other_token(value: dict[str, Any]) -> None:
    value["traces"][0]["token_ids"][8] = 16


def other_prompt(value: dict[str, Any]) -> None:
    value["turns"][1]["prompt_sha256"] = "0" * 64


def longer_prompt(value: dict[str, Any]) -> None:
    value["turns"][0]["prompt_length"] += 1


def other_temperature(value: dict[str, Any]) -> None:
    for turn in value["turns"]:
        turn["sampling"]["used"]["temperature"] = 1.5


def not_a_number(value: dict[str, Any]) -> None:
    value["traces"][0]["logprobs"][5] = None


def base64_arrays(value: dict[str, Any]) -> None:
    value["arrays"] = "base64"


def a_penalty(value: dict[str, Any]) -> None:
    value["turns"][0]["sampling"]["used"]["presence_penalty"] = 0.5


def outside_the_sample(value: dict[str, Any]) -> None:
    value["traces"][0]["loss_mask"][8] = 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_logprob, "logprobs differ by 0.5"),
        (other_token, "the prompt of turn 1 is not the trace's prefix"),
        (other_prompt, "the prompt of turn 1 is not the trace's prefix"),
        (longer_prompt, "the prompt of turn 0 is not the trace's prefix"),
        (other_temperature, "logprobs differ by"),
        (not_a_number, "a logprob is no number"),
        (outside_the_sample, "a trainable token was not sampled by any turn"),
    ],
)
def test_dishonest_trajectory_is_found(
    honest: dict[str, Any], model: Any, script: Any, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    value = json.loads(json.dumps(honest))
    change(value)
    _, said = script.check(model, value, value["traces"][0], 0.02)
    assert any(each.startswith(sentence) for each in said), said


def test_faults_set_the_exit_code(tmp_path: Path, honest: dict[str, Any]) -> None:
    value = json.loads(json.dumps(honest))
    other_prompt(value)
    done = verify(tmp_path, honest, value)
    assert done.returncode == 1
    assert "s trace 0: the prompt of turn 1 is not the trace's prefix" in done.stdout


@pytest.mark.parametrize(
    ("change", "sentence"),
    [(base64_arrays, "export them with arrays=json"), (a_penalty, "sampled with a penalty")],
)
def test_uncheckable_trajectory_does_not_pass(
    honest: dict[str, Any], model: Any, script: Any, change: Any, sentence: str
) -> None:
    value = json.loads(json.dumps(honest))
    change(value)
    with pytest.raises(SystemExit, match=sentence):
        script.check(model, value, value["traces"][0], 0.02)


# ── slices ────────────────────────────────────────────────────────────────────


def sliced(value: dict[str, Any], at: int, *, until: int = 7) -> dict[str, Any]:
    """The same session in two traces: the first turn's, and what follows token `at`. Its table says which
    turn extends which.
    """
    [trace] = value["traces"]
    names = ("token_ids", "loss_mask", "logprobs")
    first = {name: trace[name][:until] for name in names} | {
        "turn_spans": trace["turn_spans"][:1],
        "offset": 0,
        "part": 0,
        "parts": 2,
    }
    second = {name: trace[name][at:] for name in names} | {"offset": at, "part": 1, "parts": 2}
    second["turn_spans"] = [
        span | {"start": span["start"] - at, "end": span["end"] - at} for span in trace["turn_spans"][1:]
    ]
    turns = [
        turn | {"parent": parent, "sampled_length": length}
        for turn, parent, length in zip(value["turns"], (None, 0), (3, 2), strict=True)
    ]
    return value | {"traces": [first, second], "turns": turns}


def test_slice_is_judged_with_context(tmp_path: Path, honest: dict[str, Any], script: Any) -> None:
    value = sliced(honest, 7)
    assert script.put_together(value, value["traces"][1])["token_ids"] == honest["traces"][0]["token_ids"]
    done = verify(tmp_path, value)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 traces, 5 trainable tokens, ")
    assert "not judged" not in done.stdout


@pytest.mark.parametrize(
    ("trace", "place", "sentence"),
    [(0, 2, "trace 1: the prompt of turn 1"), (1, 0, "trace 1: the prompt of turn 1")],
)
def test_slice_behind_other_tokens_is_found(
    tmp_path: Path, honest: dict[str, Any], trace: int, place: int, sentence: str
) -> None:
    value = sliced(json.loads(json.dumps(honest)), 7)
    value["traces"][trace]["token_ids"][place] += 1
    done = verify(tmp_path, value)
    assert (done.returncode, sentence in done.stdout) == (1, True), done.stdout


def test_slice_without_context_is_reported(tmp_path: Path, honest: dict[str, Any], script: Any) -> None:
    value = sliced(honest, 8)
    assert script.put_together(value, value["traces"][1]) is None
    done = verify(tmp_path, value)
    assert (done.returncode, done.stdout[:30]) == (0, "1 traces, 3 trainable tokens, "), done.stdout
    assert "1 traces are not judged: max_row_tokens cut away" in done.stdout


def test_nothing_to_check_is_no_success(tmp_path: Path) -> None:
    done = verify(tmp_path)
    assert done.returncode == 1
    assert "0 traces" in done.stdout
