"""OpenAI Chat Completions: the API of mini-swe-agent, OpenHands, Qwen Code, Pi, opencode, OpenClaw and
hermes.

`shapes` is the accepted JSON, `read` turns it into a conversation, `write` makes answers.
"""

from collections.abc import Sequence

from attrs import frozen

from polarnode.core.conversation import Answer, ModelRequest, Usage
from polarnode.providers import openai
from polarnode.providers.contract import (
    Fault,
    Memory,
    ModelCallInfo,
    Reply,
    RequestEnvelope,
    ServedModel,
    StreamWriter,
)
from polarnode.providers.openai_chat import write
from polarnode.providers.openai_chat.read import read


@frozen
class OpenAIChat:
    """The Chat Completions dialect. Stateless."""

    name: str = "openai_chat"

    def read(self, body: bytes, envelope: RequestEnvelope) -> ModelRequest:
        return read(body, headers=envelope.headers, model=envelope.model, parts=envelope.parts)

    def whole(self, call: ModelCallInfo, answers: Sequence[Answer], usage: Usage) -> bytes:
        return write.whole(call, answers, usage)

    def remember(self, call: ModelCallInfo, answer: Answer, memory: Memory) -> None:
        pass

    def stream(self, call: ModelCallInfo) -> StreamWriter:
        return write.ChatStream(call)

    def error(self, fault: Fault) -> Reply:
        return openai.error(fault, conversation="messages")

    def count(self, tokens: int) -> bytes | None:
        return None  # This API has no count_tokens call.

    def models(self, served: ServedModel) -> bytes:
        return openai.models(served)

    def model(self, served: ServedModel, *, name: str) -> bytes:
        return openai.model(served, name=name)


OPENAI_CHAT = OpenAIChat()
