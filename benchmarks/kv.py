"""What an over-subscribed prefix cache costs, and what a policy gets back, in virtual time.

    python benchmarks/kv.py [--policy none|queue|residency|cap=N] [--load 4] [--shape FILE] [--hours 6]
                            [--seed 1] [--plain-lru] [--json FILE]

One engine (`engine/kv_model.py`), the policy that a node runs (`engine/residency.py`), and agents in a closed
loop: so many sessions are wanted at once that `load` times the cache would be full. Prints sampled tokens a
second, prompt tokens that were read again, and the seconds that turns, sessions and groups waited. The first
quarter of the time is left out.
"""

import argparse
import heapq
import json
import random
import statistics
import tomllib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from math import log
from pathlib import Path
from typing import Any, Final

import cattrs
from attrs import define, field, frozen

from polarnode.engine.kv_model import KvConstants, KvEvent, KvModel
from polarnode.engine.residency import HeldCall, ResidencyPolicy
from polarnode.rollouts.machine_watch import LOOK_S
from polarnode.rollouts.stage_limits import LoadReadings, SessionCounts, StageBounds, State, begin, decide

SHAPES: Final = Path(__file__).parent / "kv_shapes"
Span = tuple[int, int]  # from, to
P95: Final = 1.645  # standard deviations of a normal distribution
WARM_UP: Final = 0.25
LONGEST_TOOL_S: Final = 1200.0  # of a heavy tail: harnesses end a tool by then


@frozen(kw_only=True)
class Shape:
    """What sessions are like; the fields with no default are those of kv_shapes/base.toml.

    `slow_spread`: of slow tools, whose seconds then are lognormal around `slow_s` (sigma). `short_share`: of
    groups, whose sessions have `short_turns` and `short_final_tokens`. `growth_per_hour`: sessions that are
    wanted an hour later have so many times the turns and tokens. `burst_share`: of turns, after which not a
    tool runs but `burst` sub-agents at once, each of `burst_turns` up to `burst_final_tokens`.
    """

    group: int
    turns: tuple[int, int]
    system_tokens: int
    task_tokens: tuple[int, int]
    final_tokens: tuple[int, int]
    sampled_tokens: tuple[int, int]
    tool_median_s: float
    tool_p95_s: float
    slow_share: float
    slow_s: float
    harness_s: float
    slow_spread: float = 0.0
    short_share: float = 0.0
    short_turns: tuple[int, int] = (1, 1)
    short_final_tokens: tuple[int, int] = (0, 0)
    growth_per_hour: float = 1.0
    burst_share: float = 0.0
    burst: tuple[int, int] = (0, 0)
    burst_turns: tuple[int, int] = (1, 1)
    burst_final_tokens: tuple[int, int] = (0, 0)

    @classmethod
    def read(cls, path: Path) -> "Shape":
        return cattrs.structure(tomllib.loads(path.read_text()), cls)

    @property
    def mean_own(self) -> float:
        """Tokens that a session has for itself, on average over its life."""
        first = self.system_tokens + statistics.mean(self.task_tokens)
        long = (1 - self.short_share) * statistics.mean(self.final_tokens)
        return (long + self.short_share * statistics.mean(self.short_final_tokens) - first) / 2

    def tool_s(self, chance: random.Random) -> float:
        """Seconds between an answer and the next request."""
        if chance.random() < self.slow_share:
            tail = chance.lognormvariate(0.0, self.slow_spread) if self.slow_spread else 1.0
            return min(self.slow_s * tail, LONGEST_TOOL_S) + self.harness_s
        spread = log(self.tool_p95_s / self.tool_median_s) / P95
        return chance.lognormvariate(log(self.tool_median_s), spread) + self.harness_s


