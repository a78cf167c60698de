"""What differs between model families once a tokenizer is known: a turn's marks in the model's own ids, and how it writes calls.

A value and one function, so that whoever reads samples and whoever renders prompts agree on them. `families.py` holds the table that fills
it in. Whoever adds a field gives it a value that means "this family has no such thing", and says in one line what it changes.
"""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

# text: visible. thinking, call: between their marks. between: inside a section of calls, where only calls count.
# header: Harmony's, from a message's start to its `message` mark; what it says decides what follows.
Mode = Literal["text", "thinking", "call", "between", "header"]

CallSyntax = Literal[
    "none",  # it can not call: no marks, and its template shows no tools
    "json",  # {"name": ..., "arguments": {...}}
    "bare_json",  # the same without marks: an answer that is one such object; Llama's `parameters` for `arguments`
    "function_xml",  # <function=name><parameter=key>value</parameter></function>
    "invoke_xml",  # <invoke name="..."><parameter name="...">value</parameter></invoke>, several between one pair of marks
    "arg_xml",  # name<arg_key>key</arg_key><arg_value>value</arg_value>
    "fenced",  # function<sep>name, and the arguments in a fence of json
    "separated",  # name<sep>arguments
    "numbered",  # functions.name:0<begin>arguments
    "braces",  # call:name{key:value}, strings between marks of their own
    "harmony",  # the name stands in the header, the arguments are the message
]


@frozen(kw_only=True)
class HarmonyMarks:
    """gpt-oss: a turn is messages, each `start` role `channel` name `message` content, ended by `end`, `call` or `stop`."""

    start: int
    channel: int
    message: int
    constrain: int
    end: int


@frozen(kw_only=True)
class Manner:
    """How a family's template wants the messages it is shown.

    `arguments`: the object itself (a text that is none is refused), either, or JSON text. `thinking`: the key of an assistant's thoughts.
    `text_apart`: it drops or moves the text beside a call, so the text is a message of its own. `one_call`: it shows one call a message, so
    several are shown one after another, each with its result. `spoken_ids`: it shows a call's id, which is the model's own `functions.name:0`.
    """

    arguments: Literal["object", "either", "text"] = "object"
    thinking: Literal["reasoning_content", "thinking"] = "reasoning_content"
    text_apart: bool = False
    one_call: bool = False
    spoken_ids: bool = False


@frozen(kw_only=True)
class Family:
    """How a model marks the parts of a turn, in its own ids.

    `stop_ids` are all ids that end a generation, the family's own turn end first. `turn_ends`: those behind which a turn is whole as it
    stands. `turn_end` closes a cut turn; None where the next header does. `boundaries`: stop ids that are themselves the first id of what
    follows, and are not written twice. `turn_starts` open a turn of any role, so nothing before the last one matters to the turn being
    written. Marks are None for a family that has none; `section_*` stand around one turn's calls. `separator` parts a call's head from its
    arguments. `manner` is how its template wants messages; `known` says of a case of the audit why a turn's extension there differs from a full
    render, where the family's own template is at fault; `refuses` says what its template can not be asked. `think_label` is what stands behind `think_open` and is no thought itself (Gemma 4 writes "thought" and a newline).
    """

    name: str
    stop_ids: tuple[int, ...]
    turn_end: int | None
    turn_ends: frozenset[int]
    turn_starts: frozenset[int]
    boundaries: frozenset[int] = frozenset()
    think_open: int | None = None
    think_close: int | None = None
    think_label: str = ""
    call_open: int | None = None
    call_close: int | None = None
    section_open: int | None = None
    section_close: int | None = None
    separator: int | None = None
    harmony: HarmonyMarks | None = None
    call_syntax: CallSyntax = "json"
    manner: Manner = Manner()
    known: Mapping[str, str] = field(factory=dict)
    refuses: Mapping[str, str] = field(factory=dict)

    def after(self, mode: Mode, token: int) -> Mode:
        """What is being written after a token. A mark means something only where it can: inside a thought or a call the other marks are text.

        Not for Harmony, whose headers say in words what follows: that is `parse.py`'s to read.
        """
        match mode:
            case "text" | "between":
                return self._opened(mode, token)
            case "thinking":
                return "text" if token == self.think_close else mode
            case "call":
                closed: Mode = "text" if self.section_open is None else "between"
                return closed if token == self.call_close else mode
            case "header":
                return mode

    def _opened(self, mode: Mode, token: int) -> Mode:
        if token == self.call_open:
            return "call"
        if mode == "between":
            return "text" if token == self.section_close else mode
        if token == self.section_open:
            return "between"
        return "thinking" if token == self.think_open else mode
