"""Google: its contents into our messages, which are flat.

The rules: the order of a user content's parts is kept, a functionResponse becoming a message of its own; model contents in a row are one turn
(the SDK's chats keep every chunk of a stream as a content), while user contents stay one to one, so that a history that is only appended to
reads as one that is only appended to. A result answers the call whose id it has, else the first open call of its name.
"""

from collections.abc import Iterable, Iterator

from attrs import define, field

from polarnode.conversation import Json, Message, ToolCall
from polarnode.errors import Refused
from polarnode.providers.google.ids import inward, of_signature
from polarnode.providers.google.shapes import CodeExecutionResult, Content, ExecutableCode, FunctionCall, FunctionResponse, Part, ResponsePart, parts
from polarnode.providers.shapes import compact, not_text, paragraphs, unseen

_ROLES = {None: "user", "": "user", "user": "user", "function": "user", "tool": "user", "model": "model", "assistant": "model", "system": "system"}
# What Google says a result is: the whole object, unless it says its output by this name. `result` is what its SDKs' automatic calling writes.
_OUTPUTS = ("output", "result")

RAN_CODE = "code that Google's servers ran is shown as text: nothing runs it here"


def messages(system: Content | str | None, contents: Iterable[Content]) -> tuple[Message, ...]:
    """The whole conversation: the system instruction first, when there is one."""
    head = system if isinstance(system, str) else paragraphs(map(_shown, parts(system.parts))) if system is not None else ""
    reader = _Reader([Message(role="system", text=head)] if head else [])
    for index, content in enumerate(contents):
        try:
            reader.read(content)
        except Refused as error:
            where = f"$.contents[{index}]"
            raise Refused(str(error), path=where + (error.path or "$")[1:]) from None
    return tuple(reader.found)


def ran_code(contents: Iterable[Content]) -> bool:
    """Whether any part is code of Google's own tool, or its output."""
    return any(part.executableCode is not None or part.codeExecutionResult is not None for content in contents for part in parts(content.parts))


@define(eq=False)
class _Reader:
    """One pass over the contents. `open` are the calls of the latest model turn that have no result yet; `calls` counts all there were."""

    found: list[Message]
    open: list[ToolCall] = field(factory=list)
    calls: int = 0

    def read(self, content: Content) -> None:
        match _ROLES.get(content.role):
            case "user":
                self._user(content)
            case "model":
                self._model(content)
            case "system":
                self.found.append(Message(role="system", text=paragraphs(map(_shown, parts(content.parts)))))
            case _:
                raise Refused(f"the role must be 'user' or 'model', not {content.role!r}", path="$.role")

    def _user(self, content: Content) -> None:
        texts: list[str] = []
        told = len(self.found)
        for part in parts(content.parts):
            if part.functionResponse is None:
                texts.append(_shown(part))
                continue
            self._tell(texts)
            texts = []
            self.found.append(self._result(part.functionResponse))
        if texts or len(self.found) == told:  # one to one, even for nothing
            self.found.append(Message(role="user", text=paragraphs(texts)))

    def _tell(self, texts: list[str]) -> None:
        if texts:
            self.found.append(Message(role="user", text=paragraphs(texts)))

    def _result(self, response: FunctionResponse) -> Message:
        return Message(role="tool", text=result_text(response), call_id=self._answered(response))

    def _answered(self, response: FunctionResponse) -> str:
        """The id of the call this answers. Some clients leave ids out, of calls as of results; they keep names and order."""
        said = inward(response.id or "", response.name)
        for fits in (lambda call: call.id == said, lambda call: call.name == response.name):
            for call in filter(fits, self.open):
                self.open.remove(call)
                return call.id
        return said or response.name

    def _model(self, content: Content) -> None:
        before = self.found[-1] if self.found and self.found[-1].role == "assistant" else None
        said = self._said(parts(content.parts), 0 if before is None else len(before.calls))
        if before is not None:
            self.found[-1] = before.joined(said)
            self.open += said.calls
        else:
            self.found.append(said)
            self.open = list(said.calls)

    def _said(self, said: tuple[Part, ...], earlier: int) -> Message:
        """One content as a message; `earlier` calls of the same turn stand before it."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        refs: list[str] = []
        for part in said:
            if part.functionCall is not None:
                signed = of_signature(part.thoughtSignature, earlier + len(calls))
                calls.append(self._call(part.functionCall, signed))
                refs.append(calls[-1].id if part.functionCall.id or signed else "")
            elif part.thought:
                thoughts.append(part.text or "")
            else:
                texts.append(_shown(part))
            refs.append(part.thoughtSignature or "")
        # Joined as `Answer.text` and `Answer.thinking` join the parts we sent.
        return Message(role="assistant", text="".join(texts), calls=tuple(calls), thinking="".join(thoughts), refs=_once(refs))

    def _call(self, call: FunctionCall, signed: str | None) -> ToolCall:
        """A call; one without an id gets the one it is signed with, or one by its place among all calls, which later requests repeat."""
        self.calls += 1
        call_id = inward(call.id, call.name) if call.id else signed or f"call_{self.calls}"
        return ToolCall(id=call_id, name=call.name, arguments=compact(call.args or {}))


def result_text(response: FunctionResponse) -> str:
    """A function's result as the model sees it: its output where that is all it says, a text as it is, anything else as compact JSON.

    So the same tool reads the same in every API; an `error` keeps its name, because that name is all that says it is one.
    """
    said = response.response
    if isinstance(said, dict):
        said = _output_of(said, response.name)
    return paragraphs((_plain(said), *map(_beside, response.parts or ())))


def _beside(part: Part | ResponsePart) -> str:
    """What stands beside a result."""
    if part.fileData is not None:
        return unseen("fileData")
    return part.text or "" if part.inlineData is None else part.inlineData.told()


def _output_of(said: dict[str, Json], name: str) -> Json:
    if len(said) == 1:
        return next((said[output] for output in _OUTPUTS if output in said), said)
    if said.keys() == {"name", "content"} and said["name"] == name:
        return said["content"]  # as the AI SDK (opencode) wraps it
    return said


def _plain(value: Json) -> str:
    return value if isinstance(value, str) else "" if value is None else compact(value)


def _shown(part: Part) -> str:
    """A part as text."""
    if part.executableCode is not None:
        return _code(part.executableCode)
    if part.codeExecutionResult is not None:
        return _output(part.codeExecutionResult)
    if part.inlineData is not None or part.fileData is not None:
        return _beside(part)
    if part.functionCall is not None or part.functionResponse is not None:
        raise not_text("functionCall" if part.functionCall is not None else "functionResponse")
    return part.text or ""


def _code(code: ExecutableCode) -> str:
    return f"```{(code.language or '').lower()}\n{code.code}\n```\n"


def _output(result: CodeExecutionResult) -> str:
    return f"```\n{result.output or ''}\n```\n"


def _once(refs: Iterable[str]) -> tuple[str, ...]:
    """Each reference once: all thoughts and calls of an answer carry the same signature."""
    return tuple(dict.fromkeys(_nonempty(refs)))


def _nonempty(refs: Iterable[str]) -> Iterator[str]:
    yield from (ref for ref in refs if ref)
