"""What a model speaks, as a table for people: its ids, how its turns end, how it calls and thinks, and what its template can not be asked.

Pure: a loaded model in, rich renderables out. Whoever adds a call syntax adds its words to `_SYNTAXES`; a row says nothing that a model does
not do.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from rich.table import Table
from rich.text import Text

from polarnode.cli.printing import harmless
from polarnode.conversation import Conversation, Message
from polarnode.tokens.family import CallSyntax, Family
from polarnode.tokens.model import LoadedModel

_SYNTAXES: Final[Mapping[CallSyntax, str]] = {
    "none": "none: it has no way to call tools",
    "json": 'JSON, {"name": …, "arguments": {…}}',
    "bare_json": 'the whole answer is JSON, {"name": …, "parameters": {…}}',
    "function_xml": "XML, <function=name><parameter=key>value</parameter></function>",
    "invoke_xml": 'XML, <invoke name="name"><parameter name="key">value</parameter></invoke>',
    "arg_xml": "name<arg_key>key</arg_key><arg_value>value</arg_value>",
    "fenced": "function, its name, and the arguments in a fence of JSON",
    "separated": "its name, a separator and JSON arguments",
    "numbered": "functions.name:0 and JSON arguments",
    "braces": "call:name{key:value}",
    "harmony": "a message to functions.name, whose text is JSON arguments",
}
_ASKED: Final = {True: "with thinking on", False: "with thinking off"}
_NEW: Final = {"user": Message(role="user", text="x"), "tool": Message(role="tool", text="x", call_id="c")}
_REFUSED: Final[Mapping[str, str]] = {
    "tools": "tools",
    "calls": "calls of tools",
    "tool": "results of tools",
    "late system": "system messages after the head",
    "two systems": "two system messages at the head",
    "several results": "results of several calls of one turn",
}


def language(model: LoadedModel) -> Table:
    """The table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(model):
        table.add_row(name, Text(harmless(value)))
    return table


def rows(model: LoadedModel) -> Iterator[tuple[str, str]]:
    """Each line of it: what it is about, and what is so."""
    family, names = model.family, {number: text for text, number in model.tokenizer.control.items()}
    yield "family", family.name
    yield "vocabulary", f"{model.tokenizer.vocab_size} ids, {len(names)} of them control tokens; {model.tokenizer.kind}"
    yield "ends a turn", ", ".join(f"{names[token]} ({token})" for token in family.stop_ids)
    if family.turn_end is None:
        yield "", "no mark of its own: the next header ends a turn, and a sample that was cut"
    yield "calls", _calls(family, names)
    yield "thinking", _thinking(model, names)
    if family.harmony is not None or family.think_open is not None:
        yield "earlier thinking", _earlier(model)
    limits = model.template.limits
    refused = [_REFUSED.get(kind, kind) for kind in dict.fromkeys((*limits.sentences, *family.refuses)) if kind not in limits.otherwise]
    yield "refuses", ", ".join(refused) or "nothing: every role and tools are taken"


def _calls(family: Family, names: Mapping[int, str]) -> str:
    marks = [names[token] for token in (family.section_open, family.call_open) if token is not None]
    between = f", after {' '.join(marks)}" if marks and family.call_syntax != "none" else ""
    return _SYNTAXES[family.call_syntax] + between


def _thinking(model: LoadedModel, names: Mapping[int, str]) -> str:
    family = model.family
    if family.harmony is not None:
        return "messages of the channel analysis"
    if family.think_open is None or family.think_close is None:
        return "none: it has no marks for thoughts"
    told = {asked: _opened(model, asked) for asked in (None, True, False)}
    said = ["the prompt opens it" if told[None] else "the model opens it"]
    said += [f"{words} {'the prompt opens it' if told[asked] else 'it does not'}" for asked, words in _ASKED.items() if told[asked] != told[None]]
    return f"{names[family.think_open]} to {names[family.think_close]}; {', '.join(said)}"


def _opened(model: LoadedModel, thinking: bool | None) -> bool:
    return model.template.opens_thinking(model.template.root(Conversation(messages=(Message(role="user", text="x"),), thinking=thinking)))


def _earlier(model: LoadedModel) -> str:
    """What the template does with thoughts of earlier turns when a user or a tool speaks."""
    after = [role for role, new in _NEW.items() if model.template.drops_thinking_before((new,))]
    left_out = f"left out by the template before {' and '.join(f'{role} messages' for role in after)}" if after else "kept by the template"
    return f'{left_out}; sampled thoughts are kept in any case, unless a task says thinking = "template"'
