"""A model request before it is planned: what it may cost, which constraint the engine can enforce, and what
identifies it.

The context of the model limits what one request may cost. A request is refused before the work that its size
would cause: its bytes while they arrive, its parts before they are parsed, its characters before they are
rendered. What is refused here could not fit the context, so the refusal is that of a prompt that is too long,
on which harnesses compact. A request of the usual size costs one comparison for each limit.

A request that is sent again is recognised by its key. The key covers what the prompt, the sampling and the
form of the answer depend on, not the bytes of the body. A client that lost a stream asks again for a whole
answer (Claude Code, LiteLLM). Its SDK writes the fields of the two requests in another order (Anthropic's for
Python), counts its tries in a header, and sends other `metadata`. None of that makes another request.

Everything here is pure.
"""

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Final, assert_never

import orjson
from attrs import evolve, field, frozen

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Constraint, Conversation, Json, Message, ModelRequest
from polarnode.core.errors import ContextTooLong, Refused

# ── what one request may cost ───────────────────────────────────────────────────────────────────────

# The characters of text accepted for each token of the context. English has 4 to 5 per token, source code 3,
# deep indentation 8. A text that has more consists of long runs of one character.
CHARS_PER_TOKEN: Final = 16
# The usual length of a token in characters or bytes, for the estimate of the size in a refusal.
TYPICAL_TOKEN_CHARS: Final = 4
# Room for images in tool results, which this node replaces by a sentence: three images of 5 MB, the largest
# that Anthropic's API accepts.
MAX_IMAGES_BYTES: Final = 16 << 20
BODY_BYTES: Final = 64 << 20  # the limit for a context of any length
# The limit on JSON's marks (quotes, commas, opening brackets), inside texts or between values. Parsing a body
# with this many blocks the event loop for 0.1 s; a message has about seven.
MARKS: Final = 1_000_000
MAX_MARKS_PER_TOKEN: Final = 2  # The limit per token of a longer context. Minified JSON has one and a half.
_MARKS: Final = (b'"', b",", b"{", b"[")
# Limits on a schema, regular expression or grammar. xgrammar compiles a list of 8,000 words in 40 ms, but
# needs cubic time for optional members: 600 take 0.3 s, 1,200 take 2.7 s.
MAX_CONSTRAINT_CHARS: Final = 64_000
MAX_CONSTRAINT_MEMBERS: Final = 500
# The limit on repetitions and optional parts of a regular expression, or of one rule of a grammar. They too
# are compiled in cubic time: 200 take 5 s for a vocabulary of 150,000 tokens, and an external engine may
# compile them in its own event loop. The pattern of an email address has ten.
MAX_CONSTRAINT_REPEATS: Final = 200
MAX_CONSTRAINT_NESTING: Final = 200  # The limit on nested brackets, which compilers follow by recursion.
# These patterns match the escapes and character classes of a regular expression, and the quoted text and
# comments of EBNF. A part that is not closed ends with the text, so that each character is read once.
_LITERAL_PATTERN: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)
_QUOTED: Final = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|' + _LITERAL_PATTERN.pattern + r"|#[^\n]*", re.DOTALL
)
# After an opening bracket, `?` only names the kind of group.
_REPEAT_PATTERN: Final = re.compile(r"(?<!\()[*+?]|\{\d")


@frozen
class RequestLimits:
    """The limits of one request to a model of `context_length` tokens."""

    context_length: int
    body_bytes: int = field(init=False)
    chars: int = field(init=False)  # the limit on the characters of all texts of a conversation

    def __attrs_post_init__(self) -> None:
        chars = CHARS_PER_TOKEN * self.context_length
        object.__setattr__(self, "chars", chars)
        object.__setattr__(self, "body_bytes", min(BODY_BYTES, chars + MAX_IMAGES_BYTES))

    def check_body(self, body: bytes) -> None:
        """Raise ContextTooLong for a body with more parts than a parser may be given."""
        most = max(MARKS, MAX_MARKS_PER_TOKEN * self.context_length)
        if len(body) > most and count_marks(body) > most:
            raise self.too_long(len(body))

    def check_conversation(self, conversation: Conversation, *, body_bytes: int) -> None:
        """Raise ContextTooLong for a conversation with more messages or characters than any prompt of this
        context has. A short body of `body_bytes` cannot hold so many, and is not examined. O(messages).
        """
        if body_bytes <= self.chars:  # A message takes at least 16 bytes, a character at least one.
            return
        chars = sum(map(_count_chars, conversation.messages))
        for tool in conversation.tools:
            chars += len(tool.name) + len(tool.description) + len(orjson.dumps(tool.parameters))
        if chars > self.chars or len(conversation.messages) > self.context_length:
            raise self.too_long(chars)

    def too_long(self, size: int) -> ContextTooLong:
        """The refusal of `size` characters or bytes. Its number of tokens is an estimate."""
        tokens = max(size // TYPICAL_TOKEN_CHARS, self.context_length + 1)
        return ContextTooLong(prompt_tokens=tokens, limit=self.context_length)


def count_marks(body: bytes) -> int:
    """Count the marks of JSON in a body, at the speed of C."""
    return sum(map(body.count, _MARKS))


def check_constraint(constraint: Constraint) -> None:
    """Raise Refused for a constraint whose compilation would take the engine longer than the answer."""
    fault = next(_constraint_faults(constraint), None)
    if fault is not None:
        raise Refused(fault, path=constraint.path)


def _constraint_faults(constraint: Constraint) -> Iterator[str]:
    text = constraint.text
    if len(text) > MAX_CONSTRAINT_CHARS:
        yield f"what the answer must match has {len(text)} characters: send at most {MAX_CONSTRAINT_CHARS}"
    match constraint.kind:
        case "regex":
            yield from _repetition_faults(
                _LITERAL_PATTERN.sub("x", text), "the regular expression of the answer"
            )
        case "ebnf":
            for rule in _QUOTED.sub("x", text).split("::="):
                yield from _repetition_faults(rule, "a rule of the answer's grammar")
        case "json_schema":
            yield from _schema_faults(read_json(text.encode()))
        case _:
            assert_never(constraint.kind)


def _schema_faults(schema: Json) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, dict):
            continue
        if len(value) > MAX_CONSTRAINT_MEMBERS:
            yield (
                f"the JSON schema of the answer has an object of {len(value)} members: give each at most"
                f" {MAX_CONSTRAINT_MEMBERS}"
            )
        of_names = value.get("patternProperties")
        for pattern in (value.get("pattern"), *(of_names if isinstance(of_names, dict) else ())):
            if isinstance(pattern, str):
                yield from _repetition_faults(
                    _LITERAL_PATTERN.sub("x", pattern), "a pattern of the answer's JSON schema"
                )
        waiting += value.values()


