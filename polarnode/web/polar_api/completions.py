"""A session's model calls as Polar's CompletionRecords, which hold each call's whole conversation again.

The rule for whoever edits it: they are made and written one at a time, because together they grow with the square of a session's length.
`original_request` is null: bodies are kept only where the node records requests.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from polarnode.conversation import Json
from polarnode.records import Turn
from polarnode.trainers.polar.messages import answer_json, asked_of, messages_json, tools_json
from polarnode.trainers.polar.traces import completion_id
from polarnode.trainers.polar.words import finish_word
from polarnode.web.polar_api.answers import moment
from polarnode.wire import dump_json, plain
from polarnode.wire.turns import sequence

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


def completion_json(turn: Turn, turns: dict[int, Turn], *, model: str, requested: str | None) -> dict[str, Json]:
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
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob} for token, logprob in zip(turn.sampled, turn.logprobs, strict=True)
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
