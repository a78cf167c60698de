"""Whether a template wrote all that a client said: no text may vanish in it silently.

The rule for whoever edits it: texts are looked for as the template saw them, less the blanks around them, which templates trim; one that is
neither there nor there as JSON writes it is refused, with a sentence, because the model would answer without ever having seen it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.tokens.guard import Guard

Shape = Mapping[str, Json]


def check_present(messages: Sequence[Shape], tools: Sequence[Shape], text: str, guard: Guard) -> None:
    """Refused if a message's text, a call's name, or a tool's name or description is not in a render. All of it is still guarded."""
    at = 0
    for what, said in _said(messages, tools):
        found = _place(said, text, at)
        if found < 0:
            path = "$.tools" if what == "tool" else "$.messages"
            raise Refused(
                f"this model's chat template leaves out the {what} {_short(guard.show(said))}: the model would never see it; "
                "give the model a template that shows it, or do not send it",
                path=path,
            )
        at = found


def _said(messages: Sequence[Shape], tools: Sequence[Shape]) -> Iterator[tuple[str, str]]:
    for tool in tools:
        function = tool["function"]
        if isinstance(function, dict):
            yield from (("tool", value) for key in ("name", "description") if isinstance(value := function[key], str) and value.strip())
    for message in messages:
        content, calls = message["content"], message.get("tool_calls", ())
        if isinstance(content, str) and content.strip():
            yield f"{message['role']} message", content.strip()
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and isinstance(function := call["function"], dict) and str(function["name"]).strip():
                yield "call", str(function["name"]).strip()


def _place(wanted: str, text: str, at: int) -> int:
    """Where a text stands, -1 if nowhere: mostly behind the one before it, so that a conversation is looked through once."""
    found = text.find(wanted, at)
    if found >= 0:
        return found
    escaped = json.dumps(wanted, ensure_ascii=False)[1:-1]
    places = (text.find(spelling, start) for start in (at, 0) for spelling in (escaped, wanted))
    return next((place for place in places if place >= 0), -1)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
