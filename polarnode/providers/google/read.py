"""Google generateContent: read a request as a conversation with its tools and its sampling.

The order of a user content's parts is kept, and a functionResponse becomes a message of its own. Consecutive
model contents are one turn, because the SDK's chats keep every chunk of a stream as a content. User contents
stay one to one, so that an append-only history stays append-only. A result answers the call with its id, else
the first open call with its name.

Google's schema language (a subset of OpenAPI 3.0 with types in capitals) becomes JSON Schema, which templates
show and engines enforce. The client's key order is kept, because the prompt shows it. JSON Schema passes
unchanged. Both languages are accepted in every field: many clients write JSON Schema into `parameters`, and
Gemini CLI's router writes types in capitals into `responseJsonSchema`.

Tools that run on Google's servers (googleSearch, codeExecution, urlContext …) are never shown to the model,
and are reported as ignored, as is every unknown field. The model's name, and whether to stream, come from the
path, through the envelope.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal
from urllib.parse import parse_qs

from attrs import define, evolve, field, frozen

from polarnode.core.codec.json import AlreadyRead, structure
from polarnode.core.conversation import (
    Constraint,
    Conversation,
    Json,
    Message,
    ModelRequest,
    Sampling,
    Tool,
    ToolCall,
)
from polarnode.core.errors import Refused
from polarnode.providers.contract import JSON_TYPE, RequestEnvelope
from polarnode.providers.google import shapes
from polarnode.providers.google.shapes import (
    CodeExecutionResult,
    Content,
    CountRequest,
    ExecutableCode,
    FunctionCall,
    FunctionResponse,
    GenerateRequest,
    GenerationConfig,
    KnownPart,
    PartShape,
    ResponsePart,
    ThinkingConfig,
    camel,
    known_content,
    known_tool,
    parts,
    respelled,
)
from polarnode.providers.google.write import signature_call_id, to_node_id
from polarnode.providers.read_parts import PartsCache, is_list_of_objects
from polarnode.providers.shapes import (
    compact,
    join_answers,
    non_text_error,
    paragraphs,
    read_value,
    replace_json_media,
    unseen,
)
from polarnode.providers.volatile import without_volatile

# ── contents ────────────────────────────────────────────────────────────

_ROLES = {
    None: "user",
    "": "user",
    "user": "user",
    "function": "user",
    "tool": "user",
    "model": "model",
    "assistant": "model",
    "system": "system",
}
# Google's rule for a result is to show the whole object, unless its output is under one of these names. The
# automatic calling of Google's SDKs writes `result`.
_OUTPUT_NAMES = ("output", "result")

RAN_CODE_NOTE = "code that Google's servers ran is shown as text: nothing runs it here"


def messages(system: Content | str | None, drafts: Iterable["ContentDraft"]) -> tuple[Message, ...]:
    """The whole conversation: the system instruction first, if there is one."""
    head = (
        system
        if isinstance(system, str)
        else paragraphs(map(_shown, parts(system.parts)))
        if system is not None
        else ""
    )
    reader = _DraftReader([Message(role="system", text=head)] if head else [])
    for index, draft in enumerate(drafts):
        try:
            reader.read(draft)
        except Refused as error:
            where = f"$.contents[{index}]"
            raise Refused(str(error), path=where + (error.path or "$")[1:]) from None
    return tuple(join_answers(reader.found))


@frozen(kw_only=True)
class ContentDraft:
    """The messages of a content, except for what depends on its place: which calls its `results` answer, and
    the ids of calls that have none of their own. A model's content with such calls has no messages yet, but
    its `parts`. `refusal` says why the content cannot be read, and where in it. `ran_code` says whether any
    part is code of Google's own tool, or its output.
    """

    role: str | None
    parts: tuple[PartShape, ...] = ()
    messages: tuple[Message, ...] = ()
    results: tuple[FunctionResponse, ...] = ()
    refusal: tuple[str, str | None] | None = None
    ran_code: bool = False


def read_draft(content: Content) -> ContentDraft:
    """Read a content as far as its place does not matter."""
    shown, role = parts(content.parts), _ROLES.get(content.role)
    results = tuple(part.functionResponse for part in shown if part.functionResponse is not None)
    try:
        messages = tuple(_alone(shown, content.role))
        ran = any(part.executableCode is not None or part.codeExecutionResult is not None for part in shown)
        undecided = () if messages else shown
        return ContentDraft(role=role, parts=undecided, messages=messages, results=results, ran_code=ran)
    except Refused as error:
        return ContentDraft(role=role, refusal=(str(error), error.path))


def _known_content(sent: dict[str, Json]) -> KnownPart | Json:
    """As `known_content`, but only the draft is kept, because the parts of a stream's history hold every text
    a second time.
    """
    found = known_content(sent)
    if isinstance(found, KnownPart):
        return KnownPart(AlreadyRead(read_draft(found.read.value)), found.unknown)
    return found


def _alone(shown_parts: tuple[PartShape, ...], role: str | None) -> Iterator[Message]:
    """The messages of a content as far as they do not depend on its place."""
    match _ROLES.get(role):
        case "user":
            yield from _user(shown_parts)
        case "model":
            if all(part.functionCall is None or part.functionCall.id for part in shown_parts):
                yield _assistant_message(shown_parts)
        case "system":
            yield Message(role="system", text=paragraphs(map(_shown, shown_parts)))
        case _:
            raise Refused(f"the role must be 'user' or 'model', not {role!r}", path="$.role")


def _user(shown_parts: tuple[PartShape, ...]) -> Iterator[Message]:
    """A user's content: its texts and results in order. Media right after a result belongs to the result,
    because Gemini CLI puts the image that a tool read beside its functionResponse for models that it does not
    know. As a message of its own it would separate the results of parallel calls.
    """
    texts: list[str] = []
    call_id: str | None = None  # the id of the call whose result the texts are; None for the user's own texts
    for part in shown_parts:
        if (response := part.functionResponse) is not None:
            if texts:
                yield _user_message(texts, call_id)
            texts = [result_text(response)]
            call_id = to_node_id(response.id or "", response.name) or response.name
        elif call_id is not None and (part.inlineData is not None or part.fileData is not None):
            texts.append(_beside(part))
        else:
            if call_id is not None:
                yield _user_message(texts, call_id)
                texts, call_id = [], None
            texts.append(_shown(part))
    yield _user_message(texts, call_id)  # There is one message per content, even for an empty one.


def _user_message(texts: list[str], call_id: str | None) -> Message:
    role: Literal["user", "tool"] = "user" if call_id is None else "tool"
    return Message(role=role, text=paragraphs(texts), call_id=call_id)


def _assistant_message(shown_parts: tuple[PartShape, ...], earlier: int = 0, before: int = 0) -> Message:
    """A model's content as a message. `earlier` calls of the same turn precede it, and `before` calls of the
    whole conversation. Neither matters if each call has an id of its own.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    refs: list[str] = []
    for part in shown_parts:
        if part.functionCall is not None:
            signed = signature_call_id(part.thoughtSignature, earlier + len(calls))
            calls.append(_call(part.functionCall, signed, before + len(calls) + 1))
            refs.append(calls[-1].id if part.functionCall.id or signed else "")
        elif part.thought:
            thoughts.append(part.text or "")
        else:
            texts.append(_shown(part))
        refs.append(part.thoughtSignature or "")
    # The parts are joined as in `Answer.text` and `Answer.thinking`.
    return Message(
        role="assistant",
        text="".join(texts),
        calls=tuple(calls),
        thinking="".join(thoughts),
        refs=_unique_refs(refs),
    )


