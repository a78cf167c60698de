"""What harnesses do to a conversation between two requests without meaning anything by it, as changes of a
request's JSON.

Each is seen in some harness, or is what its SDK does. An echo that an API has no way of doing changes nothing
there. Whoever adds one makes sure that a person would call the two requests the same.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

from wire_kit import Entry, Wire

Echo = Callable[[Wire, Any], Any]
_LISTS = ("messages", "input", "contents")


def entries(body: Any) -> list[Entry]:
    return next(body[name] for name in _LISTS if name in body)


def ours(wire: Wire, body: Any) -> Iterator[Entry]:
    """The assistant's entries."""
    yield from (entry for entry in entries(body) if wire.ours(entry))


def texts(wire: Wire, body: Any) -> Iterator[tuple[Any, Any]]:
    """Where the assistant's visible texts stand: (holder, key). An answer here has one text."""
    for entry in ours(wire, body):
        content = entry.get("content", entry.get("parts"))
        if isinstance(content, str):
            yield entry, "content"
        for part in content if isinstance(content, list) else ():
            if (
                part.get("type", "text") in ("text", "output_text")
                and "text" in part
                and not part.get("thought")
            ):
                yield part, "text"


def arguments(wire: Wire, body: Any) -> Iterator[tuple[Any, Any]]:
    """Where the arguments of calls stand."""
    for entry in ours(wire, body):
        for call in entry.get("tool_calls") or ():
            yield call["function"], "arguments"
        if "arguments" in entry:
            yield entry, "arguments"
        content = entry.get("content", entry.get("parts"))
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "tool_use":
                yield part, "input"
            if "functionCall" in part:
                yield part["functionCall"], "args"


def everywhere(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Every member of every object, changed from the inside out."""
    if isinstance(value, list):
        return [everywhere(item, change) for item in value]
    if isinstance(value, dict):
        return {name: change(name, everywhere(item, change)) for name, item in value.items()}
    return value


_ID_FIELDS = ("id", "call_id", "tool_call_id", "tool_use_id")


def renamed(body: Any, spell: Callable[[str], str]) -> Any:
    """Call ids in another spelling, in the calls and in their results."""
    return everywhere(
        body,
        lambda name, item: (
            spell(item)
            if name in _ID_FIELDS and isinstance(item, str) and item.startswith(("call_", "toolu_"))
            else item
        ),
    )


def trims_text(wire: Wire, body: Any) -> Any:
    for holder, key in texts(wire, body):
        holder[key] = holder[key].strip()
    return body


def pads_text(wire: Wire, body: Any) -> Any:
    for holder, key in texts(wire, body):
        holder[key] = f"\n {holder[key]}\t\r\n"
    return body


def drops_thinking(wire: Wire, body: Any) -> Any:
    kept = [entry for entry in entries(body) if entry.get("type") != "reasoning"]
    for entry in kept:
        entry.pop("reasoning_content", None)
        for name in ("content", "parts"):
            if wire.ours(entry) and isinstance(entry.get(name), list):
                entry[name] = [
                    part for part in entry[name] if part.get("type") != "thinking" and not part.get("thought")
                ]
    name = next(name for name in _LISTS if name in body)
    # a content of thoughts alone is left out
    return body | {name: [entry for entry in kept if entry.get("parts") != []]}


def rewrites_thinking(wire: Wire, body: Any) -> Any:
    for entry in ours(wire, body):
        if entry.get("reasoning_content"):  # an answer without thoughts has none to rewrite
            entry["reasoning_content"] = "in short: hm"
        for part in (
            entry.get("content") or entry.get("parts") or ()
            if not isinstance(entry.get("content"), str)
            else ()
        ):
            if "thinking" in part:
                part["thinking"] = "in short: hm"
            elif part.get("thought"):
                part["text"] = "in short: hm"
    return body


def drops_signatures(wire: Wire, body: Any) -> Any:
    signed = ("signature", "thoughtSignature", "encrypted_content")
    return everywhere(body, lambda name, item: "" if name in signed else item)


def resigns(wire: Wire, body: Any) -> Any:
    """A signature as another server would write it: it proves nothing."""
    forged = b64encode(b"000000" + b"0" * 10).decode()
    return everywhere(body, lambda name, item: forged if name in ("signature", "thoughtSignature") else item)


def sorts_arguments(wire: Wire, body: Any) -> Any:
    for holder, key in arguments(wire, body):
        said = json.loads(holder[key]) if isinstance(holder[key], str) else holder[key]
        if isinstance(said, dict):
            again = dict(sorted(said.items()))
            holder[key] = json.dumps(again, separators=(",", ":")) if isinstance(holder[key], str) else again
    return body


def _respell(value: Any) -> Any:
    if isinstance(value, list):
        return [_respell(item) for item in value]
    if isinstance(value, dict):
        return {name: _respell(item) for name, item in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def respells_numbers(wire: Wire, body: Any) -> Any:
    """1 as 1.0 and 1.0 as 1, as JavaScript and Python do to each other."""
    for holder, key in arguments(wire, body):
        holder[key] = (
            json.dumps(_respell(json.loads(holder[key])), indent=1)
            if isinstance(holder[key], str)
            else _respell(holder[key])
        )
    return body


def strips_ids(wire: Wire, body: Any) -> Any:
    """OpenClaw keeps letters and digits only."""
    return renamed(body, lambda found: found.replace("_", ""))


def renames_ids(wire: Wire, body: Any) -> Any:
    """One API's prefix for another's, as gateways do."""
    return renamed(body, lambda found: f"fc_{found.partition('_')[2]}")


def drops_ids(wire: Wire, body: Any) -> Any:
    """The places that no API demands: ids of items, and Google's of calls and results."""
    drop = {"openai_responses": lambda entry: entry.pop("id", None)}.get(wire.name, lambda entry: None)
    for entry in entries(body):
        drop(entry)
        for part in entry.get("parts") or ():
            for name in ("functionCall", "functionResponse"):
                part.get(name, {}).pop("id", None)
    return body


def lists_texts(wire: Wire, body: Any) -> Any:
    """A text as a list of one part."""
    for entry in entries(body):
        for name in ("content", "output"):
            if isinstance(entry.get(name), str):
                entry[name] = [{"type": "text" if "role" in entry else "input_text", "text": entry[name]}]
        for part in entry.get("content") if isinstance(entry.get("content"), list) else ():
            if part.get("type") == "tool_result" and isinstance(part["content"], str):
                part["content"] = [{"type": "text", "text": part["content"]}]
    return body


def joins_texts(wire: Wire, body: Any) -> Any:
    """A list of one part as a text."""
    for entry in entries(body):
        content = entry.get("content")
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0].get("text"), str):
            entry["content"] = content[0]["text"]
    return body


