"""Model families: the marks of a turn in the model's own ids, and how the family writes tool calls.

`Family` is shared by the parsers of samples and the renderers of prompts. `ROWS` is the table of families;
`family_of` finds the one row whose control strings and template fit a tokenizer. A model is recognised by
what its template writes for a probe (a question, a call and another question), never by its name, because
fine-tunes keep the name and change the template.

To add a family, add a row, a fixture in `tests/kits/family_fixtures.py` and a golden file. `Template.audit`
then says whether it can be served faithfully. A new field of `Family` needs a value that means "not in this
family".
"""

from collections.abc import Mapping
from typing import Final, Literal

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import ModelError, Refused, shortened
from polarnode.core.ports import Tokenizer

# ── family ────────────────────────────────────────────────────────────────────────────────────────

# The modes. text is visible. thinking and call are between their marks. between is inside a section of calls,
# where only calls count. header is Harmony's, from the start of a message to its `message` mark; its content
# decides what follows. draft begins at a call's opening tag inside a thought; it is a call only if the
# thought is never closed.
Mode = Literal["text", "thinking", "call", "between", "header", "draft"]

CallSyntax = Literal[
    "none",  # no tool calls: the family has no marks, and its template shows no tools
    "json",  # {"name": ..., "arguments": {...}}
    # the same without marks: the answer is one such object; Llama writes `parameters` for `arguments`
    "bare_json",
    "function_xml",  # <function=name><parameter=key>value</parameter></function>
    # <invoke name="..."><parameter name="...">value</parameter></invoke>, several between one pair of marks
    "invoke_xml",
    "arg_xml",  # name<arg_key>key</arg_key><arg_value>value</arg_value>
    "fenced",  # function<sep>name, then the arguments in a code fence of json
    "separated",  # name<sep>arguments
    "numbered",  # functions.name:0<begin>arguments
    "braces",  # call:name{key:value}, with strings between marks of their own
    "harmony",  # the header has the name, and the message is the arguments
]


# Whether an opening tag inside a thought that is never closed begins a call: never, only at the beginning of
# a line, or anywhere (Kimi). The parsers that are in use do the same.
CallInThought = Literal["never", "line", "anywhere"]


@frozen(kw_only=True)
class HarmonyMarks:
    """The marks of gpt-oss. A turn consists of messages, each `start` role `channel` name `message` content,
    ended by `end`, `call` or `stop`.
    """

    start: int
    channel: int
    message: int
    constrain: int
    end: int


@frozen(kw_only=True)
class TemplateManner:
    """How a family's template wants its messages.

    `arguments`: the object itself (a text that is no object is shown as one argument), either, or JSON text.
    `thinking`: the key of an assistant's thinking. `text_apart`: the template drops or moves the text beside
    a call, so the text becomes a message of its own. `one_call`: the template shows one call for each
    message, so several are shown one after another, each with its result. `model_call_ids`: the template
    shows the id of a call, which is the model's own `functions.name:0`.
    """

    arguments: Literal["object", "either", "text"] = "object"
    thinking: Literal["reasoning_content", "thinking"] = "reasoning_content"
    text_apart: bool = False
    one_call: bool = False
    model_call_ids: bool = False


