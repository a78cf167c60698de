"""OpenAI Responses: the API of Codex, and of Qwen Code, Pi, opencode, OpenClaw, hermes, OpenHands and
mini-swe-agent when so configured.

`shapes` is the accepted JSON, `read` turns it into a conversation (`items` its messages, `tools` its tools),
`write` makes answers and errors, `history` keeps answers for later requests and seals what clients echo.
"""

from collections.abc import Sequence

from attrs import frozen

from polarnode.core.codec.json import dump_json
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
from polarnode.providers.openai_responses import history, write
from polarnode.providers.openai_responses.read import read


@frozen
class OpenAIResponses:
    """The Responses dialect. Stateless."""

    name: str = "openai_responses"

    def read(self, body: bytes, envelope: RequestEnvelope) -> ModelRequest:
        return read(body, envelope)

    def whole(self, call: ModelCallInfo, answers: Sequence[Answer], usage: Usage) -> bytes:
        return write.whole(call, answers[0], usage)

    def remember(self, call: ModelCallInfo, answer: Answer, memory: Memory) -> None:
        kept = call.request.extras.get("keeps")
        if isinstance(kept, dict):
            history.keep(memory, history.response_id(call.id), kept, write.output_json(call, answer))

    def stream(self, call: ModelCallInfo) -> StreamWriter:
        return write.ResponseStream(call)

    def error(self, fault: Fault) -> Reply:
        return openai.error(fault, conversation="input")

    def count(self, tokens: int) -> bytes | None:
        return dump_json({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, served: ServedModel) -> bytes:
        return openai.models(served)

    def model(self, served: ServedModel, *, name: str) -> bytes:
        return openai.model(served, name=name)


OPENAI_RESPONSES = OpenAIResponses()
