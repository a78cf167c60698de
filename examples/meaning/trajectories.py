"""Read the parts of a trajectories.jsonl that the proof needs. What cannot be checked ends the program."""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# and the values that change no logit
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Turn:
    """One model call: what it added to the prompt it extends, its sample, and the message that was made of it
    (None: none was).
    """

    index: int
    parent: int | None
    delta: list[int]  # its prompt is the parent's prompt and sample, then this
    close_length: int  # so many of the delta end the parent's sample
    sampled: list[int]
    temperature: float
    answer: dict[str, Any] | None


@dataclass(frozen=True)
class Sample:
    """Tokens [start, end) of a row are what a turn sampled; `trained` of them by their places.

    None of them where a test made the engine say the turn (`scripted`): with one choice a step its logprobs
    are all 0, and no model's.
    """

    turn: int
    start: int
    end: int
    temperature: float
    trained: tuple[int, ...]
    scripted: bool = False


@dataclass(frozen=True)
class Row:
    """One training sequence."""

    ids: list[int]
    logprobs: list[float]
    samples: list[Sample]

    @property
    def tokens(self) -> int:
        """How many of it are trained."""
        return sum(len(sample.trained) for sample in self.samples)


@dataclass(frozen=True)
class Session:
    """One attempt of a harness at a task."""

    id: str
    harness: str
    turns: dict[int, Turn]
    rows: list[Row]

    @property
    def label(self) -> str:
        """The label of its table line: its harness, and what sets the session apart."""
        samples = [sample for row in self.rows for sample in row.samples]
        heats = sorted({sample.temperature for sample in samples} - {1.0})
        led = " behind a script" if any(sample.scripted for sample in samples) else ""
        return self.harness + led + "".join(f" at temperature {heat:g}" for heat in heats)


def sessions(files: list[Path]) -> Iterator[Session]:
    for file in files:
        for line in file.read_text().splitlines():
            yield session(json.loads(line))


def session(data: dict[str, Any]) -> Session:
    if data.get("arrays", "json") != "json":
        sys.exit("the arrays are base64: export them with arrays=json")
    turns = {each["index"]: turn(each) for each in data["turns"]}
    return Session(
        id=data["session_id"],
        harness=data["harness"]["name"],
        turns=turns,
        rows=[row(trace, turns) for trace in data["traces"]],
    )


def turn(data: dict[str, Any]) -> Turn:
    if data.get("prompt_delta") is None:
        sys.exit("the turns are without their tokens: export them with turns=full")
    used = data["sampling"]["used"]
    if any(used.get(name) not in (None, neutral) for name, neutral in PENALTIES.items()):
        sys.exit(f"turn {data['index']} was sampled with a penalty, which this does not recompute")
    return Turn(
        index=data["index"],
        parent=data["parent"],
        delta=data["prompt_delta"],
        close_length=data["close_length"],
        sampled=data["sampled"],
        temperature=float(used.get("temperature") or 1.0),  # greedy ones are of the plain logits
        answer=data["answer"],
    )


def row(trace: dict[str, Any], turns: dict[int, Turn]) -> Row:
    """A trace; one that shows only the end of a longer row has the rest of it before it, from the turns."""
    before = conditioned(turns, trace["turn_spans"][-1]["turn"])[: trace.get("offset", 0)]
    mask, logprobs = [0] * len(before) + trace["loss_mask"], [0.0] * len(before) + trace["logprobs"]
    spans = [
        (turns[span["turn"]], range(span["start"] + len(before), span["end"] + len(before)))
        for span in trace["turn_spans"]
    ]
    places = {at for _, span in spans for at in span if mask[at]}
    if len(places) != sum(mask):
        sys.exit("a trainable token was not sampled by any turn")
    if any(logprobs[at] is None or not math.isfinite(logprobs[at]) for at in places):
        sys.exit("a logprob is no number")
    return Row(
        before + trace["token_ids"], logprobs, [sample(turn, span, mask, logprobs) for turn, span in spans]
    )


def conditioned(turns: dict[int, Turn], last: int) -> list[int]:
    """The full prompt of a turn, and its sample."""
    line = [turns[last]]
    while (parent := line[-1].parent) is not None:
        line.append(turns[parent])
    return [token for turn in reversed(line) for token in (*turn.delta, *turn.sampled)]


def sample(turn: Turn, span: range, mask: list[int], logprobs: list[float]) -> Sample:
    trained = tuple(at for at in span if mask[at])
    scripted = len(trained) > 1 and not any(logprobs[at] for at in trained)
    return Sample(turn.index, span.start, span.stop, turn.temperature, () if scripted else trained, scripted)