@frozen(kw_only=True)
class Family:
    """How a model marks the parts of a turn, in its own ids.

    `stop_ids` are all ids that end a generation, the family's own turn end first. A turn is complete after
    one of `turn_ends`. `turn_end` closes a cut turn; it is None if the next header does. `boundaries` are
    stop ids that are themselves the first id of what follows, and are not written twice. `turn_starts` open a
    turn of any role, so nothing before the last one matters to the turn being written. A mark is None if the
    family does not have it; `section_*` stand around the calls of one turn. `separator` divides a call's head
    from its arguments. `manner` is how the template wants messages. `known_differences` names the cases of
    the audit in which a turn's extension differs from a full render through a fault of the family's own
    template, with the reason. `refuses` says what the template cannot be asked. `think_label` is the text
    after `think_open` that is not part of the thought (Gemma 4 writes "thought" and a newline).
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
    call_in_thought: CallInThought = "never"
    manner: TemplateManner = TemplateManner()
    known_differences: Mapping[str, str] = field(factory=dict)
    refuses: Mapping[str, str] = field(factory=dict)

    def after(self, mode: Mode, token: int) -> Mode:
        """The mode after a token. A mark counts only in the modes that allow it: inside a thought or a call
        the other marks are text.

        This is not used for Harmony, whose headers name the next part in words; `parser` reads those.
        """
        match mode:
            case "text" | "between":
                return self._opened(mode, token)
            case "thinking" | "draft":
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


# ── table of families ─────────────────────────────────────────────────────────────────────────────

Pair = tuple[str, str]
_EITHER_MANNER: Final = TemplateManner(arguments="either")


@frozen(kw_only=True)
class FamilyRow:
    """A family in control strings. The render of the probe contains one of `written` and ends with one of
    `prompts`.

    `turn_end`, `turn_starts`, `call`, `section` and `separator` must be in the tokenizer; `stops` and `think`
    are used if they are. `ends` are what ends a turn besides `turn_end`; `boundaries` are stops that begin
    what follows.
    """

    name: str
    written: tuple[str, ...]
    prompts: tuple[str, ...]
    turn_end: str | None
    turn_starts: tuple[str, ...]
    stops: tuple[str, ...]
    ends: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()
    think: Pair | None = None
    think_label: str = ""
    # Without a closing mark, a call extends to the end of the turn.
    call: tuple[str, str | None] | None = None
    section: Pair | None = None
    separator: str | None = None
    harmony: Mapping[str, str] | None = None
    syntax: CallSyntax = "none"
    call_in_thought: CallInThought = "line"
    manner: TemplateManner = _EITHER_MANNER
    known_differences: Mapping[str, str] = field(factory=dict)
    refuses: Mapping[str, str] = field(factory=dict)


_THINK_MARKS: Final = ("<think>", "</think>")
_HERMES_MARKS: Final = ("<tool_call>", "</tool_call>")
_IM_BOUNDARY: Final = "<|im_end|>\n<|im_start|>"
_XML_CALL: Final = (
    "<function=look>\n<parameter=b>\n1\n</parameter>\n<parameter=a>\nx\n</parameter>\n</function>"
)
_LLAMA_BOUNDARY: Final = "<|eot_id|><|start_header_id|>"
_LLAMA: Final = ("<|start_header_id|>assistant<|end_header_id|>\n\n",)
_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SEPARATOR, _DEEPSEEK_TURN_END, _USER = "<｜tool▁sep｜>", "<｜end▁of▁sentence｜>", "<｜User｜>y"
_DEEPSEEK_PROMPTS: Final = (
    "<｜Assistant｜>",
    "<｜Assistant｜><think>\n",
    "<｜Assistant｜><think>",
    "<｜Assistant｜></think>",
)
_OBJECT: Final = '{"b": 1, "a": "x"}'

_ONE: Final = (
    "the template shows one call a message, so that several of one turn are shown one after another, each"
    " with its result"
)
_FIRST_CALLS_REASON: Final = (
    "the template opens the results of a conversation's first calls only; here those of every turn are opened"
)

ROWS: Final = (
    FamilyRow(
        # Qwen2.5, Qwen3, Qwen3 2507 instruct and thinking, polarnode-tiny. Qwen3-Coder and Qwen3.5 write
        # calls as XML.
        name="qwen3",
        written=(
            f'<tool_call>\n{{"name": "look", "arguments": {_OBJECT}}}\n</tool_call>{_IM_BOUNDARY}user\n',
        ),
        prompts=(f"y{_IM_BOUNDARY}assistant\n", f"y{_IM_BOUNDARY}assistant\n<think>\n"),
        turn_end="<|im_end|>",
        turn_starts=("<|im_start|>",),
        stops=("<|endoftext|>",),
        think=_THINK_MARKS,
        call=_HERMES_MARKS,
        syntax="json",
    ),
    FamilyRow(
        # Qwen3-Coder, Qwen3.5, Qwen3.6, and Nemotron 3 nano, super and ultra, whose calls end with a newline.
        name="qwen3_xml",
        written=(
            f"<tool_call>\n{_XML_CALL}\n</tool_call>{_IM_BOUNDARY}user\n",
            f"<tool_call>\n{_XML_CALL}\n</tool_call>\n{_IM_BOUNDARY}user\n",
        ),
        prompts=(
            f"y{_IM_BOUNDARY}assistant\n",
            f"y{_IM_BOUNDARY}assistant\n<think>\n",
            f"y{_IM_BOUNDARY}assistant\n<think>\n\n</think>\n\n",
        ),
        turn_end="<|im_end|>",
        turn_starts=("<|im_start|>",),
        stops=("<|endoftext|>",),
        think=_THINK_MARKS,
        call=_HERMES_MARKS,
        syntax="function_xml",
        manner=TemplateManner(),
    ),
    FamilyRow(
        name="chatml",  # SmolLM2 and other models with plain turns: no tool calls
        written=(f"<|im_start|>assistant\n{_IM_BOUNDARY}user\ny",),
        prompts=(f"y{_IM_BOUNDARY}assistant\n",),
        turn_end="<|im_end|>",
        turn_starts=("<|im_start|>",),
        stops=("<|endoftext|>",),
        think=_THINK_MARKS,
    ),
    FamilyRow(
        name="llama3",  # Llama 3.1, 3.2, 3.3
        written=(f'{{"name": "look", "parameters": {_OBJECT}}}{_LLAMA_BOUNDARY}user',),
        prompts=_LLAMA,
        turn_end="<|eot_id|>",
        ends=("<|eom_id|>",),
        turn_starts=("<|start_header_id|>",),
        stops=("<|eom_id|>", "<|end_of_text|>"),
        # This mark also precedes code for Llama's built-in tools. No harness offers those, so such code is
        # text.
        call=("<|python_tag|>", None),
        syntax="bare_json",
        manner=TemplateManner(arguments="either", text_apart=True, one_call=True),
        known_differences={"two tool": _ONE},
    ),
    FamilyRow(
        name="llama3_plain",  # the first Llama 3, whose template has no tools
        written=(f"assistant<|end_header_id|>\n\n{_LLAMA_BOUNDARY}user",),
        prompts=_LLAMA,
        turn_end="<|eot_id|>",
        turn_starts=("<|start_header_id|>",),
        stops=("<|end_of_text|>",),
    ),
    FamilyRow(
        # GLM 4.5 and 4.6, and 4.7 and 5, which write a call in one line and open the thought. The header of
        # the next turn ends a turn, and the model itself samples it.
        name="glm4",
        written=(
            (
                "<tool_call>look\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n"
                "<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call><|user|>"
            ),
            (
                "<tool_call>look<arg_key>b</arg_key><arg_value>1</arg_value>"
                "<arg_key>a</arg_key><arg_value>x</arg_value></tool_call><|user|>"
            ),
        ),
        prompts=(
            "y<|assistant|>",
            "y<|assistant|>\n<think></think>",
            "y<|assistant|><think>",
            "y<|assistant|></think>",
            "y<|assistant|><think></think>",
        ),
        turn_end=None,
        turn_starts=("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
        boundaries=("<|user|>", "<|observation|>"),
        stops=("<|endoftext|>",),
        think=_THINK_MARKS,
        call=_HERMES_MARKS,
        syntax="arg_xml",
        manner=TemplateManner(),
    ),
    FamilyRow(
        # A turn consists of messages with headers of their own. In what the template writes, `<|end|>` ends a
        # message that is no call.
        name="gptoss",
        written=(
            (
                "<|start|>assistant to=functions.look<|channel|>commentary"
                f" json<|message|>{_OBJECT}<|call|><|start|>user"
            ),
            (
                "<|start|>assistant<|channel|>commentary to=functions.look"
                f" <|constrain|>json<|message|>{_OBJECT}<|call|><|start|>user"
            ),
        ),
        prompts=("y<|end|><|start|>assistant",),
        turn_end="<|end|>",
        ends=("<|return|>", "<|call|>"),
        turn_starts=("<|start|>",),
        stops=("<|return|>", "<|call|>", "<|endoftext|>"),
        harmony={
            "start": "<|start|>",
            "channel": "<|channel|>",
            "message": "<|message|>",
            "constrain": "<|constrain|>",
            "end": "<|end|>",
        },
        syntax="harmony",
        manner=TemplateManner(arguments="either", thinking="thinking", text_apart=True, one_call=True),
        refuses={
            "several results": (
                "shows a result under the name of the last call, so that several calls of one turn cannot be"
                " answered"
            )
        },
    ),
    FamilyRow(
        name="deepseek",  # V3 and R1
        written=(
            (
                f"{_SECTION[0]}{_CALL[0]}function{_DEEPSEEK_SEPARATOR}look\n```json\n{_OBJECT}\n```"
                f"{_CALL[1]}{_SECTION[1]}{_DEEPSEEK_TURN_END}{_USER}"
            ),
        ),
        prompts=_DEEPSEEK_PROMPTS,
        turn_end=_DEEPSEEK_TURN_END,
        turn_starts=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        stops=(),
        think=_THINK_MARKS,
        call=_CALL,
        section=_SECTION,
        separator=_DEEPSEEK_SEPARATOR,
        syntax="fenced",
        call_in_thought="never",
        manner=TemplateManner(arguments="text"),
        known_differences={
            "tool": _FIRST_CALLS_REASON,
            "two tool": _FIRST_CALLS_REASON,
            "tool and user": _FIRST_CALLS_REASON,
        },
    ),
    FamilyRow(
        name="deepseek_v3_1",
        written=(
            f"{_SECTION[0]}{_CALL[0]}look{_DEEPSEEK_SEPARATOR}{_OBJECT}{_CALL[1]}{_SECTION[1]}{_DEEPSEEK_TURN_END}{_USER}",
        ),
        prompts=_DEEPSEEK_PROMPTS,
        turn_end=_DEEPSEEK_TURN_END,
        turn_starts=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        stops=(),
        think=_THINK_MARKS,
        call=_CALL,
        section=_SECTION,
        separator=_DEEPSEEK_SEPARATOR,
        syntax="separated",
        call_in_thought="never",
        manner=TemplateManner(arguments="text"),
    ),
    FamilyRow(
        # Also V3 and R1 as first published. Their template shows calls only beside no text at all, and never
        # ends a single call.
        name="deepseek_r1_distill",
        written=(f"<｜Assistant｜>{_DEEPSEEK_TURN_END}{_USER}",),
        prompts=_DEEPSEEK_PROMPTS,
        turn_end=_DEEPSEEK_TURN_END,
        turn_starts=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        stops=(),
        think=_THINK_MARKS,
        manner=TemplateManner(arguments="text"),
        refuses={"tool": "does not end the calls that a result answers"},
    ),
    FamilyRow(
        name="kimi_k2",  # K2, K2 Thinking, K2.5, K2.6
        written=(
            (
                f"<|tool_call_begin|>c0<|tool_call_argument_begin|>{_OBJECT}<|tool_call_end|>"
                "<|tool_calls_section_end|><|im_end|><|im_user|>user"
            ),
        ),
        prompts=(
            "<|im_assistant|>assistant<|im_middle|>",
            "<|im_assistant|>assistant<|im_middle|><think>",
            "<|im_assistant|>assistant<|im_middle|><think></think>",
        ),
        turn_end="<|im_end|>",
        turn_starts=("<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
        stops=("[EOS]",),
        think=_THINK_MARKS,
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        separator="<|tool_call_argument_begin|>",
        syntax="numbered",
        call_in_thought="anywhere",
        manner=TemplateManner(arguments="either", model_call_ids=True),
    ),
    FamilyRow(
        name="minimax_m2",
        written=(
            (
                '<invoke name="look">\n<parameter name="b">1</parameter>\n<parameter'
                ' name="a">x</parameter>\n</invoke>\n</minimax:tool_call>[e~[\n]~b]user'
            ),
        ),
        prompts=("y[e~[\n]~b]ai\n<think>\n", "y[e~[\n]~b]ai\n"),
        turn_end="[e~[",
        turn_starts=("]~b]",),
        stops=(),
        think=_THINK_MARKS,
        call=("<minimax:tool_call>", "</minimax:tool_call>"),
        syntax="invoke_xml",
        manner=TemplateManner(),
    ),
    FamilyRow(
        name="gemma3",
        written=("<start_of_turn>model\n<end_of_turn>\n<start_of_turn>user\ny",),
        prompts=("y<end_of_turn>\n<start_of_turn>model\n",),
        turn_end="<end_of_turn>",
        turn_starts=("<start_of_turn>",),
        stops=("<eos>",),
    ),
    FamilyRow(
        # A call is answered within the model's own turn, and the mark of the response ends the sample.
        name="gemma4",
        written=('<|tool_call>call:look{a:<|"|>x<|"|>,b:1}<tool_call|>',),
        prompts=("y<turn|>\n<|turn>model\n", "y<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"),
        turn_end="<turn|>",
        turn_starts=("<|turn>", "<tool_response|>"),
        boundaries=("<|tool_response>",),
        stops=("<eos>",),
        think=("<|channel>", "<channel|>"),
        think_label="thought\n",
        call=("<|tool_call>", "<tool_call|>"),
        syntax="braces",
        call_in_thought="never",
        manner=TemplateManner(),
    ),
)


# ── recognition ───────────────────────────────────────────────────────────────────────────────────

_ARGUMENTS: Final[dict[str, Json]] = {"b": 1, "a": "x"}
_TEXT: Final = '{"b": 1, "a": "x"}'


def family_of(tokenizer: Tokenizer) -> Family:
    """The family that a tokenizer's template writes. Raises ModelError if no row describes it."""
    row = next((row for row in ROWS if fits(row, tokenizer)), None)
    if row is not None:
        return _family(row, tokenizer)
    names = ", ".join(row.name for row in ROWS)
    raise ModelError(
        f"this model's control tokens and chat template are of no family polarnode knows ({names}):"
        f" {_lacking(tokenizer)}. Serve one of those, or describe it in polarnode/tokens/families.py"
    )