def _call(call: FunctionCall, signed: str | None, number: int) -> ToolCall:
    """A call. A call without an id gets the id in its signature, or one from its position among all calls,
    which later requests repeat.
    """
    call_id = to_node_id(call.id, call.name) if call.id else signed or f"call_{number}"
    return ToolCall(id=call_id, name=call.name, arguments=compact(call.args or {}))


@define(eq=False)
class _DraftReader:
    """One pass over the contents. `open` holds the calls of the latest model turn that have no result yet, by
    their number among all `calls`; `by_id` and `by_name` map ids and names to these numbers. A model turn may
    be several of the messages in `found`.
    """

    found: list[Message]
    open: dict[int, ToolCall] = field(factory=dict)
    by_id: "dict[str, deque[int]]" = field(factory=dict)
    by_name: "dict[str, deque[int]]" = field(factory=dict)
    calls: int = 0

    def read(self, draft: ContentDraft) -> None:
        if draft.refusal is not None:
            message, path = draft.refusal
            raise Refused(message, path=path)
        if draft.role == "model":
            self._model(draft)
            return
        results = iter(draft.results)
        for each in draft.messages:
            answered = self._answered(next(results)) if each.role == "tool" else None
            self.found.append(each if answered == each.call_id else evolve(each, call_id=answered))

    def _answered(self, response: FunctionResponse) -> str:
        """The id of the call that this result answers. Some clients omit ids, of calls as of results, but
        keep names and order.
        """
        call_id = to_node_id(response.id or "", response.name)
        for numbers in (self.by_id.get(call_id), self.by_name.get(response.name)):
            while numbers:
                call = self.open.pop(numbers.popleft(), None)
                if call is not None:
                    return call.id
        return call_id or response.name

    def _model(self, draft: ContentDraft) -> None:
        if not self.found or self.found[-1].role != "assistant":
            self.open, self.by_id, self.by_name = {}, {}, {}
        if draft.messages:
            (message,) = draft.messages
        else:
            message = _assistant_message(draft.parts, len(self.open), self.calls)
        for number, call in enumerate(message.calls, self.calls):
            self.open[number] = call
            self.by_id.setdefault(call.id, deque()).append(number)
            self.by_name.setdefault(call.name, deque()).append(number)
        self.calls += len(message.calls)
        self.found.append(message)


