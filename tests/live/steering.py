"""A node whose real engine is made to say what a script says: `run` is `polarnode`, with its arguments.

Every token goes through the real engine, whose logit processor leaves it one choice a step; logprobs, spans,
streaming and parsing stay what they are. What to say is decided from the prompt alone (which case it is, how
often the script spoke in it), so that a retry, a branch or a call beside the main conversation needs no
memory here. What was forced is written to `forced.jsonl` in the engine's state folder, a line an order.

Rule for whoever edits it: the node is the program people run; only its engine is given an argument more, and
its orders a `steering`.
"""

import json
import re
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen
from matrix_cases import CASES, EXTRA, Case, Step
from steering_processor import forced

from polarnode.cli.main import main
from polarnode.core.conversation import Conversation, Message
from polarnode.core.ports import Chunk, GenerateOrder, Tokenizer
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.settings import EngineSettings
from polarnode.node import opening
from polarnode.tokens.families import Family
from polarnode.tokens.template import LoadedModel, load_model

FORCED = "forced.jsonl"
# what a call that is not of the main conversation is told: titles, summaries
BESIDE = "A word beside the matter."
_NAMED = re.compile(r"This is case ([\w/.-]*\w)\.")


@frozen(kw_only=True)
class Said:
    """What the script says to a prompt: of which case, which step of it (None: a call beside), and the ids,
    with the turn's end.
    """

    case: str
    step: int | None
    ids: tuple[int, ...]


@frozen
class Script:
    """The cases by name, in a model's own language."""

    model: LoadedModel
    cases: Mapping[str, Case] = field(factory=lambda: {case.name: case for case in (*CASES, *EXTRA)})

    def answer(self, prompt: "array[int]") -> Said | None:
        """What to say; None where no case is named or its script lets go, and the policy is free."""
        text = decoded(prompt, self.model.tokenizer)
        named = _NAMED.search(text)
        case = self.cases.get(named[1]) if named else None
        if case is None:
            return None
        if case.shell_tool is not None and f'"name": "{case.shell_tool}"' not in text:
            return Said(case=case.name, step=None, ids=self._written(Step(BESIDE), prompt))
        step = min(turns_so_far(prompt, self.model, calling=not case.by_text), len(case.steps) - 1)
        return (
            None
            if case.steps[step].free
            else Said(case=case.name, step=step, ids=self._written(case.steps[step], prompt))
        )

    def _written(self, step: Step, prompt: "array[int]") -> tuple[int, ...]:
        """A step, less what of it the prompt already ends with: an answer that was cut is gone on with."""
        opening = self._opening()
        begun = list(prompt[last_turn(prompt, self.model.family) + len(opening) :])
        whole = written(step, self.model.tokenizer, self.model.family, in_thought=False)
        if begun and whole[: len(begun)] == begun:
            return tuple(whole[len(begun) :])
        return tuple(
            written(
                step,
                self.model.tokenizer,
                self.model.family,
                in_thought=self.model.template.opens_thinking(prompt),
            )
        )

    def _opening(self) -> Sequence[int]:
        """How a prompt asks for the next turn."""
        asked = self.model.template.root(Conversation(messages=(Message(role="user", text="x"),)))
        return asked[last_turn(asked, self.model.family) :]


def last_turn(prompt: Sequence[int], family: Family) -> int:
    """Where the turn begins that is being written."""
    return max(place for place, token in enumerate(prompt) if token in family.turn_starts)


def decoded(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of some ids, control tokens as theirs."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def turns_so_far(prompt: Sequence[int], model: LoadedModel, *, calling: bool) -> int:
    """How many of the assistant's turns a prompt holds, or of those with a call; the system's own turn only
    tells how one is written.
    """
    opening = model.tokenizer.encode_plain("assistant")
    turns: list[list[int]] = []
    for token in prompt:
        if token in model.family.turn_starts:
            turns.append([])
        elif turns:
            turns[-1].append(token)
    return sum(
        turn[: len(opening)] == opening and (not calling or model.family.call_open in turn)
        for turn in turns[:-1]
    )


def written(step: Step, tokenizer: Tokenizer, family: Family, *, in_thought: bool) -> list[int]:
    """A step in the model's own ids, as its family writes thoughts, calls and the end of a turn."""
    assert None not in (family.think_open, family.think_close, family.call_open, family.call_close)
    pieces: list[int | str | None] = []
    if step.thought or in_thought:
        pieces += [
            None if in_thought else family.think_open,
            f"\n{step.thought}\n",
            family.think_close,
            "\n\n",
        ]
    pieces.append(step.text)
    for place, call in enumerate(step.calls):
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        pieces += ["\n" if step.text or place else "", family.call_open, f"\n{body}\n", family.call_close]
    return [*spelled(pieces, tokenizer), family.turn_end]


def spelled(pieces: Sequence[int | str | None], tokenizer: Tokenizer) -> Iterator[int]:
    """Control ids, and between them text that is encoded in one: the spelling that decoding and encoding
    would give back.
    """
    for control, group in groupby(
        (piece for piece in pieces if piece is not None), key=lambda piece: isinstance(piece, int)
    ):
        found = list(group)
        yield from (found if control else tokenizer.encode_plain("".join(map(str, found))))  # type: ignore[misc]


# ── the node around it ────────────────────────────────────────────────────────


@define(eq=False)
class SteeredEngine:
    """The engines of a node, whose orders say what to answer. All but `generate` is the engines' own."""

    _engines: Engines
    _script: Script
    _log: Path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines, name)

    def generate(self, order: GenerateOrder) -> "AbstractAsyncContextManager[AsyncIterator[Chunk]]":
        """The order with the script's words in it; one for constrained sampling has a law of its own, and is
        left alone.
        """
        said = self._script.answer(order.prompt) if order.constraint is None else None
        if said is None:
            return self._engines.generate(order)
        self._note(order, said)
        return self._engines.generate(evolve(order, steering=forced(said.ids[:-1], said.ids[-1])))

    def _note(self, order: GenerateOrder, said: Said) -> None:
        line = {
            "session": order.affinity,
            "case": said.case,
            "step": said.step,
            "prompt_tokens": len(order.prompt),
            "ids": said.ids,
        }
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def steered(open_engines: "Callable[..., AbstractAsyncContextManager[Engines]]") -> "Callable[..., Any]":
    """`open_engines` of engines that can be steered, and are."""

    @asynccontextmanager
    async def opened(settings: EngineSettings, **more: Any) -> AsyncIterator[SteeredEngine]:
        script = Script(load_model(settings.model_path))
        steerable = evolve(settings, extra={**settings.extra, "enable_custom_logit_processor": True})
        async with open_engines(steerable, **more) as engines:
            yield SteeredEngine(engines, script, settings.state_dir / FORCED)

    return opened


def run() -> None:
    """The program `polarnode`, steered."""
    vars(opening)["open_engines"] = steered(open_engines)
    main()