def fits(row: FamilyRow, tokenizer: Tokenizer) -> bool:
    """Whether a row describes this tokenizer and its template."""
    if not tokenizer.control.keys() >= set(_needed(row)):
        return False
    try:
        text = tokenizer.render(_probe(row), tools=(), generation_prompt=True, thinking=None)
    except (Refused, ModelError):  # The template of another family may refuse the probe.
        return False
    known = any(written in text for written in row.written) and text.endswith(row.prompts)
    # A model that is shown tools calls them, and none of the node's readers would find its calls.
    return known and not (row.syntax == "none" and _shows_tools(tokenizer))


def _shows_tools(tokenizer: Tokenizer) -> bool:
    asked: list[dict[str, Json]] = [{"role": "user", "content": "x"}]
    function: Json = {"name": "look_it_up", "description": "", "parameters": {"type": "object"}}
    tool: dict[str, Json] = {"type": "function", "function": function}
    try:
        return "look_it_up" in tokenizer.render(asked, tools=(tool,), generation_prompt=True, thinking=None)
    except (Refused, ModelError):
        return False


# These strings stand in a call that one of the node's readers may be able to read.
_SIGNS: Final[Mapping[str, CallSyntax]] = {
    "<function=look>": "function_xml",
    '<invoke name="look">': "invoke_xml",
    "<arg_key>": "arg_xml",
    "call:look{": "braces",
    '"arguments": ': "json",
    '"parameters": ': "bare_json",
}
_SHOWN: Final = 160  # the characters of a template's own words that a sentence shows


