"""A session's model calls as Polar's CompletionRecords, which hold each call's whole conversation again.

The rule for whoever edits it: they are made and written one at a time, because together they grow with the
square of a session's length. `original_request` is null: bodies are kept only where the node records
requests.

Polar's stream of what sessions do: `hello`, `session.state_changed`, `ping`.

The rule for whoever edits it: it is for dashboards, which may miss what was between two looks; what must not
be missed is in the stream of trajectories. No scope and no nursery around a `yield`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import trio
from attrs import frozen
from quart import Response

from polarnode.core.codec.json import dump_json, plain
from polarnode.core.codec.turns import sequence
from polarnode.core.conversation import Json
from polarnode.core.trajectory import Turn
from polarnode.http.asgi import RouteRow
from polarnode.integrations.polar.answers import PolarHouse, moment
from polarnode.rollouts.scheduler import SessionStatus
from polarnode.trainers.polar import (
    PHASES,
    answer_json,
    asked_of,
    completion_id,
    finish_word,
    messages_json,
    outcome_word,
    tools_json,
)

# ── completions ────────────────────────────────────────────────────────────

T = TypeVar("T")


class InThread(Protocol):
    """`Journal.read`: a long call, off the event loop."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]: ...


async def completion_pieces(
    run: InThread, head: dict[str, Json], turns: Sequence[Turn], *, model: str, requested: str | None
) -> AsyncIterator[bytes]:
    """A JSON object: what `head` says, and `completions` in the order the calls were asked."""
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
    said = asked_of(turns, turn.index)
    return {
        "completion_id": completion_id(turn),
        "timestamp": moment(turn.started + turn.ended_s),
        "request": {
            "model": model,
            "messages": None if said is None else messages_json(said.messages),
            "tools": None if said is None else tools_json(said),
            **{name: value for name, value in plain(turn.used).items() if value not in (None, [])},
        },
        "original_request": None,
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
    usage, ids = turn.usage, _prompt(turn, turns)
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


def _prompt(turn: Turn, turns: dict[int, Turn]) -> Json:
    """The ids it was conditioned on; null where one of the turns before it is not kept."""
    try:
        return list[Json](sequence(turns, turn.index)[: turn.prompt_length])
    except KeyError:
        return None


# ── events ────────────────────────────────────────────────────────────

LOOK_S = 1.0  # between two looks: a table of at most a few hundred sessions
PING_S = 15.0  # as Polar's own


@frozen(kw_only=True)
class EventRoutes:
    """The handler, with what it asks."""

    house: PolarHouse

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", "/events", self.events)

    async def events(self) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(
            self._stream(),
            200,
            {"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            content_type="text/event-stream",
        )

    async def _stream(self) -> AsyncIterator[bytes]:
        known: dict[str, str] = {
            session_id: PHASES[status.phase] for session_id, status in self.house.live().items()
        }
        yield _sse("hello", {"node_id": self.house.node_id, "sessions": len(known)})
        spoken = trio.current_time()
        while True:
            await trio.sleep(LOOK_S)
            live = self.house.live()
            for piece in (*self._moved(known, live), *await self._ended(known, live)):
                yield piece
                spoken = trio.current_time()
            if trio.current_time() >= spoken + PING_S:
                yield _sse("ping", {"node_id": self.house.node_id})
                spoken = trio.current_time()

    def _moved(self, known: dict[str, str], live: Mapping[str, SessionStatus]) -> list[bytes]:
        """Of sessions that began, or are in another phase now."""
        moved: list[bytes] = []
        for session_id, status in live.items():
            word = PHASES[status.phase]
            if known.get(session_id) != word:
                moved.append(self._changed(session_id, status.task_id, word))
                known[session_id] = word
        return moved

    async def _ended(self, known: dict[str, str], live: Mapping[str, SessionStatus]) -> list[bytes]:
        """Of sessions that are over, as the journal has them."""
        ended: list[bytes] = []
        for session_id in [each for each in known if each not in live]:
            found = await self.house.journal.session(session_id)
            del known[session_id]
            if found is not None:
                ended.append(self._changed(session_id, found.task_id, outcome_word(found.outcome, "ended")))
        return ended

    def _changed(self, session_id: str, task_id: str, word: str) -> bytes:
        return _sse(
            "session.state_changed",
            {"session_id": session_id, "task_id": task_id, "status": word, "node_id": self.house.node_id},
        )


def _sse(kind: str, body: dict[str, Json]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump_json({"type": kind, **body}))