def _repetition_faults(text: str, what: str) -> Iterator[str]:
    repeats, depth, deepest = len(_REPEAT_PATTERN.findall(text)), 0, 0
    for each in re.findall(r"[()]", text):
        depth += 1 if each == "(" else -1
        deepest = max(deepest, depth)
    if repeats > MAX_CONSTRAINT_REPEATS:
        yield f"{what} has {repeats} repetitions and optional parts: give it at most {MAX_CONSTRAINT_REPEATS}"
    if deepest > MAX_CONSTRAINT_NESTING:
        yield f"{what} has brackets {deepest} deep: nest them at most {MAX_CONSTRAINT_NESTING} deep"


def _count_chars(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.calls)
    return len(message.text) + len(message.thinking) + calls


# ── constraints the engine can enforce ────────────────────────────────


def enforceable_request(request: ModelRequest, *, headers: bool = False) -> ModelRequest:
    """The request, with its constraint only where the engine can enforce it. `headers`: the model writes a
    header before each of its messages (gpt-oss).

    An engine enforces a constraint from the first token on. So a constraint cannot be combined with callable
    tools or with headers. Thinking that the client did not ask for is switched off, because the constrained
    text is the whole answer. A dropped constraint leaves a note. Apply this before planning and counting, so
    that both see the same prompt.
    """
    constraint, conversation = request.constraint, request.conversation
    if constraint is None:
        return request
    why = None
    if conversation.tools and conversation.tool_choice != "none":
        why = "the model may call tools: ask without tools, or with tool_choice none"
    elif headers:
        why = "this model's messages have headers of their own: say in the prompt what the answer must be"
    if why is not None:
        note = f"constraint: the {constraint.kind} was not held, because {why}"
        return evolve(request, constraint=None, notes=(*request.notes, note))
    return (
        request
        if conversation.thinking is not None
        else evolve(request, conversation=evolve(conversation, thinking=False))
    )


# ── what identifies a request ────────────────────────────────

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
    # 1. Everything but tools and messages.
    fields = (
        operation,
        request.model,
        sampling,
        request.constraint,
        (request.choices, request.logprobs, request.one_call, request.generate),
        (conversation.tool_choice, conversation.thinking, conversation.prefilled),
        (len(conversation.tools), len(conversation.messages)),
    )
    # Server processors have instructions for SHA-256, with which it takes half the time of blake2b.
    digest = sha256(repr(fields).encode(errors="surrogatepass"), usedforsecurity=False)
    # 2. The tools.
    tools = [[tool.name, tool.description, tool.parameters, tool.spelling] for tool in conversation.tools]
    try:
        digest.update(orjson.dumps(tools))
    except TypeError:  # orjson cannot write a number beyond 64 bits or a schema 250 levels deep.
        digest.update(repr(tools).encode(errors="surrogatepass"))
    # 3. All texts of all messages, preceded by their lengths, so that no text passes for another's end.
    texts: list[str] = []
    for message in conversation.messages:
        calls = str(len(message.calls))
        texts += (message.role, message.text, message.thinking, message.call_id or "", calls)
        texts += message.refs
        for call in message.calls:
            texts += (call.id, call.name, call.arguments)
    lengths = ",".join(map(str, map(len, texts)))
    digest.update("".join((lengths, *texts)).encode(errors="surrogatepass"))
    return digest.digest()[:_KEY_BYTES].hex()
