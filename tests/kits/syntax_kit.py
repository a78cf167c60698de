"""Toy models for the tests of call syntaxes: a tokenizer of bytes with a family's real control strings, and
the family's marks, by hand.
"""

from array import array
from collections.abc import Mapping, Sequence

from attrs import frozen

from polarnode.core.arrays import ids
from polarnode.core.conversation import Answer, FinishReason, Json, TokenLogprob, Tool
from polarnode.tokens.families import CallSyntax, Family, HarmonyMarks
from polarnode.tokens.parser import Parser

QWEN = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
LLAMA = ("<|eot_id|>", "<|start_header_id|>", "<|eom_id|>", "<|python_tag|>")
GLM = ("<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HARMONY = ("<|return|>", "<|start|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
DEEPSEEK = (
    *(
        "<｜end▁of▁sentence｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
)
KIMI = (
    *("<|im_end|>", "<|im_assistant|>", "<think>", "</think>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
)
MINIMAX = ("[e~[", "]~b]", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")
GEMMA = ("<turn|>", "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
_SECTION_MARKS = {"section_open": 262, "section_close": 263, "separator": 264}


@frozen(eq=False)
class ToyModel:
    """A model whose ids are bytes, and from 256 on its control strings: the turn's end and start, then its
    marks.
    """

    family: Family
    control: Mapping[str, int]

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.control)

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else list(self.control)[token - 256].encode()

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Mapping[str, Json]],
        generation_prompt: bool,
        thinking: bool | None,
    ) -> str:
        raise NotImplementedError

    def spelled(self, text: str) -> "array[int]":
        """Ids of a text, every control string in it sampled as its token."""
        out = ids()
        while text:
            found = (
                min((at, token) for token in self.control if (at := text.find(token)) >= 0)
                if any(map(text.count, self.control))
                else None
            )
            at, token = found or (len(text), "")
            out.extend(text[:at].encode())
            out.extend([self.control[token]] if token else [])
            text = text[at + len(token) :]
        return out

    def plain(self, text: str) -> "array[int]":
        """Ids of a text in ordinary tokens alone."""
        return ids(list(text.encode()))

    def parser(
        self,
        *,
        opens_thinking: bool = False,
        stop: tuple[str, ...] = (),
        tools: Sequence[Tool] = (),
        prompt: "array[int] | None" = None,
    ) -> Parser:
        return Parser(
            tokenizer=self,
            family=self.family,
            call_id=lambda place: f"call_{place}",
            opens_thinking=opens_thinking,
            stop=stop,
            tools=tools,
            prompt=prompt,
        )

    def read(self, sampled: "array[int]", *, reason: FinishReason = "stop", **asked: object) -> Answer:
        """The answer that some ids are, read at once."""
        parser = self.parser(**asked)  # type: ignore[arg-type]
        parser.feed(sampled)
        return parser.finish(reason).answer

    def told(self, sampled: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Every token with a logprob that names its place."""
        return tuple(
            TokenLogprob(data=self.token_bytes(token), logprob=-float(place))
            for place, token in enumerate(sampled)
        )


def toy(syntax: CallSyntax, control: Sequence[str], **marks: object) -> ToyModel:
    """A family; unless said otherwise its thoughts and calls stand between the ids 258 to 261."""
    usual: dict[str, object] = {
        "think_open": 258,
        "think_close": 259,
        "call_open": 260,
        "call_close": 261,
        "turn_end": 256,
        "stop_ids": (256,),
    }
    usual |= {"turn_ends": frozenset([256]), "turn_starts": frozenset([257])}
    family = Family(name=syntax, call_syntax=syntax, **(usual | marks))  # type: ignore[arg-type]
    return ToyModel(family, {text: 256 + place for place, text in enumerate(control)})


_NO_MARKS = {"think_open": None, "think_close": None, "call_open": None, "call_close": None}
TOY_MODELS = {
    "json": toy("json", QWEN, call_in_thought="line"),
    "bare_json": toy("bare_json", LLAMA, **(_NO_MARKS | {"stop_ids": (256, 258), "call_open": 259})),
    "function_xml": toy("function_xml", QWEN, call_in_thought="line"),
    "invoke_xml": toy("invoke_xml", MINIMAX, call_in_thought="line"),
    "arg_xml": toy(
        "arg_xml",
        (*GLM[:2], *GLM[3:], GLM[2], *GLM_TAGS),
        call_in_thought="line",
        stop_ids=(256, 262),
        turn_end=None,
        boundaries=frozenset([256, 262]),
    ),
    "fenced": toy("fenced", DEEPSEEK, **_SECTION_MARKS),
    "separated": toy("separated", DEEPSEEK, **_SECTION_MARKS),
    "numbered": toy("numbered", KIMI, **_SECTION_MARKS, call_in_thought="anywhere"),
    "braces": toy("braces", GEMMA, think_label="thought\n"),
    "harmony": toy(
        "harmony",
        HARMONY,
        **_NO_MARKS,
        stop_ids=(256, 258),
        turn_ends=frozenset([256, 258]),
        harmony=HarmonyMarks(start=257, channel=259, message=260, constrain=261, end=262),
    ),
    "none": toy("none", QWEN[:2], **_NO_MARKS),
}
# A call of `look` with a path "a b" and lines 3, as each family writes it between its marks, sections
# included.
CALLS = {
    "json": '<tool_call>\n{"name": "look", "arguments": {"path": "a b", "lines": 3}}\n</tool_call>',
    "bare_json": '{"name": "look", "parameters": {"path": "a b", "lines": 3}}',
    "function_xml": (
        "<tool_call>\n<function=look>\n<parameter=path>\na"
        " b\n</parameter>\n<parameter=lines>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
    "invoke_xml": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="path">a b</parameter>\n<parameter'
        ' name="lines">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "arg_xml": (
        "<tool_call>look\n<arg_key>path</arg_key>\n<arg_value>a"
        " b</arg_value>\n<arg_key>lines</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    "fenced": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"path": "a b", "lines": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "separated": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"path": "a b", "lines":'
        " 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "numbered": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"path": "a b", "lines": 3}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "braces": '<|tool_call>call:look{path:<|"|>a b<|"|>,lines:3}<tool_call|>',
    "harmony": (
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"path": "a b", "lines":'
        " 3}<|call|>"
    ),
}
THOUGHTS = {
    **dict.fromkeys(
        ("json", "function_xml", "invoke_xml", "arg_xml", "fenced", "separated", "numbered"),
        "<think>\nhm\n</think>\n\n",
    ),
    "braces": "<|channel>thought\nhm\n<channel|>",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
}
LOOK = Tool(
    name="look",
    parameters={"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
)
ARGUMENTS = '{"path": "a b", "lines": 3}'
