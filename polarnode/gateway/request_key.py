"""What identifies a request, so that a request that is sent again is recognised.

The key covers what the prompt, the sampling and the form of the answer depend on, not the bytes of the body.
A client that lost a stream asks again for a whole answer (Claude Code, LiteLLM). Its SDK writes the fields of
the two requests in another order (Anthropic's for Python), counts its tries in a header, and sends other
`metadata`. None of that makes another request.
"""

from hashlib import sha256
from typing import Final

import orjson
from attrs import evolve

from polarnode.core.conversation import Conversation, ModelRequest, Sampling, Tool

_KEY_BYTES: Final = 16  # enough to identify one request among the thousands of a session
# Claude Code 2.1.332 lowers a higher `max_tokens` to this when it asks for a whole answer after a stream that
# broke, so limits above this count as equal.
_MAX_COUNTED_TOKENS: Final = 64_000


def request_key(request: ModelRequest, operation: str) -> str:
    """The key of a request for one operation of its dialect; two operations never share a key. Fields that
    only decide how the client is answered (`stream`, `stream_options`, what a response echoes) have no part
    in it. O(bytes).
    """
    conversation, sampling = request.conversation, request.sampling
    if sampling.max_tokens is not None:
        sampling = evolve(sampling, max_tokens=min(sampling.max_tokens, _MAX_COUNTED_TOKENS))
    # Server processors have instructions for SHA-256, with which it takes half the time of blake2b.
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
    except TypeError:  # orjson cannot write a number beyond 64 bits or a schema 250 levels deep.
        return repr(listed).encode(errors="surrogatepass")


def _messages(conversation: Conversation) -> str:
    """All texts of all messages, preceded by their lengths, so that no text passes for another's end."""
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
