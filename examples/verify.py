"""Check the logprobs of a trajectories.jsonl with plain transformers, without any code of polarnode.

    python examples/verify.py out/demo/trajectories.jsonl [--model polarnode/models/tiny] [--tolerance 0.02]

For each trace: one forward pass in float32, log-softmax of the logits over each turn's temperature, compared
at the trainable tokens. For each turn in it: the trace up to the turn's sample is the prompt whose SHA-256
was recorded. Exit code 1 if anything differs, or the file has no trace. A trace with an offset (the task set
max_row_tokens) is joined with the session's other traces of its row. Where context was cut away it cannot be
judged from this file; such traces are counted and reported.
"""

import argparse
import array
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Trajectory = dict[str, Any]
# and the values that change no logit
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--model", type=Path, default=Path(__file__).parent.parent / "polarnode" / "models" / "tiny"
    )
    parser.add_argument("--tolerance", type=float, default=2e-2)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    traces = tokens = cut = 0
    worst, wrong = 0.0, []
    for line in given.file.read_text().splitlines():
        trajectory = json.loads(line)
        for number, trace in enumerate(trajectory["traces"]):
            row = put_together(trajectory, trace)
            if row is None:
                cut += 1
                continue
            off, problems = check(model, trajectory, row, given.tolerance)
            worst, traces, tokens = max(worst, off), traces + 1, tokens + sum(trace["loss_mask"])
            wrong += [f"{trajectory['session_id']} trace {number}: {sentence}" for sentence in problems]
    print(f"{traces} traces, {tokens} trainable tokens, largest difference of a logprob {worst:.2e}")
    if cut:
        print(f"{cut} traces are not judged: max_row_tokens cut away what their samples were conditioned on")
    print(
        "\n".join(wrong)
        or ("every turn's prompt is an exact prefix of its trace" if traces else "there is nothing to check")
    )
    return int(bool(wrong) or not traces)


def put_together(trajectory: Trajectory, trace: dict[str, Any]) -> dict[str, Any] | None:
    """The row of a slice from its first token on, as one trace; None when no trace shows some of what came
    before the slice.
    """
    offset = trace.get("offset", 0)
    if not offset:
        return trace
    turns = {turn["index"]: turn for turn in trajectory["turns"]}
    known: dict[int, list[int]] = {}  # what each turn brought, prompt and sample
    for other in trajectory["traces"]:
        for index, start, end in brought(turns, other["turn_spans"][-1]["turn"]):
            if start >= other.get("offset", 0):
                known[index] = other["token_ids"][
                    start - other.get("offset", 0) : end - other.get("offset", 0)
                ]
    line = brought(turns, trace["turn_spans"][-1]["turn"])
    if any(index not in known for index, start, _ in line if start < offset):
        return None
    before = [token for index, start, _ in line if start < offset for token in known[index]][:offset]
    moved = [
        span | {"start": span["start"] + offset, "end": span["end"] + offset} for span in trace["turn_spans"]
    ]
    whole = {"token_ids": before + trace["token_ids"], "turn_spans": moved}
    return trace | whole | {name: [0] * offset + trace[name] for name in ("loss_mask", "logprobs")}


def brought(turns: dict[int, Any], last: int) -> list[tuple[int, int, int]]:
    """The turns from a root to `last`, and from where to where in their row lie the tokens that each
    brought.
    """
    line = [turns[last]]
    while line[-1].get("parent") is not None:
        line.append(turns[line[-1]["parent"]])
    ends = [turn["prompt_length"] + turn["sampled_length"] for turn in line]
    return [(turn["index"], start, end) for turn, start, end in zip(line, [*ends[1:], 0], ends, strict=True)][
        ::-1
    ]


def check(
    model: Any, trajectory: Trajectory, trace: dict[str, Any], tolerance: float
) -> tuple[float, list[str]]:
    """The largest |recorded - recomputed| of a trace, and a sentence for everything that is off."""
    if trajectory.get("arrays", "json") != "json":
        sys.exit("the arrays are base64: export them with arrays=json")
    turns = {turn["index"]: turn for turn in trajectory["turns"]}
    wrong = broken_prefixes(turns, trace)
    trainable = {at for at, mask in enumerate(trace["loss_mask"]) if mask}
    if trainable - {at for span in trace["turn_spans"] for at in range(span["start"], span["end"])}:
        wrong.append("a trainable token was not sampled by any turn")
    if any(trace["logprobs"][at] is None or not math.isfinite(trace["logprobs"][at]) for at in trainable):
        return 0.0, [*wrong, "a logprob is no number"]
    off = largest_difference(model, turns, trace)
    return off, wrong + ([f"logprobs differ by {off:.4f}"] if off > tolerance else [])


def heat(turn: dict[str, Any]) -> float:
    """What a turn's logits were divided by. Recorded logprobs are from before top_p, top_k and min_p; greedy
    ones are of the plain logits.
    """
    used = turn["sampling"]["used"]
    if any(used.get(name) not in (None, neutral) for name, neutral in PENALTIES.items()):
        sys.exit(f"turn {turn['index']} was sampled with a penalty, which this does not recompute")
    return float(used.get("temperature") or 1.0)


@torch.no_grad()
def largest_difference(model: Any, turns: dict[int, Any], trace: dict[str, Any]) -> float:
    """max |recorded - recomputed| over the trainable tokens of a trace."""
    ids, mask = torch.tensor(trace["token_ids"]), torch.tensor(trace["loss_mask"], dtype=torch.bool)
    recorded = torch.tensor([0.0 if value is None else value for value in trace["logprobs"]])
    logits = model(ids[None]).logits[0].float()
    worst = 0.0
    for span in trace["turn_spans"]:
        start, end = span["start"], span["end"]
        own = torch.log_softmax(logits[start - 1 : end - 1] / heat(turns[span["turn"]]), dim=-1).gather(
            1, ids[start:end, None]
        )[:, 0]
        difference = (own - recorded[start:end]).abs()[mask[start:end]]
        worst = max(worst, float(difference.max()) if len(difference) else 0.0)
    return worst


def broken_prefixes(turns: dict[int, Any], trace: dict[str, Any]) -> list[str]:
    """Turns whose prompt is not what their trace holds before their sample."""
    broken = []
    for span in trace["turn_spans"]:
        turn = turns[span["turn"]]
        prefix = array.array("i", trace["token_ids"][: span["start"]])
        if (
            len(prefix) != turn["prompt_length"]
            or hashlib.sha256(prefix.tobytes()).hexdigest() != turn["prompt_sha256"]
        ):
            broken.append(f"the prompt of turn {span['turn']} is not the trace's prefix")
    return broken


if __name__ == "__main__":
    sys.exit(main())
