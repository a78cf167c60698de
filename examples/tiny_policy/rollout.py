"""Run the policy: sampling at temperature 1, session by session; sampled ids are never encoded again."""

import json
import random
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
)

from examples.tiny_policy.endpoint import Answer, Call, Json
from examples.tiny_policy.prompts import Prompt, plain, prompt, tool
from examples.tiny_policy.tasks import Task
from examples.tiny_policy.tools import Submitted, Workbench, use
from examples.tiny_policy.transcript import OPENING, TURN_END, render, response

MAX_TURN = 256
MAX_TURNS = 8
_THOUGHT = re.compile(r"^<think>\n(.*?)\n?</think>\s*", re.DOTALL)
_CALL = re.compile(r"\n?<tool_call>\n(.*?)\n?</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Policy:
    """A model and its tokenizer."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, folder: Path) -> "Policy":
        """The policy saved in `folder`, in float32."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder))


@dataclass
class Session:
    """One conversation: every token so far, and the keys and values of all but the newest."""

    policy: Policy
    seed: int
    sampled: list[int] = field(default_factory=list)
    _cache: DynamicCache = field(default_factory=DynamicCache)
    _waiting: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dice = torch.Generator().manual_seed(self.seed)

    def hear(self, text: str) -> None:
        """Append text that the model did not sample."""
        self._waiting += self.policy.tokenizer.encode(text)

    @torch.inference_mode()
    def say(self) -> str:
        """Sample one turn and return its text, the turn's end included if it came."""
        said: list[int] = []
        end = self.policy.tokenizer.eos_token_id
        while len(said) < MAX_TURN and end not in said[-1:]:
            output = self.policy.model(
                torch.tensor([self._waiting]), past_key_values=self._cache, logits_to_keep=1
            )
            chances = output.logits[0, -1].float().softmax(-1)
            self._waiting = [int(torch.multinomial(chances, 1, generator=self._dice))]
            said += self._waiting
        self.sampled.append(len(said))
        return str(self.policy.tokenizer.decode(said))


def understand(text: str) -> Answer | None:
    """What the model meant; nothing if its turn has no end or its call is not JSON."""
    if not text.endswith(TURN_END):
        return None
    text = text.removesuffix(TURN_END)
    thought = _THOUGHT.match(text)
    rest = text[thought.end() :] if thought else text
    try:
        calls = tuple(_call(json.loads(found)) for found in _CALL.findall(rest))
    except (ValueError, KeyError, TypeError):
        return None
    said = _CALL.sub("", rest)
    return None if "tool_call>" in said else Answer(said, calls, thought[1] if thought else "")


def _call(given: Json) -> Call:
    if not isinstance(given["arguments"], dict):
        raise TypeError("arguments must be an object")
    return Call(str(given["name"]), json.dumps(given["arguments"]))


@dataclass
class Episode:
    """How one attempt went."""

    harness: str
    task: Task
    passed: bool = False
    malformed: bool = False
    sampled: list[int] = field(default_factory=list)
    text: str = ""


def attempt(policy: Policy, harness: str, task: Task, seed: int) -> Episode:
    """One attempt with simulated tools, under a prompt varied by the seed."""
    session = Session(policy, seed)
    episode = Episode(harness, task, sampled=session.sampled)
    session.hear(render(prompt(harness, task.instruction, random.Random(seed))))
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        bench = Workbench(Path(folder), task)
        _converse(session, bench, episode)
        episode.passed = bench.passed(task)
    return episode


def _converse(session: Session, bench: Workbench, episode: Episode) -> None:
    """Turn after turn, until the harness would stop; a turn it could not read ends the attempt here."""
    for _ in range(MAX_TURNS):
        text = session.say()
        episode.text += text
        answer = understand(text)
        episode.malformed |= answer is None or (episode.harness == "mini" and not answer.calls)
        if answer is None or not answer.calls:
            return
        try:
            heard = "".join(response(use(episode.harness, bench, call)) for call in answer.calls[:1])
        except Submitted:
            return
        episode.text += heard
        session.hear(heard)


class Speaker:
    """Answers a harness's requests: continues the session a request extends, else starts from a full
    render.
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.seed = policy, seed
        self.sampled: list[int] = []
        self.malformed = 0
        self._session: Session | None = None
        self._known = 0

    def __call__(self, request: Json) -> Answer:
        """The policy's answer; a turn that is no proper turn is passed on as plain text."""
        messages = request["messages"]
        new = messages[self._known :]
        if (
            self._session
            and len(new) > 1
            and new[0]["role"] == "assistant"
            and all(m["role"] == "tool" for m in new[1:])
        ):
            self._session.hear(_suffix([plain(m["content"]) for m in new[1:]]))
        else:
            self._session = Session(self.policy, self.seed + len(messages))
            self._session.hear(render(_as_prompt(request)))
        self._known = len(messages)
        text = self._session.say()
        self.sampled.append(self._session.sampled[-1])
        answer = understand(text)
        self.malformed += answer is None
        return answer or Answer(text.removesuffix(TURN_END))


def _suffix(results: list[str]) -> str:
    joined = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"\n<|im_start|>user{joined}{TURN_END}\n{OPENING}"


def _as_prompt(request: Json) -> Prompt:
    """A request as the node hands it to the template."""
    messages = [{**m, "content": plain(m["content"])} for m in request["messages"]]
    return Prompt(messages, [tool(t) for t in request["tools"]])