def result_text(response: FunctionResponse) -> str:
    """A function's result as the model sees it: its output if it has nothing else, a text verbatim, anything
    else as compact JSON.

    So the same tool result is the same text in every API. An `error` keeps its name, because only the name
    marks it as an error.
    """
    output = response.response
    if isinstance(output, dict):
        output = _plain_output(output, response.name)
    return paragraphs((_plain(replace_json_media(output)), *map(_beside, response.parts or ())))


def _beside(part: PartShape | ResponsePart) -> str:
    """The text of a part that stands beside a result's JSON."""
    if part.fileData is not None:
        return unseen("fileData")
    return part.text or "" if part.inlineData is None else part.inlineData.describe()


def _plain_output(response: dict[str, Json], name: str) -> Json:
    if len(response) == 1:
        return next((response[output] for output in _OUTPUT_NAMES if output in response), response)
    if response.keys() == {"name", "content"} and response["name"] == name:
        return response["content"]  # The AI SDK (opencode) wraps it like this.
    return response


def _plain(value: Json) -> str:
    return value if isinstance(value, str) else "" if value is None else compact(value)


def _shown(part: PartShape) -> str:
    """A part as text."""
    if part.executableCode is not None:
        return _code_text(part.executableCode)
    if part.codeExecutionResult is not None:
        return _output(part.codeExecutionResult)
    if part.inlineData is not None or part.fileData is not None:
        return _beside(part)
    if part.functionCall is not None or part.functionResponse is not None:
        raise non_text_error("functionCall" if part.functionCall is not None else "functionResponse")
    return part.text or ""


def _code_text(code: ExecutableCode) -> str:
    return f"```{(code.language or '').lower()}\n{code.code}\n```\n"


