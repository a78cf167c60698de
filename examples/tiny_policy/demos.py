"""Demonstrations: what a competent small policy does with each harness's tools, and what a careless one does.

A demonstration is a generator: it yields the model's output and receives the harness's. A careless one
(`noise` above 0) forgets, guesses, gives up and spells its JSON oddly, because reinforcement learning needs a
policy that fails sometimes and can do better.
"""

import json
import random
from collections.abc import Generator
from dataclasses import dataclass

from examples.tiny_policy.endpoint import Answer, Call
from examples.tiny_policy.tasks import Task
from examples.tiny_policy.tools import SUBMIT
from examples.tiny_policy.words import WORDS

Demo = Generator[Answer, str, None]

GIVE_UP, GUESS, WRONG_WORD, WRONG_PATH, ODD_JSON = 0.09, 0.12, 0.16, 0.06, 0.3


@dataclass
class Hand:
    """One demonstrator at work on one task, with its habits."""

    task: Task
    rng: random.Random
    noise: float = 0.0
    thinks: bool = False

    def slips(self, chance: float) -> bool:
        """Whether the demonstrator makes a mistake this time."""
        return self.rng.random() < chance * self.noise

    def think(self, text: str) -> str:
        """A thought, if this demonstrator thinks aloud."""
        return text if self.thinks and self.rng.random() < 0.8 else ""

    def call(self, name: str, **arguments: str) -> Call:
        """A tool call with template-like JSON or, from a careless hand, an odd spelling of it."""
        if self.slips(ODD_JSON):
            return Call(name, _odd_json(self.rng, arguments))
        return Call(name, json.dumps(arguments, ensure_ascii=False))

    def word(self, seen: str) -> str:
        """The word to write: what was seen, unless the hand slips."""
        return self.rng.choice(WORDS) if self.slips(WRONG_WORD) else seen

    def path(self, meant: str) -> str:
        """The path to use: the one meant, unless the hand slips."""
        if not self.slips(WRONG_PATH):
            return meant
        folder, slash, _ = meant.rpartition("/")
        return f"{folder}{slash}{self.rng.choice(('file', 'output', 'data', 'out'))}.txt"


def _odd_json(rng: random.Random, arguments: dict[str, str]) -> str:
    """The same arguments in another spelling."""
    items = list(arguments.items())
    if rng.random() < 0.3:
        items.reverse()
    separators = rng.choice(((",", ":"), (", ", ":"), (" , ", " : ")))
    return json.dumps(dict(items), separators=separators, ensure_ascii=False)


def needs_reading(task: Task) -> bool:
    """Whether the answer is in a file rather than in the instruction."""
    return bool(task.source)


def found(hand: Hand, shown: str) -> str:
    """What a reader takes from a tool's answer; any word if there was nothing to read."""
    task = hand.task
    if shown.startswith(("ENOENT", "cat:", "EISDIR")):
        return hand.rng.choice(WORDS)
    if task.key:
        lines = (line.partition("=") for line in shown.split("\n"))
        return next((value for key, _, value in lines if key == task.key), "")
    return shown.strip().split("\n")[0]


def plan(hand: Hand) -> str:
    """A thought before the first step."""
    task = hand.task
    return hand.think(
        {
            "write": f"I write {task.answer} to {task.target}.",
            "copy": f"I read {task.source}, then write the word to {task.target}.",
            "lookup": f"I need {task.key} from {task.source}.",
            "follow": f"I read {task.source} to learn the name.",
        }[task.kind]
    )


# --- pi
# ------------------------------------------------------------------------------------------------------


def pi(hand: Hand) -> Demo:
    """Read the needed files, write the answer, report it."""
    task = hand.task
    if hand.slips(GIVE_UP):
        yield Answer("I cannot do this.", thinking=plan(hand))
        return
    if not needs_reading(task):
        yield from _pi_write(hand, task.answer, plan(hand))
    elif hand.slips(GUESS):
        yield from _pi_write(hand, hand.rng.choice(WORDS), plan(hand))
    elif task.kind == "copy" and hand.rng.random() < 0.2:
        yield from _pi_copy(hand)
    else:
        yield from _pi_read_and_write(hand)