@define(eq=False)
class Agent:
    """A session, or a sub-agent that its `parent` waits for: how it grows is drawn before it begins, so that
    every policy runs the same ones.
    """

    name: str
    number: int  # among all sessions, from 1
    group: int
    wanted: float
    lengths: Sequence[int]  # the prompt's tokens at each turn
    samples: Sequence[int]
    tools: Sequence[float]
    first: int  # tokens that its group shares
    parent: "Agent | None" = None
    waits_for: int = 0
    began: float = 0.0
    turn: int = 0
    asked: float = 0.0
    sent: float = 0.0

    @property
    def session(self) -> str:
        return self.name if self.parent is None else self.parent.name

    @property
    def chain(self) -> str:
        return "main" if self.parent is None else self.name


@define(eq=False)
class Run:
    """One policy on one engine."""

    shape: Shape
    constants: KvConstants
    wanted: int
    forgets: bool  # the engine drops prefixes of displaced sessions first
    cap: int | None
    queue: StageBounds | None  # those of a node whose engine's cache nobody counts
    residency: ResidencyPolicy | None
    chance: random.Random
    model: KvModel = field(init=False)
    now: float = 0.0
    _timers: list[tuple[float, int, Callable[[], None]]] = field(factory=list, init=False)
    _numbers: Any = field(factory=count, init=False)
    _waiting: deque[Agent] = field(factory=deque, init=False)
    _running: dict[str, Agent] = field(factory=dict, init=False)
    _asking: dict[str, Agent] = field(factory=dict, init=False)
    _known: dict[tuple[str, str], Agent] = field(factory=dict, init=False)  # whose prefix may be forgotten
    _groups: int = field(default=0, init=False)
    _agents: Any = field(factory=lambda: count(1), init=False)
    _open: dict[int, list[float]] = field(factory=dict, init=False)  # by group: starts and ends of members
    sampled: int = 0
    prompt: int = 0
    again: int = 0
    turn_waits: list[float] = field(factory=list)
    session_waits: list[float] = field(factory=list)
    session_s: list[float] = field(factory=list)
    group_s: list[float] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.model = KvModel(self.constants)
        if self.queue is not None:
            self._watch_queue(begin(self.queue), self.queue)

    def _watch_queue(self, state: State, bounds: StageBounds) -> None:
        """A node's look at its engine, each second."""
        working = len(self._running)
        readings = LoadReadings(running=self.model.running, waiting=self.model.waiting)
        found = decide(state, readings, SessionCounts(at_work=working, running=working), bounds)
        self.cap = found.run
        self._after(LOOK_S, lambda: self._watch_queue(found, bounds))

    # ── time ──────────────────────────────────────────────────────────────────

    def play(self, seconds: float) -> None:
        while self.now < seconds:
            self._fill()
            times = [seconds]
            times += [self._timers[0][0]] if self._timers else []
            due = self.model.next_time()
            times += [] if due is None else [due]
            if self.residency is not None:
                times.append(max(self.residency.next_decision(self.now), self.now + 1e-6))
            self.now = min(times)
            for event in self.model.advance(self.now):
                self._happened(event, seconds)
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()
            if self.residency is not None:
                for call in self.residency.look(self.now):
                    self._submit(self._asking[call.id])
                for session, chain in self.residency.forgotten():
                    agent = self._known.pop((session, chain), None)
                    if agent is not None and self.forgets:
                        known = agent.lengths[agent.turn - 1] + agent.samples[agent.turn - 1]
                        self.model.forget(self._pages(agent, known if agent.turn else agent.first))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), act))

    # ── sessions ──────────────────────────────────────────────────────────────

    def _fill(self) -> None:
        """As many sessions as are wanted, and those of them that may begin."""
        while len(self._waiting) + len(self._running) < self.wanted:
            self._waiting.extend(self._group())
        while self._waiting and self._may_begin():
            agent = self._waiting.popleft()
            agent.began = self.now
            self.session_waits.append(self.now - agent.wanted)
            self._running[agent.name] = agent
            if self.residency is not None:
                self.residency.begin(agent.name, "agent", self.now, group=str(agent.group))
            self._ask(agent)

    def _may_begin(self) -> bool:
        if self.residency is not None:
            return self.residency.may_begin("agent", self.now, group=str(self._waiting[0].group))
        return self.cap is None or len(self._running) < self.cap

    def _group(self) -> list[Agent]:
        shape, chance, self._groups = self.shape, self.chance, self._groups + 1
        first = shape.system_tokens + chance.randint(*shape.task_tokens)
        self._open[self._groups] = []
        grown = shape.growth_per_hour ** (self.now / 3600)
        turns, final = shape.turns, shape.final_tokens
        if shape.short_share and chance.random() < shape.short_share:
            turns, final = shape.short_turns, shape.short_final_tokens
        return [
            self._agent(f"g{self._groups}-{number}", first, self._groups, turns, final, grown)
            for number in range(shape.group)
        ]

    def _agent(
        self, name: str, first: int, group: int, most: Span, finals: Span, grown: float = 1.0
    ) -> Agent:
        shape, chance = self.shape, self.chance
        turns = round(chance.randint(*most) * grown)
        final = max(round(chance.randint(*finals) * grown), first + 200 * turns)
        samples = [chance.randint(*shape.sampled_tokens) for _ in range(turns)]
        results = max(0, final - first - sum(samples)) // turns
        lengths = [first]
        for sample in samples[:-1]:
            lengths.append(lengths[-1] + sample + results)
        tools = [shape.tool_s(chance) for _ in range(turns)]
        return Agent(name, next(self._agents), group, self.now, lengths, samples, tools, first)

    def _burst(self, parent: Agent) -> list[Agent]:
        """Sub-agents, each with a task of its own, that an agent starts instead of a tool."""
        shape, chance = self.shape, self.chance
        if not shape.burst_share or chance.random() >= shape.burst_share:
            return []
        names = [f"{parent.name}/{parent.turn}-{number}" for number in range(chance.randint(*shape.burst))]
        made = []
        for name in names:
            self._groups += 1
            first = shape.system_tokens + chance.randint(*shape.task_tokens)
            made.append(self._agent(name, first, self._groups, shape.burst_turns, shape.burst_final_tokens))
            made[-1].parent = parent
        return made

    def _ask(self, agent: Agent) -> None:
        agent.asked = self.now
        self._asking[agent.name] = agent
        if self.residency is None or self.residency.ask(
            agent.name, agent.session, agent.chain, self.now, tokens=agent.lengths[agent.turn]
        ):
            self._submit(agent)

    def _submit(self, agent: Agent) -> None:
        agent.sent = self.now
        if self.residency is not None:
            self._known[agent.session, agent.chain] = agent
        prompt, sample = agent.lengths[agent.turn], agent.samples[agent.turn]
        pages = self._pages(agent, prompt)
        self.model.submit(
            agent.name,
            pages,
            prompt=prompt,
            sample=sample,
            max_new=4 * sample,
            tail=self._pages(agent, prompt + sample)[len(pages) :],
            now=self.now,
        )

    def _pages(self, agent: Agent, tokens: int) -> list[int]:
        """Keys of the whole pages: all sessions share the system prompt, a group its task."""
        page = self.constants.page
        whole, system, task = tokens // page, self.shape.system_tokens // page, agent.first // page
        group, own = agent.group << 20, agent.number << 40
        return [*range(system), *range(group + system, group + task), *range(own + task, own + whole)]

    def _happened(self, event: KvEvent, seconds: float) -> None:
        agent = self._asking[event.request]
        warm = event.at >= WARM_UP * seconds
        prompt = agent.lengths[agent.turn]
        if event.kind == "began":
            known = 0 if agent.turn == 0 else agent.lengths[agent.turn - 1] + agent.samples[agent.turn - 1]
            if self.residency is not None:
                self.residency.read(
                    agent.session,
                    agent.chain,
                    prompt=prompt,
                    cached=event.cached,
                    seconds=event.at - agent.sent,
                )
            if warm:
                self.prompt += prompt
                self.again += max(0, known - event.cached - self.constants.page)
                self.turn_waits += [event.at - agent.asked] if agent.turn else []
        elif event.kind == "ended":
            sample = agent.samples[agent.turn]
            self.sampled += sample if warm else 0
            if self.residency is not None:
                self.residency.ended(agent.session, agent.chain, tokens=prompt + sample, now=event.at)
            agent.turn += 1
            if agent.turn < len(agent.lengths):
                self._use_tool(agent)
            else:
                self._over(agent)

    def _use_tool(self, agent: Agent) -> None:
        burst = self._burst(agent) if agent.parent is None else []
        agent.waits_for = len(burst)
        for each in burst:
            self._ask(each)
        if not burst:
            self._after(agent.tools[agent.turn], lambda: self._ask(agent))

    def _over(self, agent: Agent) -> None:
        del self._asking[agent.name]
        if (parent := agent.parent) is not None:
            parent.waits_for -= 1
            if not parent.waits_for:
                self._after(self.shape.harness_s, lambda: self._ask(parent))
            return
        del self._running[agent.name]
        if self.residency is not None:
            left: list[HeldCall] = self.residency.over(agent.name)
            assert not left
        self.session_s.append(self.now - agent.began)
        members = self._open[agent.group]
        members += [agent.began, self.now]
        if len(members) == 2 * self.shape.group:
            self.group_s.append(max(members) - min(members))
            del self._open[agent.group]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and worst, in seconds."""
    if len(values) < 2:
        return {}
    return {
        "p50": round(statistics.median(values), 2),
        "p95": round(statistics.quantiles(values, n=100)[94], 2),
        "p99": round(statistics.quantiles(values, n=100)[98], 2),
        "worst": round(max(values), 2),
    }


def simulated(
    policy: str, load: float, shape: Shape, hours: float, seed: int, *, forgets: bool = True
) -> dict[str, Any]:
    """The figures of one policy."""
    constants = KvConstants(capacity=350_000)
    fits = constants.capacity / shape.mean_own
    residency = None
    if policy == "residency":
        residency = ResidencyPolicy(capacity=constants.capacity)
    cap = int(policy.removeprefix("cap=")) if policy.startswith("cap=") else None
    wanted = round(load * fits)
    queue = None
    if policy == "queue":
        queue = StageBounds(init=wanted, run=wanted, post=wanted, memory_mb=0, disk_mb=0)
    run = Run(shape, constants, wanted, forgets, cap, queue, residency, random.Random(seed))
    run.play(3600 * hours)
    return {
        "policy": policy,
        "load": load,
        "sessions_wanted": run.wanted,
        "tokens_per_s": round(run.sampled / (3600 * hours * (1 - WARM_UP)), 1),
        "read_again": round(run.again / max(run.prompt, 1), 4),
        "turn_wait_s": quantiles(run.turn_waits),
        "session_wait_s": quantiles(run.session_waits),
        "session_s": quantiles(run.session_s),
        "group_s": quantiles(run.group_s),
        "ended": len(run.session_s),
        "scale": 1.0 if residency is None else round(residency.feedback.scale, 3),
        "margin": 0.0 if residency is None else round(residency.feedback.margin, 3),
        "away": 0.0 if residency is None else round(residency.feedback._away_share, 3),
    }


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--policy", default="residency")
    options.add_argument("--load", type=float, default=4.0)
    options.add_argument("--shape", type=Path, default=SHAPES / "base.toml")
    options.add_argument("--hours", type=float, default=6.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--plain-lru", action="store_true", help="the engine is not told who was displaced")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    shape = Shape.read(given.shape)
    found = simulated(given.policy, given.load, shape, given.hours, given.seed, forgets=not given.plain_lru)
    print(json.dumps(found, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
