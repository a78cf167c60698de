"""OpenAI Responses: what Codex speaks, and Qwen Code, Pi, opencode, OpenClaw, hermes, OpenHands and mini-swe-agent when told to.

`shapes` is the JSON we take, `read` makes a conversation of it (`items` its messages, `tools` its tools, `hints` who asks), `output` and
`write` spell an answer, `errors` a fault; `history` remembers answers, `compaction` and `sealed` are what we let clients carry for us. This
file only ties them together.
"""

from collections.abc import Sequence

from attrs import frozen

from polarnode.conversation import Answer, Json, ModelRequest, Usage
from polarnode.providers.contract import Call, Envelope, Fault, Memory, Reply, ServedModel, StreamWriter
from polarnode.providers.openai_responses import errors, history, output, write
from polarnode.providers.openai_responses.read import read
from polarnode.wire import dump_json


@frozen
class OpenAIResponses:
    """The dialect; holds nothing."""

    name: str = "openai_responses"

    def read(self, body: bytes, envelope: Envelope) -> ModelRequest:
        return read(body, envelope)

    def whole(self, call: Call, answers: Sequence[Answer], usage: Usage) -> bytes:
        return write.whole(call, answers[0], usage)

    def remember(self, call: Call, answer: Answer, memory: Memory) -> None:
        kept = call.request.extras.get("keeps")
        if isinstance(kept, dict):
            history.keep(memory, history.response_id(call.id), kept, output.output_json(call, answer))

    def stream(self, call: Call) -> StreamWriter:
        return write.ResponseStream(call)

    def error(self, fault: Fault) -> Reply:
        return errors.error(fault)

    def count(self, tokens: int) -> bytes | None:
        return dump_json({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, served: ServedModel) -> bytes:
        return dump_json({"object": "list", "data": [_entry(served, served.id)]})

    def model(self, served: ServedModel, *, asked: str) -> bytes:
        return dump_json(_entry(served, asked))


def _entry(served: ServedModel, name: str) -> Json:
    """A model. Its list is asked of the other OpenAI dialect, as both share the path; this is the same entry."""
    length = served.context_length
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "polarnode",
        "max_model_len": length,
        "context_length": length,
    }


OPENAI_RESPONSES = OpenAIResponses()
