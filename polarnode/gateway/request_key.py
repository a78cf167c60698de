"""What identifies a request, so that one that is sent again is known as the same.

A request is what its prompt, its sampling and its answer's form depend on, and not its bytes. A client that
lost a stream asks again for a whole answer (Claude Code, LiteLLM), its SDK writes the fields of the two in
another order (Anthropic's for Python), counts its tries in a header, and sends other `metadata`: none of that
makes it another question.
"""

from hashlib import sha256
from typing import Final

import orjson
from attrs import evolve

from polarnode.core.conversation import Conversation, ModelRequest, Sampling, Tool

_KEY_BYTES: Final = 16  # identifies one request among the thousands of a session
# Claude Code 2.1.332 lowers a higher `max_tokens` to this where it asks for a whole answer after a stream
# that broke, so that limits above are no difference.
_WHOLE_TOKENS: Final = 64_000


def request_key(request: ModelRequest, operation: str) -> str:
    """The key of a request for one operation of its dialect: two operations never share one. What the client
    is told only in how it is answered (`stream`, `stream_options`, what a response echoes) has no part in it.
    O(bytes).
    """
    conversation, sampling = request.conversation, request.sampling
    if sampling.max_tokens is not None:
        sampling = evolve(sampling, max_tokens=min(sampling.max_tokens, _WHOLE_TOKENS))
    # the processors of servers have instructions for it, with which it takes half of blake2b's time
    digest = sha256(
        _asked(request, sampling, operation).encode(errors="surrogatepass"), usedforsecurity=False
    )
    digest.update(_tools(conversation.tools))
    digest.update(_messages(conversation).encode(errors="surrogatepass"))
    return digest.digest()[:_KEY_BYTES].hex()


def _asked(request: ModelRequest, sampling: Sampling, operation: str) -> str:
    conversation = request.conversation
    return repr(
        (
            operation,
            request.model,
            sampling,
            request.constraint,
            (request.choices, request.logprobs, request.one_call, request.generate),
            (conversation.tool_choice, conversation.thinking, conversation.prefilled),
            (len(conversation.tools), len(conversation.messages)),
        )
    )


def _tools(tools: tuple[Tool, ...]) -> bytes:
    listed = [[tool.name, tool.description, tool.parameters, tool.spelling] for tool in tools]
    try:
        return orjson.dumps(listed)
    except TypeError:  # what orjson cannot write: a number beyond 64 bits, a schema 250 levels deep
        return repr(listed).encode(errors="surrogatepass")


def _messages(conversation: Conversation) -> str:
    """All texts of all messages, behind their lengths, so that no text is read as another's end."""
    texts: list[str] = []
    for message in conversation.messages:
        texts += (
            message.role,
            message.text,
            message.thinking,
            message.call_id or "",
            str(len(message.calls)),
        )
        texts += message.refs
        for call in message.calls:
            texts += (call.id, call.name, call.arguments)
    return "".join((",".join(map(str, map(len, texts))), *texts))
