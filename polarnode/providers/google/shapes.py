"""Google generateContent: the accepted JSON, as attrs classes with camelCase names.

Proto JSON accepts `systemInstruction` and `system_instruction` alike, and clients send both, so names are
respelled before a shape is made. Fields that are only passed on (arguments, results, schemas) keep their own
names. No value is changed. A field that is spelled twice keeps the value of the first spelling, as in proto.

A part is one class, not a union, because this API distinguishes the kinds by the field that is present.
Content that the model would have to see but cannot is refused by a validator. Fields that only decorate are
declared so that they count as known, and are not read.
"""

import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

import attrs
from attrs import field, frozen

from polarnode.core.codec.json import AlreadyRead, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.providers.shapes import (
    at_least,
    no_empty_strings,
    non_text_error,
    seed_fits,
    some,
    unseen,
    unserved,
    within,
)

# ── names ────────────────────────────────────────────────────────────

_SNAKE_LETTER = re.compile(r"_([a-z0-9])")
# These lists grow with the conversation. An unknown field in their items is reported once.
_GROWING_LISTS = frozenset({"contents", "parts"})


def camel(name: str) -> str:
    """`system_instruction` as `systemInstruction`."""
    return _SNAKE_LETTER.sub(lambda found: found[1].upper(), name)


def respelled(value: Json, shape: type[Any]) -> tuple[Json, tuple[str, ...]]:
    """The JSON with every field of a `shape` under its alias, and the paths of unknown fields, each once."""
    unknown: dict[str, None] = {}
    found = _value(value, shape, "$", unknown)
    return found, tuple(unknown)


@frozen
class KnownPart:
    """A part of a body that was read before. The paths of its unknown fields are relative to the part."""

    read: AlreadyRead
    unknown: tuple[str, ...]


def _value(value: Any, shape: Any, path: str, unknown: dict[str, None]) -> Any:
    if type(value) is KnownPart:
        unknown.update(dict.fromkeys(path + each for each in value.unknown))
        return value.read
    cls, inner = _parts(shape)
    if isinstance(value, dict) and cls is not None:
        return _object(value, cls, path, unknown)
    if isinstance(value, list) and inner is not None:
        many = path.rpartition(".")[2] in _GROWING_LISTS
        return [
            item.read
            if type(item) is KnownPart and not item.unknown
            else _value(item, inner, f"{path}[{'*' if many else index}]", unknown)
            for index, item in enumerate(value)
        ]
    return value


def _object(value: dict[str, Json], cls: Any, path: str, unknown: dict[str, None]) -> Json:
    fields_of = _fields(cls)
    found: dict[str, Json] = {}
    for name, raw in value.items():
        alias = name if name in fields_of else camel(name)
        if alias not in fields_of:
            if raw is not None:
                unknown[f"{path}.{alias}"] = None
        elif alias not in found:
            shape = fields_of[alias]
            found[alias] = raw if shape is None else _value(raw, shape, f"{path}.{alias}", unknown)
    return found


@cache
def _fields(cls: Any) -> dict[str, Any]:
    """Maps the alias of every field to its shape, or to None if nothing below it needs respelling."""
    return {
        field.alias: None if _parts(field.type) == (None, None) else field.type for field in attrs.fields(cls)
    }


@cache
def _parts(shape: Any) -> tuple[Any, Any]:
    """The class as which an object is read, and the type of a list's items. Each is None if the shape has
    none.
    """
    cls: Any = None
    inner: Any = None
    for member in _members(shape):
        if attrs.has(member):
            cls = member
        elif get_origin(member) is tuple and _parts(get_args(member)[0]) != (None, None):
            inner = get_args(member)[0]
    return cls, inner


def _members(shape: Any) -> Iterator[Any]:
    yield from get_args(shape) if get_origin(shape) in (Union, UnionType) else (shape,)


# ── shapes ────────────────────────────────────────────────────────────

_CACHE = "cached contents are not served here: send the conversation itself, its prefix is cached by itself"


@frozen
class Blob:
    """Bytes inside a part. Text is read, whatever its MIME type. Anything else is refused, or described if it
    is part of a function's result.
    """

    mimeType: str = ""
    data: str = ""
    displayName: str | None = None

    @property
    def kind(self) -> str:
        """The MIME type without parameters."""
        return self.mimeType.partition(";")[0].strip().lower() or "nameless"

    def describe(self) -> str:
        """The text, or a note that the content is not text."""
        return self.text() if _is_text(self.kind) else unseen(f"{self.kind} data")

    def text(self) -> str:
        if not _is_text(self.kind):
            raise Refused(f"this model reads text only: remove the {self.kind} data", path="$.mimeType")
        try:
            return b64decode(
                self.data.replace("-", "+").replace("_", "/") + "=" * (-len(self.data) % 4)
            ).decode()
        except (NotBase64, ValueError):
            raise Refused("data must be base64 of UTF-8 text", path="$.data") from None


@frozen
class FileData:
    """Bytes that are stored elsewhere."""

    fileUri: str = ""


def _is_text(kind: str) -> bool:
    return kind.startswith("text/") or kind in ("application/json", "application/xml")


@frozen
class FunctionCall:
    """`id` may be absent: Google's older clients sent none, and matched results by name and order."""

    name: str
    id: str | None = None
    args: dict[str, Json] | None = None
    partialArgs: Json = None
    willContinue: bool | None = None


@frozen
class ResponsePart:
    """A part of a function's result that stands beside its JSON."""

    inlineData: Blob | None = None
    fileData: FileData | None = None
    text: str | None = None


