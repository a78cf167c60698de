"""Google generateContent: the JSON we take, as attrs classes. Names are camelCase here; `names` has put snake_case ones into it before.

A part is one class, not a union, because this API tells its kinds apart by which field is there. What a model would have to see and can not
is refused by a validator; fields that only decorate are named so that they are known, and left unread.
"""

from base64 import b64decode
from binascii import Error as NotBase64

from attrs import field, frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.providers.shapes import at_least, no_empty_strings, not_text, seed_fits, some, unseen, unserved, within

_CACHE = "cached contents are not served here: send the conversation itself, its prefix is cached by itself"


@frozen
class Blob:
    """Bytes inside a part. Text is text, however it is wrapped; anything else is refused, but told where a function gave it."""

    mimeType: str = ""
    data: str = ""
    displayName: str | None = None

    @property
    def kind(self) -> str:
        """What it is, without parameters."""
        return self.mimeType.partition(";")[0].strip().lower() or "nameless"

    def told(self) -> str:
        """The text, or that it is none."""
        return self.text() if _is_text(self.kind) else unseen(f"{self.kind} data")

    def text(self) -> str:
        if not _is_text(self.kind):
            raise Refused(f"this model reads text only: remove the {self.kind} data", path="$.mimeType")
        try:
            return b64decode(self.data.replace("-", "+").replace("_", "/") + "=" * (-len(self.data) % 4)).decode()
        except (NotBase64, ValueError):
            raise Refused("data must be base64 of UTF-8 text", path="$.data") from None


@frozen
class FileData:
    """Bytes that lie elsewhere."""

    fileUri: str = ""


def _is_text(kind: str) -> bool:
    return kind.startswith("text/") or kind in ("application/json", "application/xml")


@frozen
class FunctionCall:
    """`id` may lack: Google's own clients of old sent none, and matched results by name and order."""

    name: str
    id: str | None = None
    args: dict[str, Json] | None = None
    partialArgs: Json = None
    willContinue: bool | None = None


@frozen
class ResponsePart:
    """A part of a function's result beside its JSON."""

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
class Part:
    """One part; `thought` marks a text as thinking, `thoughtSignature` is what we signed it with, echoed."""

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
        """Refused, with the path of what the model can not read."""
        if self.fileData is not None:
            raise Refused(str(not_text("fileData")), path=f"{path}.fileData")
        if self.inlineData is not None:
            try:
                self.inlineData.text()
            except Refused as error:
                raise Refused(str(error), path=f"{path}.inlineData{(error.path or '$')[1:]}") from None


Parts = tuple[Part, ...] | Part | None


def parts(said: Parts) -> tuple[Part, ...]:
    """A content's parts; a single one may stand without its list."""
    return (said,) if isinstance(said, Part) else said or ()


@frozen
class Content:
    """`function` and `tool` are roles of this API's first version, for what is now a user's functionResponse.

    What the model can not see is refused, but told beside a functionResponse: there it is what a function found.
    """

    parts: Parts = None
    role: str | None = None

    def __attrs_post_init__(self) -> None:
        said = parts(self.parts)
        if any(part.functionResponse is not None for part in said):
            return
        for index, part in enumerate(said):
            part.check_readable("$.parts" if isinstance(self.parts, Part) else f"$.parts[{index}]")


@frozen
class Declaration:
    """A function. `parameters` is Google's own schema language, `parametersJsonSchema` is JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Json] | None = None
    parametersJsonSchema: dict[str, Json] | None = None
    response: Json = None
    responseJsonSchema: Json = None
    behavior: Json = None


@frozen
class Tool:
    """Every other field is a tool that runs on Google's servers: reported as ignored."""

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
    """A budget of 0 turns thinking off, -1 leaves it to the model."""

    includeThoughts: bool | None = None
    thinkingBudget: int | None = None
    thinkingLevel: str | None = None


@frozen(kw_only=True)
class GenerationConfig:
    temperature: float | None = field(default=None, validator=within(0, 2))
    topP: float | None = field(default=None, validator=within(0, 1))
    topK: int | None = field(default=None, validator=at_least(-1))
    maxOutputTokens: int | None = field(default=None, validator=at_least(0))  # 0 is proto's "not said"
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
    """The body. The model's name stands in the path; `model` in the body is what countTokens sends along."""

    contents: tuple[Content, ...] | Content = field(validator=some)
    model: str | None = None
    systemInstruction: Content | str | None = None
    tools: tuple[Tool, ...] | Tool | None = None
    toolConfig: ToolConfig | None = None
    generationConfig: GenerationConfig | None = None
    cachedContent: str | None = field(default=None, validator=unserved(_CACHE))


@frozen(kw_only=True)
class CountRequest:
    """A countTokens body: a whole request, or (as Vertex has it) its fields."""

    generateContentRequest: GenerateRequest
