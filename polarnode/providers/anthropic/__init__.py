"""Anthropic Messages: the API of Claude Code, and of Qwen Code, Pi, opencode, OpenHands, mini-swe-agent and
OpenClaw when so configured.

`shapes` is the accepted JSON, `read` turns it into a conversation, `write` makes answers and errors.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from attrs import frozen

from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Answer, Json, ModelRequest, Usage
from polarnode.providers.anthropic import write
from polarnode.providers.anthropic.read import read
from polarnode.providers.contract import (
    Fault,
    Memory,
    ModelCallInfo,
    Reply,
    RequestEnvelope,
    ServedModel,
    StreamWriter,
)


@frozen
class Anthropic:
    """The Anthropic Messages dialect. Stateless."""

    name: str = "anthropic"

    def read(self, body: bytes, envelope: RequestEnvelope) -> ModelRequest:
        return read(
            body,
            headers=envelope.headers,
            model=envelope.model,
            counting=envelope.operation == "count_tokens",
            parts=envelope.parts,
        )

    def whole(self, call: ModelCallInfo, answers: Sequence[Answer], usage: Usage) -> bytes:
        return write.whole(call, answers[0], usage)

    def remember(self, call: ModelCallInfo, answer: Answer, memory: Memory) -> None:
        pass

    def stream(self, call: ModelCallInfo) -> StreamWriter:
        return write.MessageStream(call)

    def error(self, fault: Fault) -> Reply:
        return write.error(fault)

    def count(self, tokens: int) -> bytes | None:
        return dump_json({"input_tokens": tokens})

    def models(self, served: ServedModel) -> bytes:
        return dump_json(
            {
                "data": [_entry(served, served.id)],
                "has_more": False,
                "first_id": served.id,
                "last_id": served.id,
            }
        )

    def model(self, served: ServedModel, *, name: str) -> bytes:
        return dump_json(_entry(served, name))


def _entry(served: ServedModel, name: str) -> Json:
    created = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    length = served.context_length
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "max_input_tokens": length,
        "max_tokens": length,
    }


ANTHROPIC = Anthropic()
