"""Google generateContent: the API of Gemini CLI, and of Qwen Code, Pi and opencode when so configured.

`shapes` is the accepted JSON, `read` turns it into a conversation, `write` makes answers and errors.
"""

from collections.abc import Sequence

from attrs import frozen

from polarnode.core.codec.json import dump_json
from polarnode.core.conversation import Answer, Json, ModelRequest, Usage
from polarnode.providers.contract import (
    Fault,
    Memory,
    ModelCallInfo,
    Reply,
    RequestEnvelope,
    ServedModel,
    StreamWriter,
)
from polarnode.providers.google import write
from polarnode.providers.google.read import read


@frozen
class Google:
    """The generateContent dialect. Stateless."""

    name: str = "google"

    def read(self, body: bytes, envelope: RequestEnvelope) -> ModelRequest:
        return read(body, envelope)

    def whole(self, call: ModelCallInfo, answers: Sequence[Answer], usage: Usage) -> bytes:
        return write.whole(call, answers, usage)

    def remember(self, call: ModelCallInfo, answer: Answer, memory: Memory) -> None:
        pass

    def stream(self, call: ModelCallInfo) -> StreamWriter:
        return write.ContentStream(call, call.request.extras.get("sse") is not False)

    def error(self, fault: Fault) -> Reply:
        return write.error(fault)

    def count(self, tokens: int) -> bytes | None:
        return dump_json({"totalTokens": tokens})

    def models(self, served: ServedModel) -> bytes:
        return dump_json({"models": [_entry(served, served.id)]})

    def model(self, served: ServedModel, *, name: str) -> bytes:
        return dump_json(_entry(served, name))


def _entry(served: ServedModel, name: str) -> Json:
    length = served.context_length
    return {
        "name": f"models/{name}",
        "version": "1",
        "displayName": name,
        "inputTokenLimit": length,
        "outputTokenLimit": length,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
        "thinking": True,
    }


GOOGLE = Google()
