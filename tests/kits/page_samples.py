"""Sessions for the page, with every oddity a row can have: several lineages, a resumed answer, two weight versions,
slices, a turn that is left out, letters split between tokens, and text that tries to run in a browser.

The rows are made by the real builder from turns that are written here.
"""

import random
from typing import Any

from attrs import define, evolve, field
from journal_writes import publish_end, submit_task

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Answer, Message, TextPart, ThinkingPart, ToolCall, Usage
from polarnode.core.task import BuilderSpec, ForkPolicy, GroupSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import (
    ForkedFrom,
    NewMessages,
    Outcome,
    Timing,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)
from polarnode.journal.journal import Journal
from polarnode.merge.trajectory import Identity, Result, assemble
from polarnode.tokens.tokenizer import LoadedTokenizer

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    " \x1b[31mred\x1b[0m \u202etxt.exe\u202c \x00 javascript:alert(1) <svg onload=alert(1)>"
)
BEGAN_AT = 1_790_000_000.0  # seconds since the epoch


@define(eq=False)
class SampleSession:
    """Turns of one session, as a model call would leave them."""

    session_id: str
    tokenizer: LoadedTokenizer
    dice: random.Random = field(init=False)
    turns: list[Turn] = field(factory=list, init=False)
    clock: float = field(default=0.0, init=False)

    @dice.default
    def _make_dice(self) -> random.Random:
        return random.Random(self.session_id)

    def turn(
        self,
        *new: Message,
        answer: Answer,
        parent: int | None = None,
        lineage: int = 0,
        versions: tuple[str, ...] = ("step-7",),
        kind: Any = None,
        **more: Any,
    ) -> int:
        """One model call whose prompt adds `new` to its parent's; gives its index."""
        index = len(self.turns)
        before = None if parent is None else self.turns[parent]
        text = "".join(f"<|im_start|>{each.role}\n{each.text}<|im_end|>\n" for each in new)
        delta = self.tokenizer.encode_plain(("\n" if before else "") + text + "<|im_start|>assistant\n")
        said = "".join(getattr(part, "text", None) or getattr(part, "arguments", "") for part in answer.parts)
        sampled = self.tokenizer.encode_plain(said)
        length = len(delta) + (0 if before is None else before.prompt_length + len(before.sampled))
        cut = len(sampled) * 2 // 3
        spans = [(versions[0], 0, len(sampled))]
        if len(versions) > 1:
            spans = [(versions[0], 0, cut), (versions[1], cut, len(sampled))]
        logprobs = [-self.dice.expovariate(3.0) if self.dice.random() < 0.4 else -0.002 for _ in sampled]
        seconds = 0.6 + len(sampled) / 80
        self.turns.append(
            Turn(
                session_id=self.session_id,
                index=index,
                provider="anthropic",
                lineage=lineage,
                parent=parent,
                kind=kind or ("root" if parent is None else "extend"),
                reason=more.pop("reason", ""),
                prompt_delta=ids(delta),
                prompt_length=length,
                sampled=ids(sampled),
                logprobs=floats(logprobs),
                version_spans=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in spans),
                finish_reason=answer.finish_reason,
                answer=answer,
                usage=Usage(prompt_tokens=length, completion_tokens=len(sampled), cached_tokens=length // 2),
                started=BEGAN_AT + self.clock,
                first_token_s=0.2,
                ended_s=seconds,
                new_messages=NewMessages(messages=new, tools="[]"),
                **more,
            )
        )
        self.clock += seconds + 1.5
        return index

    def over(
        self,
        spec: TaskSpec,
        *,
        task_id: str,
        sample: int,
        reward: float | None,
        outcome: Outcome,
        fork: ForkedFrom | None = None,
    ) -> Trajectory:
        identity = Identity(
            session_id=self.session_id,
            task_id=task_id,
            group_id=task_id,
            sample_index=sample,
            harness=spec.harness.name or "shell",
            harness_version="0.4.1",
            model="tiny",
            node="page",
            forked_from=fork,
        )
        verdict = None if reward is None else Verdict(reward=reward, metrics={"passed": 3, "failed": 1})
        timing = Timing(init_s=1.4, ready_s=0.3, run_s=self.clock, post_s=2.1)
        result = Result(outcome=outcome, verdict=verdict, timing=timing, metrics={"turns": len(self.turns)})
        return evolve(assemble(identity, spec, self.turns, result), staleness=1)


def said(text: str, *, thinking: str = "", call: str | None = None, finish: Any = "stop") -> Answer:
    parts: list[Any] = [ThinkingPart(thinking)] if thinking else []
    parts += [TextPart(text)] if text else []
    parts += [ToolCall(id="c1", name="bash", arguments=call)] if call else []
    return Answer(parts=tuple(parts), finish_reason="tool_calls" if call else finish)


USER = "Mend the parser: `parse('1,,2')` must give ['1', '', '2'], and all tests in test_parse.py must pass. ☃ 日本語"


WAYS = (
    "The filter drops empty parts.",
    "The filter is wrong.",
    "Maybe csv helps?",
    "The filter drops everything empty.",
)