def _output(result: CodeExecutionResult) -> str:
    return f"```\n{result.output or ''}\n```\n"


def _unique_refs(refs: Iterable[str]) -> tuple[str, ...]:
    """Each reference once, because all thoughts and calls of an answer carry the same signature."""
    return tuple(dict.fromkeys(ref for ref in refs if ref))


# ── schemas ────────────────────────────────────────────────────────────

_TYPES: Final = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAP_KEYWORDS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ONE: Final = frozenset({"items", "additionalProperties", "not"})
_WHOLE: Final = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
# These are Google's own. They are read here, and are not part of JSON Schema.
_OWN: Final = frozenset({"nullable", "propertyOrdering"})
_KNOWN_KEYWORDS: Final = _LISTS | _MAP_KEYWORDS | _ONE | _WHOLE | _OWN
_NAMES: Final = {"defs": "$defs", "ref": "$ref"}  # Proto names cannot have a `$`.
# For these keywords null is a value. Elsewhere null means that the field is absent, as in proto.
_NULL_KEYWORDS: Final = frozenset({"default", "const", "example"})


def json_schema(schema: Mapping[str, Json], path: str) -> dict[str, Json]:
    """The schema as JSON Schema. Raises Refused at `path` if it is nested too deeply."""
    try:
        return _convert_schema(schema)
    except RecursionError:
        raise Refused("the schema is nested too deeply: flatten it", path=path) from None


def _convert_schema(schema: Mapping[str, Json]) -> dict[str, Json]:
    named = {_name(name): value for name, value in schema.items()}
    found = {
        name: _convert_keyword(name, value)
        for name, value in named.items()
        if name not in _OWN and (value is not None or name in _NULL_KEYWORDS)
    }
    if found.get("type") == "type_unspecified":
        del found["type"]
    return _allow_null(found) if named.get("nullable") is True else found


def _name(name: str) -> str:
    """A keyword in the spelling of JSON Schema. An unknown name is unchanged."""
    spelled = camel(name)
    return _NAMES.get(name) or (spelled if spelled in _KNOWN_KEYWORDS else name)