def _lacking(tokenizer: Tokenizer) -> str:
    """What a row would need that no row has, judged by what the template writes for a call."""
    texts, refusal = [], ""
    for arguments in ("either", "text"):
        try:
            texts.append(_rendered_call(tokenizer, in_text=arguments == "text"))
        except (Refused, ModelError) as error:
            refusal = str(error)
    if not texts:
        return f"its chat template does not show a call without an error ({shortened(refusal, _SHOWN)})"
    called, _, prompt = texts[0].partition("<Q>")
    begins = f"its prompts end in {shortened(prompt, _SHOWN)!r}"
    if "look" not in called:
        if _shows_tools(tokenizer):
            return (
                f"its chat template shows tools, but no call of one, and {begins}: missing is a template that"
                " shows how it calls"
            )
        return f"its chat template shows no calls of tools, and {begins}: missing is a row of its turns"
    sign = next((syntax for sign, syntax in _SIGNS.items() if sign in called), None)
    missing = (
        "a reader for such calls, and a row of its marks"
        if sign is None
        else f"a row of its marks (what is between them may be {sign})"
    )
    return f"it writes a call as {shortened(called.strip(), _SHOWN)!r}, and {begins}: missing is {missing}"


def _rendered_call(tokenizer: Tokenizer, *, in_text: bool) -> str:
    """What the template writes after a question, for a call and another question `<Q>`."""
    call: Json = {
        "id": "c0",
        "type": "function",
        "function": {"name": "look", "arguments": _TEXT if in_text else _ARGUMENTS},
    }
    messages: list[dict[str, Json]] = [
        {"role": "user", "content": "<A>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "<Q>"},
    ]
    return tokenizer.render(messages, tools=(), generation_prompt=True, thinking=None).rpartition("<A>")[2]


def _needed(row: FamilyRow) -> tuple[str, ...]:
    maybe = (row.turn_end, row.separator, *(row.call or ()))
    single = (text for text in maybe if text is not None)
    return (*single, *row.turn_starts, *row.boundaries, *(row.section or ()), *(row.harmony or {}).values())


def _probe(row: FamilyRow) -> list[dict[str, Json]]:
    arguments: Json = _TEXT if row.manner.arguments == "text" else _ARGUMENTS
    call: Json = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "y"},
    ]


