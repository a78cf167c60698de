"""Canonical sessions whose rows are kept in tests/data/golden: a few tokens each, so that a person can read a
change of them.

`python tests/kits/golden_kit.py` writes the files anew. A session is deterministic: what is sampled is
written here, how it is cut into rows is not.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "golden"
RECORDED = Path(__file__).parents[1] / "data" / "providers"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from sample_kit import letter_by_letter  # noqa: E402
from talk_kit import (  # noqa: E402
    Ask,
    Desk,
)
from tokens_kit import (  # noqa: E402
    CALL,
    CLOSE,
    END,
    OPEN,
    model,
)
from wire_kit import (  # noqa: E402
    CHAT,
    WIRES,
    Entry,
    Wire,
)

from polarnode.core.conversation import (  # noqa: E402
    Answer,
    Message,
    TextPart,
    ThinkingPart,
)
from polarnode.gateway.replay import Speaker  # noqa: E402
from polarnode.merge.builders import prefix_merging  # noqa: E402
from polarnode.merge.invariants import check  # noqa: E402

LOOK = ("<tool_call>", '\n{"name": "look", "arguments": {"path": "a"}}\n', "</tool_call>")


def sp(*pieces: str) -> Any:
    return model().spelled(*pieces)


def begun(wire: Wire) -> list[Entry]:
    return [*wire.said("system", "Be brief."), *wire.said("user", "Go.")]


def run_turn(
    desk: Desk, wire: Wire, history: Sequence[Entry], sample: Any, text: str, finish: str | None = None
) -> list[Entry]:
    """One turn, and what its client adds."""
    answer = wire.answered(desk.say(wire.ask(history), sample, finish).sent, False)
    calls = wire.calls(answer)
    return [
        *history,
        *answer,
        *(wire.results(calls, [text] * len(calls)) if calls else wire.said("user", text)),
    ]


def loop(wire: Wire) -> Desk:
    """Thought, text and a call; a result; an answer."""
    desk = Desk()
    history = run_turn(
        desk, wire, begun(wire), sp(OPEN, "\nHm.\n", CLOSE, "\n\nI look.", *LOOK, END), "one\ntwo"
    )
    run_turn(desk, wire, history, sp("Two lines.", END), "thanks")
    return desk


def fork() -> Desk:
    """One trunk, two ends: the trunk is trained once."""
    desk = Desk()
    trunk = run_turn(desk, CHAT, begun(CHAT), sp("Yes?", END), "left")
    run_turn(desk, CHAT, trunk, sp("Left.", END), "-")
    run_turn(desk, CHAT, [*trunk[:-1], *CHAT.said("user", "right")], sp("Right.", END), "-")
    return desk


def cuts() -> Desk:
    """A text, a thought and a call that were cut, each gone on from; samples in single letters."""
    desk = Desk()
    history = run_turn(desk, CHAT, begun(CHAT), letter_by_letter("One and", model()), "on")
    history = run_turn(desk, CHAT, history, sp(OPEN, "\nHm, so"), "well?")
    history = run_turn(desk, CHAT, history, sp("I look.", CALL, '\n{"name": "lo'), "go on")
    run_turn(desk, CHAT, history, sp("Done.", END), "-")
    return desk


def retried() -> Desk:
    """A client that leaves and asks again: what it left is superseded. One that is resumed: nothing is."""
    desk = Desk()
    ask = CHAT.ask(begun(CHAT))
    left = desk.begin(ask)
    left.give(sp("Half an"))
    left.leave()
    again = desk.say(ask, sp("Whole.", END))
    history = [*begun(CHAT), *CHAT.answered(again.sent, False), *CHAT.said("user", "more")]
    cut = desk.begin(CHAT.ask(history))
    cut.give(sp("Some "))
    cut.leave()
    resumed = desk.begin(CHAT.ask(history), resume=2)
    resumed.give(sp("more.", END), "stop", version="1")
    return desk


def choices() -> Desk:
    """Three answers to one request."""
    desk = Desk()
    asking = desk.begin(CHAT.ask(begun(CHAT), n=3))
    for choice in range(3):
        asking.give(sp(f"Answer {choice}.", END), "stop", choice=choice)
    return desk


def compacted() -> Desk:
    """A summary is asked for, and the conversation begins again from it."""
    desk = Desk()
    history = run_turn(desk, CHAT, begun(CHAT), sp("Yes.", END), "and?")
    ask = [*history, *CHAT.said("user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools")]
    run_turn(desk, CHAT, ask, sp("We said yes.", END), "-")
    told = "This session is being continued from a previous conversation: We said yes."
    run_turn(desk, CHAT, [history[0], *CHAT.said("user", told)], sp("So.", END), "-")
    return desk


def recorded(harness: str) -> Callable[[], Desk]:
    """What a harness really sent, three requests; each answer is spelled as the template writes what the next
    request shows of it.
    """

    def play() -> Desk:
        desk = Desk()
        asks = [json.loads(file.read_text()) for file in sorted(RECORDED.glob(f"{harness}_?.json"))]
        asked = [
            Ask(
                path=each["target"],
                body=each["body"],
                headers={name.lower(): value for name, value in dict(each.get("headers") or {}).items()},
            )
            for each in asks
        ]
        read = [desk.read(ask).conversation for ask in asked]
        for number, ask in enumerate(asked):
            shown = (
                read[number + 1].messages[len(read[number].messages)]
                if number + 1 < len(read)
                else Message(role="assistant", text="Done.")
            )
            desk.say(ask, Speaker(model().template).sample(message_answer(shown), read[number]))
        return desk

    return play


def message_answer(message: Message) -> Answer:
    thinking = (ThinkingPart(message.thinking),) if message.thinking else ()
    text = (TextPart(message.text),) if message.text else ()
    return Answer(
        parts=(*thinking, *text, *message.calls), finish_reason="tool_calls" if message.calls else "stop"
    )


HARNESSES = sorted({file.stem.rpartition("_")[0] for file in RECORDED.glob("*_1.json")})
SESSIONS: dict[str, Callable[[], Desk]] = {
    **{f"loop_{wire.name}": (lambda wire=wire: loop(wire)) for wire in WIRES},  # type: ignore[misc]
    "fork": fork,
    "cuts": cuts,
    "retried": retried,
    "choices": choices,
    "compacted": compacted,
    **{f"recorded_{harness}": recorded(harness) for harness in HARNESSES},
}


def golden(name: str) -> Any:
    """A session's rows: the ids, which of them are trained, and both in words."""
    desk = SESSIONS[name]()
    built = prefix_merging(desk.turns, {})
    check(desk.turns, built)
    rows = [
        {
            "tokens": list(trace.token_ids),
            "mask": "".join(map(str, trace.loss_mask)),
            "turns": [[span.turn, span.start, span.end] for span in trace.turn_spans],
            "versions": [[span.version, span.start, span.end] for span in trace.version_spans],
            "reads": reads(desk, trace),
        }
        for trace in built.traces
    ]
    turns = [
        [turn.index, turn.kind, turn.reason, turn.role, turn.state, turn.parent, turn.close_length]
        for turn in sorted(desk.turns, key=lambda turn: turn.index)
    ]
    return {"rows": rows, "left_out": [[left.turn, left.reason] for left in built.left_out], "turns": turns}


def reads(desk: Desk, trace: Any) -> list[str]:
    """The row in words, trained stretches after a star."""
    runs = groupby(zip(trace.token_ids, trace.loss_mask, strict=True), key=lambda pair: pair[1])
    return [f"{'*' if mask else ' '} {desk.text([token for token, _ in run])}" for mask, run in runs]


def written(value: Any) -> str:
    """JSON with lists of numbers on one line."""
    text = json.dumps(value, ensure_ascii=False, indent=1)
    short = r"\[\s+((?:(?:-?\d+|null|\"[^\"\n]{0,30}\"),?\s+)+)\]"
    return re.sub(short, lambda found: "[" + re.sub(r"\s+", " ", found[1]).strip() + "]", text) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for session in SESSIONS:
        (FOLDER / f"{session}.json").write_text(written(golden(session)))
