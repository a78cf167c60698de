"""Responses: who is asking, from the headers of Codex and opencode and from what they repeat in the body.

The rule for whoever edits it: an agent has a name only where its harness says that it is not the main one, because a second name for the
main agent would make a second one of it.
"""

from collections.abc import Mapping
from typing import Final

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.providers.openai_responses.shapes import ResponsesRequest
from polarnode.wire import read_json

_SESSION: Final = ("session-id", "session_id", "x-session-id", "x-litellm-session-id")
_METADATA: Final = "x-codex-turn-metadata"
_KINDS: Final = {"compaction": "compaction", "prewarm": "auxiliary"}  # of Codex's `request_kind`; `turn` is the usual


def hints(request: ResponsesRequest, headers: Mapping[str, str], *, compacts: bool) -> dict[str, str]:
    """What is known of who asks; only what was said. `compacts`: the request itself says that it is a compaction."""
    body = _object(request.client_metadata)
    turn = _turn(headers.get(_METADATA)) or _turn(_text(body.get(_METADATA)))
    parent = headers.get("x-codex-parent-thread-id") or _text(turn.get("parent_thread_id")) or headers.get("x-parent-session-id") or ""
    helper = headers.get("x-openai-subagent") or _text(turn.get("subagent_kind"))
    session = _first(headers, _SESSION) or _text(body.get("session_id")) or _text(request.prompt_cache_key)
    agent = (headers.get("thread-id") or _text(turn.get("thread_id")) or session) if parent or helper else ""
    said = {"session": session, "agent": agent, "parent": parent, "kind": "compaction" if compacts else _kind(turn, helper, parent)}
    known = {name: value for name, value in said.items() if value}
    return {"session": "", "agent": "", "parent": ""} | known if known else {}


def _kind(turn: Mapping[str, Json], helper: str, parent: str) -> str:
    """`compact` is Codex's own word for the helper that writes summaries."""
    if "compact" in helper:
        return "compaction"
    return _KINDS.get(_text(turn.get("request_kind"))) or ("subagent" if helper or parent else "")


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((headers[name] for name in names if headers.get(name)), "")


def _turn(header: str | None) -> Mapping[str, Json]:
    """Codex's account of the turn, JSON in a header; nothing where it is none."""
    try:
        return _object(read_json(header.encode("utf-8", "replace"))) if header else {}
    except Refused:
        return {}


def _object(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""
