"""Google generateContent: a request into a conversation, its tools and how to sample.

The rule: no field we do not know is ever a reason to refuse; it is reported as ignored. What the path says (the model's name, whether to
stream) is in the envelope, because this API's body does not say it.
"""

import re
from collections.abc import Mapping
from urllib.parse import parse_qs

from polarnode.conversation import Constraint, Conversation, Json, ModelRequest, Sampling
from polarnode.errors import Refused
from polarnode.providers.contract import JSON_TYPE, Envelope
from polarnode.providers.google.contents import RAN_CODE, messages, ran_code
from polarnode.providers.google.names import camel, respelled
from polarnode.providers.google.schemas import json_schema
from polarnode.providers.google.shapes import Content, CountRequest, GenerateRequest, GenerationConfig, ThinkingConfig, Tool
from polarnode.providers.google.tools import tool_choice, tools
from polarnode.providers.shapes import compact, read_value
from polarnode.providers.volatile import without_volatile
from polarnode.wire import structure

ENUM = "text/x.enum"  # Google's own: one of the schema's words, without quotes
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")  # not `re.escape`, which also escapes what other engines' regexes have no escape for


def read(body: bytes, envelope: Envelope) -> ModelRequest:
    """A generateContent body, or a countTokens body of either form. Refused with the path of the field."""
    request, ignored = _request(body)
    contents = (request.contents,) if isinstance(request.contents, Content) else request.contents
    known = tools((request.tools,) if isinstance(request.tools, Tool) else request.tools or ())
    choice, notes = tool_choice(request.toolConfig, known)
    config = request.generationConfig or GenerationConfig()
    said, volatile = without_volatile(messages(request.systemInstruction, contents))
    return ModelRequest(
        provider="google",
        model=envelope.model or (request.model or "").removeprefix("models/"),
        conversation=Conversation(messages=said, tools=known, tool_choice=choice, thinking=_thinking(config.thinkingConfig)),
        sampling=_sampling(config),
        stream=bool(envelope.stream),
        hints=_hints(envelope.headers),
        ignored=(*ignored, "$.contents[-1]") if volatile else ignored,
        notes=(*notes, RAN_CODE) if ran_code(contents) else notes,
        constraint=_constraint(config),
        choices=config.candidateCount or 1,
        logprobs=(config.logprobs or 0) if config.responseLogprobs else None,
        extras={"thoughts": bool(config.thinkingConfig and config.thinkingConfig.includeThoughts), "sse": _sse(envelope.query)},
    )


def _request(body: bytes) -> tuple[GenerateRequest, tuple[str, ...]]:
    value = read_value(body)
    counting = isinstance(value, dict) and any(camel(name) == "generateContentRequest" for name in value)
    if counting:
        spelled, unknown = respelled(value, CountRequest)
        return structure(spelled, CountRequest).generateContentRequest, unknown
    spelled, unknown = respelled(value, GenerateRequest)
    return structure(spelled, GenerateRequest), unknown


def _sse(query: str) -> bool:
    return "sse" in parse_qs(query).get("alt", ())


def _thinking(config: ThinkingConfig | None) -> bool | None:
    """Whether to think, where the client says so: a budget of none or of some. A level leaves it to the template."""
    if config is None or config.thinkingBudget is None or config.thinkingBudget < 0:
        return None
    return config.thinkingBudget > 0


def _sampling(config: GenerationConfig) -> Sampling:
    greedy = config.topP == 0  # no token is that likely: Google then takes the likeliest
    return Sampling(
        temperature=config.temperature,
        top_p=config.topP or None,
        top_k=1 if greedy else config.topK if config.topK and config.topK > 0 else None,  # 0 and -1 both mean "all tokens"
        max_tokens=config.maxOutputTokens or None,
        stop=config.stopSequences or (),
        seed=config.seed,
        presence_penalty=config.presencePenalty,
        frequency_penalty=config.frequencyPenalty,
    )


def _constraint(config: GenerationConfig) -> Constraint | None:
    """What the answer must match. JSON without a schema is any JSON; a schema without a type means JSON."""
    json = config.responseJsonSchema
    path = "$.generationConfig." + ("responseSchema" if json is None else "responseJsonSchema")
    schema = config.responseSchema if json is None else json
    kind = (config.responseMimeType or ("text/plain" if schema is None else JSON_TYPE)).partition(";")[0].strip().lower()
    match kind:
        case "text/plain":
            return None
        case "application/json":
            return Constraint(kind="json_schema", text=_text(schema or {}, path))
        case "text/x.enum":
            words = (schema or {}).get("enum")
            if not isinstance(words, list) or not words:
                raise Refused(f"{ENUM} needs a responseSchema with an enum: add it", path=path)
            return Constraint(kind="regex", text="|".join(_SPECIAL.sub(r"\\\g<0>", str(word)) for word in words))
        case _:
            raise Refused(f"responseMimeType must be text/plain, {JSON_TYPE} or {ENUM}, not {kind!r}", path="$.generationConfig.responseMimeType")


def _text(schema: Mapping[str, Json], path: str) -> str:
    try:
        return compact(json_schema(schema, path))
    except Refused as error:
        raise Refused(str(error), path=path) from None


def _hints(headers: Mapping[str, str]) -> dict[str, str]:
    """Who asks: this API has no field for it; opencode gives a sub-agent its own session id and its parent's in every API."""
    session, parent = headers.get("x-session-id") or "", headers.get("x-parent-session-id") or ""
    return {"session": session, "agent": session if parent else "", "parent": parent} if session or parent else {}
