"""OpenAI Chat Completions: what mini-swe-agent, OpenHands, Qwen Code, Pi, opencode, OpenClaw and hermes speak.

`shapes` is the JSON we take, `read` makes a conversation of it, `write` an answer, `errors` a fault; this file only ties them together.
"""

from collections.abc import Sequence

from attrs import frozen

from polarnode.conversation import Answer, Json, ModelRequest, Usage
from polarnode.providers.contract import Call, Envelope, Fault, Memory, Reply, ServedModel, StreamWriter
from polarnode.providers.openai_chat import errors, write
from polarnode.providers.openai_chat.read import read
from polarnode.wire import dump_json


@frozen
class OpenAIChat:
    """The dialect; holds nothing."""

    name: str = "openai_chat"

    def read(self, body: bytes, envelope: Envelope) -> ModelRequest:
        return read(body, headers=envelope.headers, model=envelope.model)

    def whole(self, call: Call, answers: Sequence[Answer], usage: Usage) -> bytes:
        return write.whole(call, answers, usage)

    def remember(self, call: Call, answer: Answer, memory: Memory) -> None:
        pass

    def stream(self, call: Call) -> StreamWriter:
        return write.ChatStream(call)

    def error(self, fault: Fault) -> Reply:
        return errors.error(fault)

    def count(self, tokens: int) -> bytes | None:
        return None  # this API counts nothing in advance

    def models(self, served: ServedModel) -> bytes:
        return dump_json({"object": "list", "data": [_entry(served, served.id)]})

    def model(self, served: ServedModel, *, asked: str) -> bytes:
        return dump_json(_entry(served, asked))


def _entry(served: ServedModel, name: str) -> Json:
    """A model. The context length under both names in use: vLLM's and SGLang's `max_model_len`, and the one OpenRouter's clients read."""
    length = served.context_length
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "polarnode",
        "max_model_len": length,
        "context_length": length,
    }


OPENAI_CHAT = OpenAIChat()