@frozen
class FunctionResponse:
    name: str = ""
    id: str | None = None
    response: Json = None
    parts: tuple[ResponsePart, ...] | None = None
    willContinue: bool | None = None
    scheduling: str | None = None


@frozen
class ExecutableCode:
    code: str = ""
    language: str | None = None
    id: str | None = None


@frozen
class CodeExecutionResult:
    output: str | None = None
    outcome: str | None = None
    id: str | None = None


@frozen(kw_only=True)
class PartShape:
    """One part. `thought` marks a text as thinking; `thoughtSignature` is this node's signature, echoed."""

    text: str | None = None
    thought: bool | None = None
    thoughtSignature: str | None = None
    functionCall: FunctionCall | None = None
    functionResponse: FunctionResponse | None = None
    executableCode: ExecutableCode | None = None
    codeExecutionResult: CodeExecutionResult | None = None
    inlineData: Blob | None = None
    fileData: FileData | None = None
    partMetadata: Json = None
    videoMetadata: Json = None
    mediaResolution: Json = None

    def check_readable(self, path: str) -> None:
        """Raise Refused, with its path, for a part that the model cannot read."""
        if self.fileData is not None:
            raise Refused(str(non_text_error("fileData")), path=f"{path}.fileData")
        if self.inlineData is not None:
            try:
                self.inlineData.text()
            except Refused as error:
                raise Refused(str(error), path=f"{path}.inlineData{(error.path or '$')[1:]}") from None


Parts = tuple[PartShape, ...] | PartShape | None


def parts(value: Parts) -> tuple[PartShape, ...]:
    """A content's parts. A single part may stand there without a list."""
    return (value,) if isinstance(value, PartShape) else value or ()


@frozen
class Content:
    """`function` and `tool` are roles of this API's first version, for what is now a functionResponse of the
    user.

    Parts that the model cannot read are refused. Beside a functionResponse they belong to a function's
    result, and are described instead.
    """

    parts: Parts = None
    role: str | None = None

    def __attrs_post_init__(self) -> None:
        shown = parts(self.parts)
        if any(part.functionResponse is not None for part in shown):
            return
        for index, part in enumerate(shown):
            part.check_readable("$.parts" if isinstance(self.parts, PartShape) else f"$.parts[{index}]")


@frozen
class Declaration:
    """A function. `parameters` is in Google's own schema language, `parametersJsonSchema` in JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Json] | None = None
    parametersJsonSchema: dict[str, Json] | None = None
    response: Json = None
    responseJsonSchema: Json = None
    behavior: Json = None


@frozen
class ToolShape:
    """Every other field is a tool that runs on Google's servers, and is reported as ignored."""

    functionDeclarations: tuple[Declaration, ...] | None = None


@frozen
class FunctionCallingConfig:
    mode: str | None = None
    allowedFunctionNames: tuple[str, ...] | None = None


@frozen
class ToolConfig:
    functionCallingConfig: FunctionCallingConfig | None = None


@frozen
class ThinkingConfig:
    """A budget of 0 turns thinking off; -1 leaves it to the model."""

    includeThoughts: bool | None = None
    thinkingBudget: int | None = None
    thinkingLevel: str | None = None


@frozen(kw_only=True)
class GenerationConfig:
    temperature: float | None = field(default=None, validator=within(0, 2))
    topP: float | None = field(default=None, validator=within(0, 1))
    topK: int | None = field(default=None, validator=at_least(-1))
    maxOutputTokens: int | None = field(default=None, validator=at_least(0))  # 0 means absent, as in proto
    stopSequences: tuple[str, ...] | None = field(default=None, validator=no_empty_strings)
    seed: int | None = field(default=None, validator=seed_fits)
    presencePenalty: float | None = field(default=None, validator=within(-2, 2))
    frequencyPenalty: float | None = field(default=None, validator=within(-2, 2))
    candidateCount: int | None = field(default=None, validator=within(0, 8))  # this API's own limit
    responseMimeType: str | None = None
    responseSchema: dict[str, Json] | None = None
    responseJsonSchema: dict[str, Json] | None = None
    responseLogprobs: bool | None = None
    logprobs: int | None = field(default=None, validator=within(0, 20))
    thinkingConfig: ThinkingConfig | None = None


@frozen(kw_only=True)
class GenerateRequest:
    """The body. The path names the model; `model` in the body comes from countTokens."""

    contents: tuple[Content, ...] | Content = field(validator=some)
    model: str | None = None
    systemInstruction: Content | str | None = None
    tools: tuple[ToolShape, ...] | ToolShape | None = None
    toolConfig: ToolConfig | None = None
    generationConfig: GenerationConfig | None = None
    cachedContent: str | None = field(default=None, validator=unserved(_CACHE))


def known_content(sent: dict[str, Json]) -> KnownPart | Json:
    """A content, to be kept for later requests that repeat it. The JSON itself if it is refused, because the
    refusal must name its place.
    """
    return _known(sent, Content)


def known_tool(sent: dict[str, Json]) -> KnownPart | Json:
    """As `known_content`, for an entry of the tools."""
    return _known(sent, ToolShape)


def _known(sent: dict[str, Json], shape: type[Any]) -> KnownPart | Json:
    unknown: dict[str, None] = {}
    try:
        return KnownPart(AlreadyRead(structure(_value(sent, shape, "", unknown), shape)), tuple(unknown))
    except Refused:
        return sent


@frozen(kw_only=True)
class CountRequest:
    """A countTokens body: a whole request. On Vertex the body has the request's fields themselves."""

    generateContentRequest: GenerateRequest
