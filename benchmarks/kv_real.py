"""Real SGLang on a CPU with a small cache, against what the model of its cache predicts.

    python benchmarks/kv_real.py [--kv-tokens 6000] [--seconds 40] [--loads 1,4] [--seed 1] [--json FILE]

Before and after each load the machine's constants are measured, because others use it too: how fast a
prompt is read, what its past costs, how long a step of sampling takes and what each further request and
each token of context adds. The same closed loop of sessions runs on the engine, and in virtual time on
`engine/kv_model.py` with the means of those constants: sampled tokens a second, and the share of known
prompt tokens that the cache had. The same again with sessions that begin when the engine's cache has room
(`engine/residency.py`).
"""

import argparse
import heapq
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from itertools import count as count_from
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import trio
from attrs import asdict, define, evolve, field

from polarnode.core.conversation import Sampling
from polarnode.core.ports import GenerateOrder
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.kv_model import KvConstants, KvModel
from polarnode.engine.settings import CPU_MAX_RUNNING, CPU_MAX_TOKENS, EngineSettings
from polarnode.node.config import TINY_MODEL

SYSTEM, FIRST, RESULT, SAMPLE, TURNS = 200, 800, 180, 40, 5  # tokens, and calls of a session
WARM_UP: Final = 0.25
TRIES: Final = 5
LOOK_S: Final = 0.05  # seconds between tries of a session to begin
TOOL_S: Final = 0.1  # seconds between an answer and the next call


def enlarge(times: int) -> None:
    """Sessions of so many times the tokens, for an engine that reads them as fast."""
    global SYSTEM, FIRST, RESULT, SAMPLE
    SYSTEM, FIRST, RESULT, SAMPLE = (times * size for size in (SYSTEM, FIRST, RESULT, SAMPLE))


def mean_session() -> float:
    """Tokens that a session has of its own, on average over its calls."""
    return FIRST + (RESULT + SAMPLE) * (TURNS - 1) / 2


def ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(300, 2_000) for _ in range(count)]


async def ask(engines: Engines, prompt: list[int], sample: int, session: str = "") -> tuple[int, list[int]]:
    """The cached tokens of a call, and what was sampled."""
    order = GenerateOrder(
        request_id=uuid4().hex,
        prompt=array("i", prompt),
        sampling=Sampling(max_tokens=sample, temperature=1.0),
        stop_ids=(),
        affinity=session,
    )
    async with engines.generate(order) as stream:
        chunks = [chunk async for chunk in stream]
    return chunks[0].cached_tokens, [token for chunk in chunks for token in chunk.ids]


# ── constants ────────────────────────────────────────────────────────────


