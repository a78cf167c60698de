"""A session's model calls as Polar's CompletionRecords, and Polar's event stream for dashboards.

Each CompletionRecord holds its call's whole conversation, so together they grow with the square of a
session's length. They are therefore made and written one at a time. `original_request` is an empty object,
because bodies are kept only if the node records requests.

The event stream (`hello`, `session.state_changed`, `ping`) polls, so a dashboard may miss changes between two
looks. The stream of trajectories misses nothing. Keep scopes and nurseries away from its `yield`s.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import trio
from attrs import frozen
from quart import Response

from polarnode.api.service import NodeService
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.conversation import Json
from polarnode.core.status import LiveSessionStatus
from polarnode.core.trajectory import Turn, sequence
from polarnode.http.asgi import RouteRow, event_response
from polarnode.integrations.polar.answers import live_sessions, moment
from polarnode.journal.log.port import LogUnavailable
from polarnode.trainers.polar import (
    PHASE_WORDS,
    answer_json,
    completion_id,
    finish_word,
    messages_json,
    outcome_word,
    prompt_of,
    tools_json,
)

# ── completions ────────────────────────────────────────────────────────────

T = TypeVar("T")


class RunInThread(Protocol):
    """`JournalReader.run_in_thread`: runs a long call off the event loop."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]: ...


async def completion_pieces(
    run: RunInThread, head: dict[str, Json], turns: Sequence[Turn], *, model: str, requested: str | None
) -> AsyncIterator[bytes]:
    """A JSON object: the fields of `head`, and `completions` in the order of the calls."""
    by_index = {turn.index: turn for turn in turns}
    yield dump_json(head)[:-1] + b',"completions":['
    for place, turn in enumerate(turns):
        body = await run(partial(_body, turn, by_index, model=model, requested=requested))
        yield b"," + body if place else body
    yield b"]}"


def _body(turn: Turn, turns: dict[int, Turn], *, model: str, requested: str | None) -> bytes:
    return dump_json(completion_json(turn, turns, model=model, requested=requested))


def completion_json(
    turn: Turn, turns: dict[int, Turn], *, model: str, requested: str | None
) -> dict[str, Json]:
    """One model call."""
    prompt = prompt_of(turns, turn.index)
    return {
        "completion_id": completion_id(turn),
        "timestamp": moment(turn.started + turn.ended_s),
        "request": {
            "model": model,
            "messages": None if prompt is None else messages_json(prompt.messages),
            "tools": None if prompt is None else tools_json(prompt),
            **{name: value for name, value in plain(turn.used).items() if value not in (None, [])},
        },
        "original_request": {},
        "response": _response_json(turn, turns, model=model),
        "metadata": {
            "turn": turn.index,
            "api_type": turn.provider,
            "model_requested": requested,
            "state": turn.state,
            "role": turn.role,
            "lineage": turn.lineage,
            "version_spans": plain(turn.version_spans),
            "notes": list(turn.notes),
        },
    }


def _response_json(turn: Turn, turns: dict[int, Turn], *, model: str) -> dict[str, Json]:
    usage = turn.usage
    try:
        ids: Json = list[Json](sequence(turns, turn.index)[: turn.prompt_length])
    except KeyError:  # one of the turns before it is no longer kept
        ids = None
    entries: list[Json] = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
        for token, logprob in zip(turn.sampled, turn.logprobs, strict=True)
    ]
    return {
        "id": completion_id(turn),
        "object": "chat.completion",
        "created": int(turn.started),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": answer_json(turn.answer),
                "finish_reason": finish_word(turn.finish_reason),
                "logprobs": {"content": entries},
                "input_token_ids": ids,
                "token_ids": list[Json](turn.sampled),
            }
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }


# ── event stream ────────────────────────────────────────────────────────────

LOOK_S = 1.0  # between two looks at a table of at most a few hundred sessions
PING_INTERVAL_S = 15.0  # the same as Polar's


@frozen(kw_only=True)
class EventRoutes:
    """The handler of Polar's event stream."""

    service: NodeService

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", "/events", self.events)

    async def events(self) -> Response:
        await trio.lowlevel.checkpoint()
        return event_response(self._stream())

    async def _stream(self) -> AsyncIterator[bytes]:
        words: dict[str, str] = {
            session_id: PHASE_WORDS[status.phase]
            for session_id, status in live_sessions(self.service).items()
        }
        yield _sse_event("hello", {"node_id": self.service.node_id, "sessions": len(words)})
        last_write = trio.current_time()
        while True:
            await trio.sleep(LOOK_S)
            live = live_sessions(self.service)
            for piece in (*self._moved(words, live), *await self._ended(words, live)):
                yield piece
                last_write = trio.current_time()
            if trio.current_time() >= last_write + PING_INTERVAL_S:
                yield _sse_event("ping", {"node_id": self.service.node_id})
                last_write = trio.current_time()

    def _moved(self, words: dict[str, str], live: Mapping[str, LiveSessionStatus]) -> list[bytes]:
        """Events of sessions that began, or are in another phase now."""
        moved: list[bytes] = []
        for session_id, status in live.items():
            word = PHASE_WORDS[status.phase]
            if words.get(session_id) != word:
                moved.append(self._changed(session_id, status.task_id, word))
                words[session_id] = word
        return moved

    async def _ended(self, words: dict[str, str], live: Mapping[str, LiveSessionStatus]) -> list[bytes]:
        """Events of sessions that are over, with their outcomes in the journal."""
        ended: list[bytes] = []
        for session_id in [each for each in words if each not in live]:
            try:
                found = await self.service.log.session(session_id)
            except LogUnavailable:
                break  # the stream stays open, and looks again
            del words[session_id]
            if found is not None:
                ended.append(self._changed(session_id, found.task_id, outcome_word(found.outcome, "ended")))
        return ended

    def _changed(self, session_id: str, task_id: str, word: str) -> bytes:
        return _sse_event(
            "session.state_changed",
            {"session_id": session_id, "task_id": task_id, "status": word, "node_id": self.service.node_id},
        )


def _sse_event(kind: str, body: dict[str, Json]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump_json({"type": kind, **body}))