def _convert_keyword(name: str, value: Json) -> Json:
    if name == "type":
        return [_convert_type(each) for each in value] if isinstance(value, list) else _convert_type(value)
    if name in _MAP_KEYWORDS and isinstance(value, dict):
        return {key: _convert_inner(each) for key, each in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [_convert_inner(each) for each in value]
    if name in _WHOLE and isinstance(value, str) and value.isdecimal():
        return int(value)  # Proto writes 64-bit integers as strings.
    return _convert_inner(value) if name in _ONE else value


def _convert_inner(value: Json) -> Json:
    return _convert_schema(value) if isinstance(value, dict) else value


def _convert_type(value: Json) -> Json:
    return (
        value.lower()
        if isinstance(value, str) and (value.upper() in _TYPES or value == "TYPE_UNSPECIFIED")
        else value
    )


def _allow_null(schema: dict[str, Json]) -> dict[str, Json]:
    """Allow null as well: in the type if the schema has one, else as one more alternative."""
    kinds, alternatives, words = schema.get("type"), schema.get("anyOf"), schema.get("enum")
    if isinstance(kinds, str) and kinds != "null":
        schema["type"] = [kinds, "null"]
        if isinstance(words, list) and None not in words:
            schema["enum"] = [*words, None]
    elif isinstance(alternatives, list):
        schema["anyOf"] = [*alternatives, {"type": "null"}]
    return schema


# ── tools ────────────────────────────────────────────────────────────


def tools(shown: tuple[shapes.ToolShape, ...]) -> tuple[Tool, ...]:
    """Every function, in order."""
    return tuple(
        _tool(declaration, f"$.tools[{index}].functionDeclarations[{place}]")
        for index, shape in enumerate(shown)
        for place, declaration in enumerate(shape.functionDeclarations or ())
    )


def _tool(declaration: shapes.Declaration, path: str) -> Tool:
    return Tool(
        name=declaration.name,
        description=declaration.description or "",
        parameters=_read_parameters(declaration, path),
    )


def _read_parameters(declaration: shapes.Declaration, path: str) -> dict[str, Json]:
    if declaration.parametersJsonSchema is not None:
        return json_schema(declaration.parametersJsonSchema, f"{path}.parametersJsonSchema")
    return json_schema(declaration.parameters or {}, f"{path}.parameters")


def tool_choice(config: shapes.ToolConfig | None, declared: tuple[Tool, ...]) -> tuple[str, tuple[str, ...]]:
    """The tool choice in the terms of `Conversation`, and notes on what cannot be expressed."""
    calling = config.functionCallingConfig if config is not None else None
    if calling is None:
        return "auto", ()
    names = calling.allowedFunctionNames or ()
    _check(names, declared)
    subset = (
        (
            f"only {', '.join(names)} may be called, as the request says: the model is shown all tools and"
            " not held to these"
        ),
    )
    match (calling.mode or "AUTO").upper():
        case "AUTO" | "MODE_UNSPECIFIED":
            return "auto", ()
        case "VALIDATED":
            return "auto", subset if names else ()
        case "NONE":
            return "none", ()
        case "ANY":
            return (names[0], ()) if len(names) == 1 else ("required", subset if names else ())
        case other:
            path = "$.toolConfig.functionCallingConfig.mode"
            raise Refused(f"mode must be one of AUTO, ANY, NONE, VALIDATED, not {other!r}", path=path)


def _check(names: tuple[str, ...], declared: tuple[Tool, ...]) -> None:
    for index, name in enumerate(names):
        if all(tool.name != name for tool in declared):
            path = f"$.toolConfig.functionCallingConfig.allowedFunctionNames[{index}]"
            raise Refused(
                f"allowedFunctionNames has {name!r}, which is not among the functions: declare it", path=path
            )


# ── read ────────────────────────────────────────────────────────────

ENUM_TYPE = "text/x.enum"  # Google's own type: the answer is one of the schema's enum values, without quotes.
# This does not use `re.escape`, which also escapes characters that other regex engines do not allow to be
# escaped.
_REGEX_SPECIALS = re.compile(r"[\\^$.|?*+()\[\]{}]")


def read(body: bytes, envelope: RequestEnvelope) -> ModelRequest:
    """Read a generateContent body, or a countTokens body of either form. Raises Refused with the path of the
    field.
    """
    known = envelope.parts
    request, ignored = _request(body, known)
    contents: Iterable[
        Content | ContentDraft
    ]  # A content that is known from an earlier request is a Draft already.
    contents = (request.contents,) if isinstance(request.contents, Content) else request.contents
    drafts = [each if isinstance(each, ContentDraft) else read_draft(each) for each in contents]
    listed = (request.tools,) if isinstance(request.tools, shapes.ToolShape) else request.tools or ()
    declared = known.convert_list(listed, tools)
    choice, notes = tool_choice(request.toolConfig, declared)
    config = request.generationConfig or GenerationConfig()
    kept, volatile = without_volatile(messages(request.systemInstruction, drafts))
    return ModelRequest(
        provider="google",
        model=envelope.model or (request.model or "").removeprefix("models/"),
        conversation=Conversation(
            messages=kept, tools=declared, tool_choice=choice, thinking=_thinking(config.thinkingConfig)
        ),
        sampling=_sampling(config),
        stream=bool(envelope.stream),
        hints=_hints(envelope.headers),
        ignored=(*ignored, "$.contents[-1]") if volatile else ignored,
        notes=(*notes, RAN_CODE_NOTE) if any(draft.ran_code for draft in drafts) else notes,
        constraint=_read_constraint(config),
        choices=config.candidateCount or 1,
        logprobs=(config.logprobs or 0) if config.responseLogprobs else None,
        extras={
            "thoughts": bool(config.thinkingConfig and config.thinkingConfig.includeThoughts),
            "sse": "sse" in parse_qs(envelope.query).get("alt", ()),
        },
    )


def _request(body: bytes, known: PartsCache) -> tuple[GenerateRequest, tuple[str, ...]]:
    """The request, and the paths of its unknown fields."""
    value = read_value(body)
    counting = isinstance(value, dict) and any(camel(name) == "generateContentRequest" for name in value)
    if counting:
        spelled, unknown = respelled(value, CountRequest)
        return structure(spelled, CountRequest).generateContentRequest, unknown
    if not isinstance(value, dict):
        return structure(value, GenerateRequest), ()
    recalled: dict[str, Any] = dict(value)
    for name, part in (("contents", _known_content), ("tools", known_tool)):
        if is_list_of_objects(sent := value.get(name)):
            recalled[name] = known.convert_json(sent, part)
    spelled, unknown = respelled(recalled, GenerateRequest)
    return structure(spelled, GenerateRequest), unknown


def _thinking(config: ThinkingConfig | None) -> bool | None:
    """Whether to think, if the client's budget decides it by being zero or more. A level leaves it to the
    template.
    """
    if config is None or config.thinkingBudget is None or config.thinkingBudget < 0:
        return None
    return config.thinkingBudget > 0


def _sampling(config: GenerationConfig) -> Sampling:
    greedy = config.topP == 0  # A `topP` of 0 admits no token; Google then takes the most likely one.
    return Sampling(
        temperature=config.temperature,
        top_p=config.topP or None,
        # 0 and -1 both mean all tokens
        top_k=1 if greedy else config.topK if config.topK and config.topK > 0 else None,
        max_tokens=config.maxOutputTokens or None,
        stop=config.stopSequences or (),
        seed=config.seed,
        presence_penalty=config.presencePenalty,
        frequency_penalty=config.frequencyPenalty,
    )


def _read_constraint(config: GenerationConfig) -> Constraint | None:
    """What the answer must match. JSON without a schema means any JSON. A schema without a MIME type means
    JSON.
    """
    json = config.responseJsonSchema
    path = "$.generationConfig." + ("responseSchema" if json is None else "responseJsonSchema")
    schema = config.responseSchema if json is None else json
    kind = (
        (config.responseMimeType or ("text/plain" if schema is None else JSON_TYPE))
        .partition(";")[0]
        .strip()
        .lower()
    )
    match kind:
        case "text/plain":
            return None
        case "application/json":
            return Constraint(kind="json_schema", text=_text(schema or {}, path), path=path)
        case "text/x.enum":
            words = (schema or {}).get("enum")
            if not isinstance(words, list) or not words:
                raise Refused(f"{ENUM_TYPE} needs a responseSchema with an enum: add it", path=path)
            expression = "|".join(_REGEX_SPECIALS.sub(r"\\\g<0>", str(word)) for word in words)
            return Constraint(kind="regex", text=expression, path=path)
        case _:
            raise Refused(
                f"responseMimeType must be text/plain, {JSON_TYPE} or {ENUM_TYPE}, not {kind!r}",
                path="$.generationConfig.responseMimeType",
            )


def _text(schema: Mapping[str, Json], path: str) -> str:
    try:
        return compact(json_schema(schema, path))
    except Refused as error:
        raise Refused(str(error), path=path) from None


def _hints(headers: Mapping[str, str]) -> dict[str, str]:
    """The agent that sent the request. This API has no field for it, but opencode sends a sub-agent's session
    id and its parent's in every API.
    """
    session, parent = headers.get("x-session-id") or "", headers.get("x-parent-session-id") or ""
    return (
        {"session": session, "agent": session if parent else "", "parent": parent}
        if session or parent
        else {}
    )