def odd_session(session_id: str, tokenizer: LoadedTokenizer, sample: int = 0) -> SampleSession:
    """A session with a sub-agent, a branch, a resumed answer, two versions and hostile text."""
    made = SampleSession(session_id, tokenizer)
    system = Message(role="system", text="You are a careful engineer. Tools: bash.")
    user = Message(role="user", text=USER)
    look = said(
        "I look at the code first.", thinking="Where is the bug? é ☃", call='{"command": "cat parse.py"}'
    )
    first = made.turn(system, user, answer=look)
    seen = Message(
        role="tool", text="def parse(s):\n    return [p for p in s.split(',') if p]\n" * 6, call_id="c1"
    )
    fix = said(WAYS[sample % len(WAYS)], call='{"command": "sed -i \'s/ if p//\' parse.py"}')
    second = made.turn(seen, answer=fix, parent=first, versions=("step-7", "step-8"))
    bad = Message(role="tool", text=HOSTILE, call_id="c1")
    third = made.turn(bad, answer=said(f"The tool printed {HOSTILE}"), parent=second, versions=("step-8",))
    made.turn(
        Message(role="system", text="You summarise."),
        Message(role="user", text="A title for this conversation?"),
        answer=said("Mend the comma parser"),
        lineage=1,
        role="auxiliary",
    )
    again = Message(role="user", text="Run the tests again, please.")
    made.turn(
        again,
        answer=said("They all pass.", call='{"command": "pytest -q"}'),
        parent=third,
        versions=("step-8",),
    )
    made.turn(
        Message(role="user", text="Another way?"), answer=said("One could use csv."), parent=second, lineage=2,
        kind="branch", reason="the history was edited", versions=("step-8",),
    )  # fmt: skip
    return made


def write_group(
    journal: Journal,
    tokenizer: LoadedTokenizer,
    task_id: str,
    rewards: tuple[float | None, ...],
    metadata: dict[str, Any],
    builder: BuilderSpec | None = None,
) -> None:
    """A finished group; None in place of a reward is a session that its container lost."""
    spec = TaskSpec(
        instruction=USER,
        harness=HarnessSpec(name="pi"),
        num_samples=len(rewards),
        metadata=metadata,
        builder=builder or BuilderSpec(),
    )
    names = tuple(f"{task_id}-{index}" for index in range(len(rewards)))
    submit_task(journal, spec, task_id=task_id, session_ids=names, idempotency_key=None)
    for sample, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        made = odd_session(name, tokenizer, sample)
        outcome = Outcome(status="completed", exit_code=0)
        if reward is None:
            outcome = Outcome(
                status="failed",
                exit_code=2,
                reason="the harness ended with exit code 2",
                log_tail=f"Traceback (most recent call last)\nKeyError: 'x'\n{HOSTILE}",
            )
        publish(
            journal, made, made.over(spec, task_id=task_id, sample=sample, reward=reward, outcome=outcome)
        )


def write_tree(journal: Journal, tokenizer: LoadedTokenizer, task_id: str) -> None:
    """A finished tree: a session, and two forks of it, of which the second left the record early."""
    policy = ForkPolicy(at=(1,), per_session=2)
    spec = TaskSpec(
        instruction=USER, harness=HarnessSpec(name="pi"), num_samples=3, group=GroupSpec(fork=policy)
    )
    root, exact, left = names = tuple(f"{task_id}-{index}" for index in range(3))
    submit_task(journal, spec, task_id=task_id, session_ids=names, idempotency_key=None)
    forks = {
        root: None,
        exact: ForkedFrom(session_id=root, turn=1, got=1, by="replay"),
        left: ForkedFrom(session_id=root, turn=1, got=0, by="replay", differs=f"turn 0: {HOSTILE}"),
    }
    for sample, (name, fork) in enumerate(forks.items()):
        made, outcome = odd_session(name, tokenizer, sample), Outcome(status="completed", exit_code=0)
        whole = made.over(spec, task_id=task_id, sample=sample, reward=sample / 2, outcome=outcome, fork=fork)
        publish(journal, made, whole)


def write_long(journal: Journal, tokenizer: LoadedTokenizer, task_id: str, tokens: int) -> None:
    """One session whose row has about `tokens` tokens, half of them sampled."""
    spec = TaskSpec(instruction=USER, harness=HarnessSpec(name="pi"))
    name = f"{task_id}-0"
    submit_task(journal, spec, task_id=task_id, session_ids=(name,), idempotency_key=None)
    made = SampleSession(name, tokenizer)
    words = "def visit(node, depth=0):\n    for child in node.children: # é\n        yield child, depth + 1\n"
    part = words * max(1, tokens // 40 // len(tokenizer.encode_plain(words)))
    last = made.turn(Message(role="user", text=part), answer=said(part))
    for step in range(19):
        last = made.turn(
            Message(role="tool", text=part), answer=said(part), parent=last, versions=(f"step-{step // 5}",)
        )
    whole = made.over(spec, task_id=task_id, sample=0, reward=1.0, outcome=Outcome(status="completed"))
    publish(journal, made, whole)


def publish(journal: Journal, made: SampleSession, whole: Trajectory) -> None:
    journal.writer.record_session(
        Identity(
            session_id=whole.session_id,
            task_id=whole.task_id,
            group_id=whole.group_id,
            sample_index=whole.sample_index,
            harness=whole.harness,
            harness_version=whole.harness_version,
            model=whole.model,
            node=whole.node,
            forked_from=whole.forked_from,
        )
    )
    for turn in made.turns:
        journal.writer.record_turn(turn)
    publish_end(journal, whole)
