"""What the simulated engine samples: random words, one whole tool call if the prompt lists tools, and the
turn's end.

Pure but for its caches. An answer depends on the settings' seed, the request's id and its prompt alone, so
that a run can be repeated. It parses as the family writes, because otherwise the harness would see an error
that no model makes. A harness obeys made-up calls, so commands only look, and a tool that runs commands is
preferred to one that asks a user, starts other agents or writes files.

The vocabulary is read by the tokenizers library alone, in a tenth of the time that transformers takes.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

from attrs import define, field, frozen
from tokenizers import Tokenizer

from polarnode.engine.protocol import FamilyMarks, Generate, Simulation

COMMANDS = ("ls", "pwd", "ls -la", "date", "head -n 5 *", "wc -c *", "uname -a", "env | wc -l")
COMMAND_ARGUMENTS = ("command", "cmd", "script")
DEPTH = 4  # depth of made-up values; deeper ones are empty
WORDS = ("lake", "river", "stone", "cloud", "amber", "north")


def make_tool_call(tools: Sequence[Mapping[str, Any]], chance: Random) -> dict[str, Any]:
    """A call of one of the functions that a prompt lists, as `{"name": …, "arguments": {…}}`."""
    runners = [
        tool
        for tool in tools
        if any(name in COMMAND_ARGUMENTS for name in _properties(tool.get("parameters")))
    ]
    tool = chance.choice(runners or list(tools))
    schema = tool.get("parameters") or {}
    wanted = [
        *schema.get("required", ()),
        *(name for name in _properties(schema) if name in COMMAND_ARGUMENTS),
    ]
    properties = _properties(schema)
    return {
        "name": tool["name"],
        "arguments": {name: _named(name, properties.get(name), chance) for name in dict.fromkeys(wanted)},
    }


def value(schema: Any, chance: Random, depth: int = 0) -> Any:
    """A value of a schema's type. Keywords other than types, enums and properties are ignored."""
    if not isinstance(schema, Mapping):
        return chance.choice(WORDS)
    for keyword in ("enum", "anyOf", "oneOf"):
        if schema.get(keyword):
            picked = chance.choice(schema[keyword])
            return picked if keyword == "enum" else value(picked, chance, depth)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return _type_value(kind[0] if isinstance(kind, list) else kind, schema, chance, depth)


def _type_value(kind: str, schema: Mapping[str, Any], chance: Random, depth: int) -> Any:
    match kind:
        case "object":
            properties = _properties(schema)
            return (
                {
                    name: value(properties.get(name), chance, depth + 1)
                    for name in schema.get("required", properties)
                }
                if depth < DEPTH
                else {}
            )
        case "array":
            return (
                [
                    value(schema.get("items"), chance, depth + 1)
                    for _ in range(max(1, schema.get("minItems", 1)))
                ]
                if depth < DEPTH
                else []
            )
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return chance.random() < 0.5
        case "null":
            return None
        case _:
            return chance.choice(WORDS)[: schema.get("maxLength")]


def _named(name: str, schema: Any, chance: Random) -> Any:
    """A value for an argument whose name shows its meaning."""
    if name not in COMMAND_ARGUMENTS:
        return value(schema, chance)
    command = chance.choice(COMMANDS)
    return (
        ["bash", "-lc", command] if isinstance(schema, Mapping) and schema.get("type") == "array" else command
    )


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


_WORD = re.compile(r"\u0120?[A-Za-z]+")  # U+0120 is how byte-level vocabularies write a blank


@frozen(eq=False, kw_only=True)
class WordVocabulary:
    """The tokenizer of a model and its plain words. `words` are ids: any row of them is text, and none of
    them is a control token.
    """

    words: tuple[int, ...]
    _tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids of a text without control tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """A prompt as text, with control tokens spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_vocabulary(model: Path) -> WordVocabulary:
    """Read the vocabulary of a checkpoint folder. Raises ValueError for one without words, which is no
    byte-level one.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    control = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = tuple(
        sorted(
            number for token, number in vocabulary.items() if number not in control and _WORD.fullmatch(token)
        )
    )
    if not words:
        raise ValueError(f"the tokenizer in {model} knows no words: it is not a byte-level one")
    return WordVocabulary(words=words, tokenizer=tokenizer)


# System turns whose tools are remembered: reading one of 15 000 tokens takes 5 ms, and all turns of all
# attempts share a few.
HEADS = 64
THOUGHT = 8  # words of a thought that the prompt left open


@frozen(kw_only=True)
class RandomAnswer:
    """All of one sample. `logprobs` are made up, of the size that a real model's have at temperature 1."""

    ids: "array[int]"
    logprobs: "array[float]"
    finish: Literal["stop", "length"]