def halves_text(wire: Wire, body: Any) -> Any:
    """Our text in two parts."""
    for entry in ours(wire, body):
        name = "parts" if "parts" in entry else "content"
        content = entry.get(name)
        if isinstance(content, str) and content:
            entry[name] = [{"type": "text", "text": content[:3]}, {"type": "text", "text": content[3:]}]
        elif isinstance(content, list):
            entry[name] = [half for part in content for half in _halves(part)]
    return body


def _halves(part: Any) -> list[Any]:
    if not isinstance(part.get("text"), str) or part.get("thought"):
        return [part]
    return [part | {"text": part["text"][:3]}, part | {"text": part["text"][3:]}]


def splits_messages(wire: Wire, body: Any) -> Any:
    """Each part of our answer as a message of its own, as Claude Code and Google's SDK keep it."""
    name = "contents" if wire.name == "google" else "messages"
    if wire.name not in ("google", "anthropic"):
        return body
    inner = "parts" if wire.name == "google" else "content"
    split = [
        [entry | {inner: [part]} for part in entry[inner]] if wire.ours(entry) else [entry]
        for entry in body[name]
    ]
    return body | {name: [entry for run in split for entry in run]}


def decorates(wire: Wire, body: Any) -> Any:
    """Fields that mean nothing to a model."""
    more: dict[str, Any] = {
        "openai_chat": {
            "refusal": None,
            "audio": None,
            "function_call": None,
            "annotations": [],
            "name": None,
        },
        "anthropic": {},
        "openai_responses": {"status": "completed"},
        "google": {},
    }[wire.name]
    for entry in entries(body):
        if wire.ours(entry):
            entry.update({name: value for name, value in more.items() if name not in entry})
        for place, part in enumerate(entry.get("content") if isinstance(entry.get("content"), list) else ()):
            if (
                wire.name == "anthropic"
                and part.get("type") in ("text", "tool_result")
                and place == len(entry["content"]) - 1
            ):
                part["cache_control"] = {"type": "ephemeral"}
            if part.get("type") == "output_text":
                part |= {"annotations": [], "logprobs": []}
        for place, call in enumerate(entry.get("tool_calls") or ()):
            call["index"] = place
    return body


def spells_nothing_otherwise(wire: Wire, body: Any) -> Any:
    """null for "", and empty lists where there is nothing."""
    for entry in entries(body):
        if wire.name == "openai_chat" and wire.ours(entry):
            entry["content"] = entry.get("content") or []
            entry.setdefault("tool_calls", None)
            if not entry.get("reasoning_content"):
                entry["reasoning_content"] = None
    return body


def reorders_keys(wire: Wire, body: Any) -> Any:
    """Every object's members in another order, tool schemas too."""
    if isinstance(body, list):
        return [reorders_keys(wire, item) for item in body]
    return (
        {name: reorders_keys(wire, body[name]) for name in reversed(body)} if isinstance(body, dict) else body
    )


def asks_otherwise(wire: Wire, body: Any) -> Any:
    """The same question with other settings."""
    if wire.name == "google":
        return body | {
            "generationConfig": body["generationConfig"] | {"temperature": 0.3, "maxOutputTokens": 77}
        }
    return (
        body
        | {"temperature": 0.3, "metadata": {"user_id": "u"}}
        | ({"max_tokens": 77} if wire.name in ("openai_chat", "anthropic") else {})
    )


ECHOES: tuple[Echo, ...] = (
    trims_text, pads_text, drops_thinking, rewrites_thinking, drops_signatures, resigns, sorts_arguments, respells_numbers, strips_ids, renames_ids,
    drops_ids, lists_texts, joins_texts, halves_text, splits_messages, decorates, spells_nothing_otherwise, reorders_keys, asks_otherwise,
)  # fmt: skip