def _family(row: FamilyRow, tokenizer: Tokenizer) -> Family:
    number = tokenizer.control

    def mark(pair: tuple[str, str | None] | None, place: int) -> int | None:
        return None if pair is None else number.get(pair[place] or "")

    def token_ids(*texts: str | None) -> tuple[int, ...]:
        return tuple(dict.fromkeys(number[text] for text in texts if text is not None and text in number))

    stops = (*row.boundaries, *row.stops) if row.harmony else (row.turn_end, *row.boundaries, *row.stops)
    return Family(
        name=row.name,
        stop_ids=token_ids(*stops),
        turn_end=None if row.turn_end is None else number[row.turn_end],
        turn_ends=frozenset(token_ids(row.turn_end, *row.ends, *row.boundaries)),
        turn_starts=frozenset(token_ids(*row.turn_starts)),
        boundaries=frozenset(token_ids(*row.boundaries)),
        think_open=mark(row.think, 0),
        think_close=mark(row.think, 1),
        think_label=row.think_label,
        call_open=mark(row.call, 0),
        call_close=mark(row.call, 1),
        section_open=mark(row.section, 0),
        section_close=mark(row.section, 1),
        separator=None if row.separator is None else number[row.separator],
        harmony=(
            None
            if row.harmony is None
            else HarmonyMarks(**{name: number[text] for name, text in row.harmony.items()})
        ),
        call_syntax=row.syntax,
        call_in_thought=row.call_in_thought if row.think and row.call else "never",
        manner=row.manner,
        known_differences=row.known_differences,
        refuses=row.refuses,
    )
