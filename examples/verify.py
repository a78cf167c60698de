"""Checks a trajectories.jsonl with nothing of polarnode: plain transformers says whether every recorded logprob is the model's own.

For each trace: one forward pass in float32, log-softmax of the logits (over the sampling temperature), compared at the trainable tokens; for
each turn in it: the trace up to the turn's sample is the prompt whose SHA-256 was recorded. Exit code 1 when anything is off.

    python examples/verify.py out/demo/trajectories.jsonl [--model polarnode/models/tiny] [--tolerance 0.02]
"""

import argparse
import array
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Trajectory = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent.parent / "polarnode" / "models" / "tiny")
    parser.add_argument("--tolerance", type=float, default=2e-2)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    traces = tokens = 0
    worst, wrong = 0.0, []
    for line in given.file.read_text().splitlines():
        trajectory = json.loads(line)
        for number, trace in enumerate(trajectory["traces"]):
            off, count = largest_difference(model, trace, temperature(trajectory))
            worst, traces, tokens = max(worst, off), traces + 1, tokens + count
            wrong += [f"{trajectory['session_id']} trace {number}: logprobs differ by {off:.4f}"] if off > given.tolerance else []
            wrong += [f"{trajectory['session_id']} trace {number}: {sentence}" for sentence in broken_prefixes(trajectory, trace)]
    print(f"{traces} traces, {tokens} trainable tokens, largest difference of a logprob {worst:.2e}")
    print("\n".join(wrong) or "every turn's prompt is an exact prefix of its trace")
    return int(bool(wrong) or not traces)


def temperature(trajectory: Trajectory) -> float:
    """The temperature the session sampled at: recorded logprobs are of the distribution that was sampled from."""
    found = {turn["sampling"]["used"].get("temperature") or 1.0 for turn in trajectory["turns"]}
    if len(found) > 1:
        sys.exit(f"session {trajectory['session_id']} sampled at several temperatures {found}: check it turn by turn")
    return float(found.pop()) if found else 1.0


@torch.no_grad()
def largest_difference(model: Any, trace: dict[str, Any], heat: float) -> tuple[float, int]:
    """max |recorded - recomputed| over the trainable tokens of a trace, and their number."""
    ids = torch.tensor(trace["token_ids"])
    mask = torch.tensor(trace["loss_mask"], dtype=torch.bool)[1:]
    logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float() / heat, dim=-1)
    own = logprobs.gather(1, ids[1:, None])[:, 0]
    difference = (own - torch.tensor(trace["logprobs"])[1:]).abs()[mask]
    return (float(difference.max()) if len(difference) else 0.0), int(mask.sum())


def broken_prefixes(trajectory: Trajectory, trace: dict[str, Any]) -> list[str]:
    """Turns whose prompt is not what their trace holds before their sample."""
    turns = {turn["index"]: turn for turn in trajectory["turns"]}
    broken = []
    for span in trace["turn_spans"]:
        turn = turns[span["turn"]]
        prefix = array.array("i", trace["token_ids"][: span["start"]])
        if len(prefix) != turn["prompt_length"] or hashlib.sha256(prefix.tobytes()).hexdigest() != turn["prompt_sha256"]:
            broken.append(f"the prompt of turn {span['turn']} is not the trace's prefix")
    return broken


if __name__ == "__main__":
    sys.exit(main())