async def measured(engines: Engines, kv_tokens: int) -> tuple[KvConstants, float]:
    """The constants of this machine, and the seconds that a call costs beside the engine's work."""
    chance, most = random.Random(0), kv_tokens * 2 // 3

    async def seconds(requests: int, prompt: int, sample: int) -> float:
        """The median of some tries."""
        found = []
        for _ in range(TRIES):
            prompts = [ids(chance, prompt) for _ in range(requests)]
            began = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for each in prompts:
                    nursery.start_soon(ask, engines, each, sample)
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    await seconds(1, 500, 8)  # what is compiled or allocated first
    short, half, whole = [await seconds(1, size, 1) for size in (most // 8, most // 2, most)]
    # a + b n + c n², through three points
    n1, n2, n3 = most // 8, most // 2, most
    slope12, slope23 = (half - short) / (n2 - n1), (whole - half) / (n3 - n2)
    square = max((slope23 - slope12) / (n3 - n1), 1e-12)
    linear = max(slope12 - square * (n1 + n2), 1e-9)
    few, eight = 64, 8
    step = (await seconds(1, 32, few) - await seconds(1, 32, 1)) / (few - 1)
    more = (await seconds(eight, 32, few) - await seconds(eight, 32, 1)) / (few - 1)
    deep = (await seconds(1, most, few) - whole) / (few - 1)
    if min(slope12, step) <= 0:
        sys.exit(f"the machine is too busy: a step took {step * 1e3:.1f} ms; measure again when it is idle")
    constants = KvConstants(
        capacity=kv_tokens,
        page=1,
        prefill_tokens_per_s=1 / linear,
        past_tokens=linear / (2 * square),
        step_s=step,
        request_s=max((more - step) / (eight - 1), 0.0),
        context_s=max((deep - step) / most, 0.0),
        chunk=CPU_MAX_TOKENS,
        most_running=CPU_MAX_RUNNING,
    )
    return constants, max(short - linear * n1 - square * n1 * n1, 0.0)


def between(before: tuple[KvConstants, float], after: tuple[KvConstants, float]) -> tuple[KvConstants, float]:
    """The means of two measurements: of times, so harmonic ones of what is per second."""
    one, other = before[0], after[0]

    def mean(name: str) -> float:
        return (float(getattr(one, name)) + float(getattr(other, name))) / 2

    def rate(name: str) -> float:
        return 2 / (1 / float(getattr(one, name)) + 1 / float(getattr(other, name)))

    constants = evolve(
        one,
        prefill_tokens_per_s=rate("prefill_tokens_per_s"),
        past_tokens=rate("past_tokens"),
        step_s=mean("step_s"),
        request_s=mean("request_s"),
        context_s=mean("context_s"),
    )
    return constants, (before[1] + after[1]) / 2


# ── the same load twice ────────────────────────────────────────────────────────────


@define(eq=False)
class Session:
    """What it knows, and how much of that it is sure to know: all but the last sampled token."""

    number: int
    system: list[int]
    chance: random.Random
    prompt: list[int] = field(factory=list)
    known: int = 0
    turns: int = 0

    def next_prompt(self) -> list[int]:
        """A session that has had its turns ends, and another one takes its place."""
        if self.turns % TURNS == 0:
            self.prompt, self.known = [*self.system, *ids(self.chance, FIRST)], 0
        else:
            self.prompt = [*self.prompt, *ids(self.chance, RESULT)]
        self.turns += 1
        return self.prompt

    def answered(self, sampled: list[int]) -> None:
        self.prompt = [*self.prompt, *sampled]
        self.known = len(self.prompt) - 1


@define(eq=False)
class Figures:
    """Of the time after the warm-up."""

    sampled: int = 0
    known: int = 0
    cached: int = 0
    calls: int = 0
    busy_s: float = 0.0

    def count(self, known: int, cached: int, sampled: int) -> None:
        self.calls += 1
        self.sampled += sampled
        self.known += known
        self.cached += min(cached, known)

    def result(self) -> dict[str, float]:
        return {
            "tokens_per_s": round(self.sampled / self.busy_s, 1),
            "known_from_cache": round(self.cached / max(self.known, 1), 3),
            "calls": self.calls,
        }


def sessions(count: int, seed: int) -> list[Session]:
    system = ids(random.Random(seed), SYSTEM)
    return [Session(number, system, random.Random(f"{seed} {number}")) for number in range(count)]


def ignored(seconds: float) -> None:
    """These sessions have no clock that what a call is held could move."""


async def really(
    engines: Engines, count: int, seconds: float, seed: int, *, places: bool = False
) -> dict[str, float]:
    """The load on an engine. With `places` a session begins when the engine's cache has room for it, as those
    of a node do.
    """
    figures = Figures(busy_s=seconds * (1 - WARM_UP))
    warm = trio.current_time() + seconds * WARM_UP

    begun: set[str] = set()

    async def live(session: Session) -> None:
        name = ""
        while True:
            if places and session.turns % TURNS == 0:
                engines.end_session(name)
                begun.discard(name)
                name = f"{session.number}-{session.turns}"
                begun.add(name)
                # a node's stage looks again each second too
                while engines.begin_session(name, "agent", name, ignored) is not None:  # noqa: ASYNC110
                    await trio.sleep(LOOK_S)
            known_before = session.known if session.turns % TURNS else 0
            cached, sampled = await ask(engines, session.next_prompt(), SAMPLE, name)
            session.answered(sampled)
            if trio.current_time() >= warm:
                figures.count(known_before, cached, len(sampled))
            await trio.sleep(TOOL_S)

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for session in sessions(count, seed):
                nursery.start_soon(live, session)
    for name in begun:
        engines.end_session(name)
    return figures.result()


def predicted(
    constants: KvConstants, overhead_s: float, count: int, seconds: float, seed: int
) -> dict[str, float]:
    figures, model = Figures(busy_s=seconds * (1 - WARM_UP)), KvModel(constants)
    found = sessions(count, seed)
    asked: dict[str, tuple[Session, int, int]] = {}  # by request: known tokens, then cached ones
    answers: dict[str, list[int]] = {}
    timers = [(overhead_s, session.number) for session in found]
    now, numbers = 0.0, count_from(0)
    while now < seconds:
        due = model.next_time()
        now = min(seconds, timers[0][0] if timers else seconds, seconds if due is None else due)
        for event in model.advance(now):
            session, known, _ = asked[event.request]
            if event.kind == "began":
                asked[event.request] = (session, known, event.cached)
                continue
            _, known, cached = asked.pop(event.request)
            session.answered(answers.pop(event.request))
            if event.at >= WARM_UP * seconds:
                figures.count(known, cached, SAMPLE)
            heapq.heappush(timers, (event.at + TOOL_S + overhead_s, session.number))
        while timers and timers[0][0] <= now:
            session = found[heapq.heappop(timers)[1]]
            known = session.known if session.turns % TURNS else 0
            prompt, name = session.next_prompt(), str(next(numbers))
            asked[name] = (session, known, 0)
            answers[name] = ids(session.chance, SAMPLE)
            tail = answers[name][:-1]
            model.submit(name, prompt, prompt=len(prompt), sample=SAMPLE, max_new=SAMPLE, tail=tail, now=now)
    return figures.result()


def endless(folder: Path) -> Path:
    """The tiny policy, which never ends its turn, so that every sample is as long as asked."""
    folder.mkdir()
    for each in TINY_MODEL.iterdir():
        if each.name not in ("config.json", "generation_config.json"):
            (folder / each.name).symlink_to(each.resolve())
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return folder


async def main(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pn") as folder:
        settings = EngineSettings(
            model_path=endless(Path(folder) / "model"),
            device="cpu",
            state_dir=Path(folder) / "state",
            context_length=8192,
            max_total_tokens=options.kv_tokens,
        )
        async with open_engines(settings) as engines:
            found: dict[str, Any] = {}
            before = await measured(engines, options.kv_tokens)
            fits = options.kv_tokens / mean_session()
            for load in map(float, options.loads.split(",")):
                count = max(1, round(load * fits))
                real = await really(engines, count, options.seconds, options.seed)
                begun = await really(engines, count, options.seconds, options.seed, places=True)
                after = await measured(engines, options.kv_tokens)
                constants, overhead_s = between(before, after)
                model = predicted(constants, overhead_s, count, options.seconds, options.seed)
                share = round(real["tokens_per_s"] / model["tokens_per_s"], 3)
                found[f"{load:g}x"] = {
                    "sessions": count,
                    "constants": {**asdict(constants), "overhead_s": overhead_s},
                    "real": real,
                    "real_with_residency": begun,
                    "gain": round(begun["tokens_per_s"] / real["tokens_per_s"], 3),
                    "predicted": model,
                    "ratio": share,
                }
                before = after
                print(json.dumps({f"{load:g}x": found[f"{load:g}x"]}), flush=True)
    return found


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--kv-tokens", type=int, default=6000)
    options.add_argument("--seconds", type=float, default=40.0)
    options.add_argument("--loads", default="1,4")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    result = trio.run(main, given)
    print(json.dumps(result, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n")