def _pi_copy(hand: Hand) -> Demo:
    command = f"cp {hand.path(hand.task.source)} {hand.path(hand.task.target)}"
    shown = yield Answer("", (hand.call("bash", command=command),), plan(hand))
    yield Answer("It failed." if "exited" in shown else "Done.")


def _pi_read_and_write(hand: Hand) -> Demo:
    task = hand.task
    shown = yield Answer("", (hand.call("read", path=hand.path(task.source)),), plan(hand))
    if shown.startswith("ENOENT"):
        shown = yield Answer("", (hand.call("read", path=task.source),))
    if task.kind == "follow":
        second = found(hand, shown) if not hand.slips(GUESS) else task.target
        folder, slash, _ = task.source.rpartition("/")
        shown = yield Answer(
            "", (hand.call("read", path=f"{folder}{slash}{second}"),), hand.think(f"The file is {second}.")
        )
    if hand.slips(GIVE_UP):
        yield Answer("Done.")
        return
    seen = found(hand, shown)
    yield from _pi_write(hand, seen, hand.think(f"The word is {seen}."))


def _pi_write(hand: Hand, word: str, thinking: str) -> Demo:
    word, path = hand.word(word), hand.path(hand.task.target)
    if hand.rng.random() < 0.15:
        yield Answer("", (hand.call("bash", command=f"echo {word} > {path}"),), thinking)
    else:
        yield Answer("", (hand.call("write", path=path, content=word),), thinking)
    yield Answer(hand.rng.choice(("Done.", f"I wrote {word} to {path}.")))


# --- mini-swe-agent
# ------------------------------------------------------------------------------------------


def mini(hand: Hand) -> Demo:
    """The same with shell commands, ended by the phrase the harness waits for."""
    task = hand.task
    if not hand.slips(GIVE_UP):
        if not needs_reading(task):
            yield from _mini_write(hand, task.answer, plan(hand))
        elif hand.slips(GUESS):
            yield from _mini_write(hand, hand.rng.choice(WORDS), plan(hand))
        elif task.kind != "follow" and hand.rng.random() < 0.35:
            yield from _mini_pipe(hand)
        else:
            yield from _mini_read_and_write(hand)
    yield Answer("The task is done.", (hand.call("bash", command=f"echo {SUBMIT}"),))


def _mini_pipe(hand: Hand) -> Demo:
    source, target = hand.path(hand.task.source), hand.path(hand.task.target)
    key = hand.word(hand.task.key) if hand.task.key else ""
    command = f"grep {key}= {source} | cut -d= -f2 > {target}" if key else f"cp {source} {target}"
    yield Answer("I do it with one command.", (hand.call("bash", command=command),), plan(hand))


def _mini_read_and_write(hand: Hand) -> Demo:
    task = hand.task
    shown = yield Answer(
        "I read the file.", (hand.call("bash", command=f"cat {hand.path(task.source)}"),), plan(hand)
    )
    if "No such file" in shown:
        shown = yield Answer("I read the file.", (hand.call("bash", command=f"cat {task.source}"),))
    if task.kind == "follow":
        second = found(hand, _output(shown)) if not hand.slips(GUESS) else task.target
        folder, slash, _ = task.source.rpartition("/")
        command = f"cat {folder}{slash}{second}"
        shown = yield Answer(
            "I read the file.", (hand.call("bash", command=command),), hand.think(f"The file is {second}.")
        )
    if not hand.slips(GIVE_UP):
        seen = found(hand, _output(shown))
        yield from _mini_write(hand, seen, hand.think(f"The word is {seen}."))


def _output(shown: str) -> str:
    return str(json.loads(shown)["output"])


def _mini_write(hand: Hand, word: str, thinking: str) -> Demo:
    word, path = hand.word(word), hand.path(hand.task.target)
    yield Answer("I write the word.", (hand.call("bash", command=f"echo {word} > {path}"),), thinking)
    if hand.rng.random() < 0.15:
        yield Answer("I check the file.", (hand.call("bash", command=f"cat {path}"),))


DEMOS = {"pi": pi, "mini": mini}