def simulated_scores(row: "array[int]", start: int) -> "array[float]":
    """The logprobs of a row's tokens from `start` on. They are made up, and the same for the same two
    tokens.
    """
    pairs = zip(row[start - 1 :], row[start:], strict=False)
    return array("f", (-((31 * before + token) % 1009) / 256 for before, token in pairs))


@define(eq=False, kw_only=True)
class AnswerMaker:
    """Makes the answers of one model."""

    vocabulary: WordVocabulary
    marks: FamilyMarks
    settings: Simulation
    _tools: "OrderedDict[bytes, tuple[Mapping[str, Any], ...]]" = field(factory=OrderedDict, init=False)

    def answer(self, order: Generate) -> RandomAnswer:
        """The answer to an order. Raises ValueError for constraints that random words cannot satisfy."""
        chance = Random(f"{self.settings.seed} {order.rid}")
        prompt = array("i", order.prompt)
        written = self._written(order, prompt, chance)
        limit = int(str(order.sampling["max_new_tokens"]))
        ids = array("i", written[:limit])
        return RandomAnswer(
            ids=ids,
            logprobs=array("f", [-chance.expovariate(2.0) for _ in ids]),
            finish="stop" if len(written) <= limit else "length",
        )

    def alternatives(self, order: Generate, answer: RandomAnswer) -> tuple["array[int]", "array[float]"]:
        """The alternatives of each token: itself, then random words, each less likely than the one before."""
        chance, words = Random(order.rid), self.vocabulary.words
        ids, logprobs = array("i"), array("f")
        for token, logprob in zip(answer.ids, answer.logprobs, strict=True):
            ids.extend([token, *chance.choices(words, k=order.top_logprobs - 1)])
            logprobs.extend(logprob - step for step in range(order.top_logprobs))
        return ids, logprobs

    def _written(self, order: Generate, prompt: "array[int]", chance: Random) -> list[int]:
        _refuse_what_is_not_random(order)
        thought = self._thought(prompt, chance)
        if (schema := order.sampling.get("json_schema")) is not None:
            body = self.vocabulary.encode(json.dumps(value(json.loads(str(schema)), chance)))
            return [*thought, *body, self.marks.turn_end]
        call = self._call(prompt, chance)
        room = self.settings.answer_tokens - len(thought) - len(call) - 1
        return [*thought, *chance.choices(self.vocabulary.words, k=max(0, room)), *call, self.marks.turn_end]

    def _thought(self, prompt: "array[int]", chance: Random) -> list[int]:
        """The rest of a thought, if the prompt opened one. After the opening mark there is at most a
        newline.
        """
        if (
            self.marks.think_open is None
            or self.marks.think_close is None
            or self.marks.think_open not in prompt[-2:]
        ):
            return []
        return [*chance.choices(self.vocabulary.words, k=THOUGHT), self.marks.think_close]

    def _call(self, prompt: "array[int]", chance: Random) -> list[int]:
        if self.marks.call_open is None or self.marks.call_close is None:
            return []
        end = prompt.index(self.marks.turn_end) if self.marks.turn_end in prompt else len(prompt)
        # The template's own example of a call has this control token, which no client can write.
        listed = self.marks.call_close in prompt[:end]
        tools = self._listed(prompt[:end]) if listed else ()
        if not tools or prompt[end:].count(self.marks.call_close) >= self.settings.calling_turns:
            return []
        body = json.dumps(make_tool_call(tools, chance), ensure_ascii=False)
        return [self.marks.call_open, *self.vocabulary.encode(f"\n{body}\n"), self.marks.call_close]

    def _listed(self, head: "array[int]") -> tuple[Mapping[str, Any], ...]:
        """The functions that the first turn of a prompt lists."""
        key = head.tobytes()
        if key not in self._tools:
            self._tools[key] = tuple(_functions(self.vocabulary.decode(head)))
            if len(self._tools) > HEADS:
                self._tools.popitem(last=False)
        self._tools.move_to_end(key)
        return self._tools[key]


def _functions(text: str) -> list[Mapping[str, Any]]:
    """The functions of a prompt. They are listed one per line between the last `<tools>` and its end. A line
    that is no function was a client's own text.
    """
    listed = text.rpartition("<tools>\n")[2].partition("\n</tools>")
    found: list[Mapping[str, Any]] = []
    for line in listed[0].splitlines() if listed[1] else ():
        try:
            listed = json.loads(line)
        except ValueError:
            continue
        function = listed.get("function", listed) if isinstance(listed, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found.append(function)
    return found


def _refuse_what_is_not_random(order: Generate) -> None:
    if order.processor is not None:
        raise ValueError("the simulated engine has no logits and takes no logit processor: start a real one")
    for kind in ("regex", "ebnf"):
        if order.sampling.get(kind) is not None:
            raise ValueError(
                f"the simulated engine's answers are random words and keep no {kind}: start a real one"
            )
