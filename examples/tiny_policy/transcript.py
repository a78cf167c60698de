"""Whole sessions as text: what the node gives the model, and which parts the model samples itself.

The pieces are those of the node: one full render, then the sample, then the suffix that the template renders
after a turn's end. Nothing is rendered twice.
"""

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from examples.tiny_policy.demos import DEMOS, Hand
from examples.tiny_policy.endpoint import Answer, Call
from examples.tiny_policy.prompts import Prompt
from examples.tiny_policy.tasks import Task
from examples.tiny_policy.tools import Submitted, Workbench, use

TURN_END = "<|im_end|>"
OPENING = "<|im_start|>assistant\n"
NO_THINKING = "<think>\n\n</think>\n\n"
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text().strip()


@dataclass(frozen=True)
class Piece:
    """A stretch of a session's text; `said` if the model sampled it."""

    text: str
    said: bool


Transcript = tuple[Piece, ...]


def render(prompt: Prompt) -> str:
    """The text of a session's first request, up to and including the model's opening."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        [prompt.messages], tools=prompt.tools, chat_template=TEMPLATE, add_generation_prompt=True
    )
    return str(texts[0])


def spoken(answer: Answer, rng: random.Random | None = None) -> str:
    """What the model writes for `answer`, its turn's end included; `rng` draws an odd envelope for a call."""
    parts = [f"<think>\n{answer.thinking}\n</think>\n\n"] if answer.thinking else []
    parts.append("\n".join([answer.text] * bool(answer.text) + [_call(call, rng) for call in answer.calls]))
    return "".join(parts) + TURN_END


def _call(call: Call, rng: random.Random | None) -> str:
    envelope = '{{"name": {name}, "arguments": {arguments}}}'
    if rng and ('":' in call.arguments and '": ' not in call.arguments):
        envelope = '{{"name":{name},"arguments":{arguments}}}'
    return (
        "<tool_call>\n"
        + envelope.format(name=json.dumps(call.name), arguments=call.arguments)
        + "\n</tool_call>"
    )


def response(result: str) -> str:
    """What the template renders between a turn's end and the next opening, for one tool result."""
    return f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response>{TURN_END}\n{OPENING}"


def perform(harness: str, hand: Hand, thinking: bool = True) -> Transcript:
    """Let the demonstrator work on a bench and write down the session after its prompt."""
    opening = "" if thinking else NO_THINKING
    pieces = [Piece(opening, False)] if opening else []
    demo = DEMOS[harness](hand)
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        bench = Workbench(Path(folder), hand.task, trusted=True)
        answer = next(demo)
        try:
            while True:
                pieces.append(Piece(spoken(answer, hand.rng), True))
                result = use(harness, bench, answer.calls[0]) if answer.calls else ""
                answer = demo.send(result)
                pieces.append(Piece(response(result) + opening, False))
        except (Submitted, StopIteration):
            return tuple(pieces)


def demonstrate(harness: str, task: Task, seed: int, noise: float) -> Transcript:
    """The transcript of one demonstration, a function of its seed."""
    rng = random.Random(seed)
    thinking = rng.random() > 0.08
    hand = Hand(task, rng, noise, thinks=thinking and rng.random() < 0.5)
    return perform(harness, hand, thinking)
