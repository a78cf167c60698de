"""Measure what a model call costs the node, in each API, plain and streamed, with 1 to 1,000 agents.

    python benchmarks/model_plane.py [cost] [paced] [--api NAME ...] [--agents N ...] [--turns N] [--group N]
    [--profile] [--against PATH] [--rounds N]

The load is that of the published measurements of other systems: sessions of 29 turns, requests growing from
13.5 to 127 KB, a tool call in every turn, 256 sampled tokens a turn. The node has one core, the load and the
(simulated) engine another. Trust CPU time per request if others use the machine too. `cost`: the engine
answers at once. `paced`: the engine takes its time, and latency is what the client waited beyond that; the row
`direct` before each is that of the same client and engine without the node.

`--against PATH`: the node of another checkout (a git worktree) beside this one, in turn, for `cost`. What the
tokenizer takes is the same library's in both, so the figures are given with and without it.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from attrs import define, frozen
from plane_agents import TURNS, Agent, Head, Played, Text
from plane_apis import APIS
from plane_direct import open_direct, play_direct

HERE = Path(__file__).parents[1]
AT_ONCE = {
    "tokens_per_s": 0,
    "first_token_s": 0,
    "prefill_tokens_per_s": 0,
    "calling_turns": 10**6,
    "max_running": 4096,
}
GENERATION_S = {1: 0.25, 32: 1.0, 256: 4.0, 1000: 10.4}  # of each number of agents, as the peers were asked
RAMP_S = 2.0  # agents of one load start within it
PROFILE_HZ = 250


@define(eq=False)
class Gateway:
    """A node under load, in its own process."""

    ports: list[int]
    pid: int
    engine: dict[str, Any]  # the arguments of its simulated engine
    stop_ids: list[int]
    _process: "asyncio.subprocess.Process"

    async def figures(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"figures\n")
        return await _line(self._process)


@asynccontextmanager
async def open_gateway(
    simulation: dict[str, Any],
    *,
    doors: int,
    sessions: int,
    captures: dict[str, str] | None = None,
    code: Path = HERE,
) -> AsyncIterator[Gateway]:
    """With the files of a certificate, `captures`, its doors are a captures' endpoint for other machines.
    `code` is the checkout whose node it is; its own `plane_gateway.py` builds the node.
    """
    node, beside = cores()
    settings = {
        "simulation": simulation,
        "doors": doors,
        "sessions": sessions,
        "captures": captures,
        "core": [node],
        "beside": [beside],
    }
    os.sched_setaffinity(0, [beside])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(code / "benchmarks" / "plane_gateway.py"),
        json.dumps(settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(code)},
    )
    try:
        yield Gateway(**await _line(process), process=process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _line(process: "asyncio.subprocess.Process") -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the node ended: its output is above")
    found: dict[str, Any] = json.loads(line)
    return found


def cores() -> tuple[int, int]:
    """The node's core and the load's; one and the same where there is only one, which the figures
    then show.
    """
    found = sorted(os.sched_getaffinity(os.getppid()))
    return found[0], found[-1]


@frozen(kw_only=True)
class Load:
    """What a gateway went through: its figures before and after, and every request."""

    before: dict[str, Any]
    after: dict[str, Any]
    played: list[Played]
    wall_s: float

    def spent(self, name: str) -> float:
        return float(self.after[name] - self.before[name])

    def ms(self, name: str) -> float:
        """What a request took of one of the gateway's seconds."""
        return self.spent(name) / len(self.played) * 1e3

    @property
    def cpu_ms(self) -> float:
        """A request."""
        return self.ms("cpu_s")

    @property
    def own_ms(self) -> float:
        """A request, without the tokenizer's."""
        return self.ms("cpu_s") - self.ms("encoding_s")


async def play(
    gateway: Gateway,
    api: str,
    *,
    agents: int,
    turns: int,
    stream: bool,
    group: int = 1,
    first: int = 0,
    ramp_s: float = 0.0,
) -> Load:
    """Each agent plays one session; session numbers begin with `first`. So many of them are a `group`, which
    shares its head.
    """
    text = Text()
    heads = [Head.of(text) for _ in range(-(-agents // group))]
    players = [
        Agent(APIS[api], gateway.ports[number % len(gateway.ports)], stream, text, heads[number // group])
        for number in range(agents)
    ]

    async def one(number: int) -> None:
        await asyncio.sleep(ramp_s * number / agents)
        await players[number].play(f"key-{first + number}", turns)

    before = await gateway.figures()
    began = time.perf_counter()
    await asyncio.gather(*map(one, range(agents)))
    wall = time.perf_counter() - began
    return Load(
        before=before,
        after=await gateway.figures(),
        played=[each for player in players for each in player.played],
        wall_s=wall,
    )


# ── what is measured ──────────────────────────────────────────────────────────


async def cost(apis: Sequence[str], *, agents: int, turns: int, chunks: Sequence[int], profile: bool) -> None:
    """CPU a request, a token and a chunk, with an engine that is no part of it."""
    print(f"\n{agents} agents at once, sessions of {turns} turns, the engine answers at once\n")
    print(
        "| API | tokens a chunk | CPU ms/request | of it in the loop | tokenizer | journal writer | requests/s"
        " of one core | us/sampled token | gc | lag p50 / p99 / max ms | extended | B/token kept (RSS) | B/token disk |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for api in apis:
        for stream, chunk in [(False, 16), *((True, each) for each in chunks)]:
            async with open_gateway(
                {**AT_ONCE, "chunk_tokens": chunk}, doors=agents, sessions=2 * agents
            ) as gateway:
                # warm: the first calls import and compile
                await play(gateway, api, agents=agents, turns=2, stream=stream)
                async with profiled(gateway.pid, wanted=profile):
                    load = await play(gateway, api, agents=agents, turns=turns, stream=stream, first=agents)
            print(row(f"{api}{', streamed' if stream else ''}", chunk, load), flush=True)


def row(name: str, chunk: int, load: Load) -> str:
    after, tokens = load.after, load.spent("sampled")
    lag = f"{after['lag_p50_ms']:.1f} / {after['lag_p99_ms']:.0f} / {after['lag_max_ms']:.0f}"
    extended = f"{load.spent('extended') / load.spent('turns'):.0%}"
    cells = (
        name,
        chunk,
        f"{load.cpu_ms:.2f}",
        f"{load.ms('loop_s'):.2f}",
        f"{load.ms('encoding_s'):.2f}",
        f"{load.ms('writer_s'):.2f}",
        f"{1e3 / load.cpu_ms:.0f}",
        f"{load.spent('cpu_s') / tokens * 1e6:.1f}",
        f"{load.spent('gc_s') / load.spent('cpu_s'):.0%}",
        lag,
        extended,
    )
    return (
        f"| {' | '.join(map(str, cells))} | {load.spent('kept') / tokens:.0f}"
        f" ({load.spent('rss') / tokens:.0f}) | {load.spent('disk') / tokens:.0f} |"
    )


async def compare(
    apis: Sequence[str], *, agents: int, turns: int, chunks: Sequence[int], other: Path, rounds: int
) -> None:
    """The cost of a request in two checkouts, each with a node of its own, one load after the other in turn.
    The figures are the medians of the rounds, and of their ratios, with the median's 95 % interval.
    """
    print(f"\n{agents} agents at once, sessions of {turns} turns, {rounds} rounds in turn; before: {other}\n")
    print(
        "| API | tokens a chunk | CPU ms/request before | after | ratio | without the tokenizer before | after"
        " | ratio | in the loop before | after | B/token kept before | after | disk before | after |"
    )
    print(f"|{'---|' * 14}")
    for api in apis:
        for stream, chunk in [(False, 16), *((True, each) for each in chunks)]:
            engine = {**AT_ONCE, "chunk_tokens": chunk}
            sessions = (rounds + 1) * agents
            loads: tuple[list[Load], list[Load]] = ([], [])
            async with (
                open_gateway(engine, doors=agents, sessions=sessions, code=other) as before,
                open_gateway(engine, doors=agents, sessions=sessions) as after,
            ):
                for played in range(rounds + 1):
                    for gateway, found in zip((before, after), loads, strict=True):
                        load = await play(
                            gateway,
                            api,
                            agents=agents,
                            turns=turns if played else 2,  # the first calls import and compile
                            stream=stream,
                            first=played * agents,
                        )
                        found += [load] if played else []
            print(compared_row(f"{api}{', streamed' if stream else ''}", chunk, loads), flush=True)


def compared_row(name: str, chunk: int, loads: tuple[list[Load], list[Load]]) -> str:
    cells = [name, str(chunk)]
    for figure in (lambda load: load.cpu_ms, lambda load: load.own_ms):
        before, after = ([figure(load) for load in some] for some in loads)
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        low, high = median_interval(ratios)
        cells += [
            f"{median(before):.2f}",
            f"{median(after):.2f}",
            f"{median(ratios):.3f} ({low:.3f} to {high:.3f})",
        ]
    cells += [f"{median(load.ms('loop_s') for load in some):.2f}" for some in loads]
    for figure_name in ("kept", "disk"):
        cells += [
            f"{median(each.spent(figure_name) / each.spent('sampled') for each in some):.0f}"
            for some in loads
        ]
    return f"| {' | '.join(cells)} |"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which two of the values the median of what they are drawn from lies, 19 times in 20: the order
    statistics of a binomial distribution of 1/2. Fewer than six values say no more than their range.
    """
    ordered, outside, rank = sorted(values), 0.0, 0
    while (outside := outside + 2 * comb(len(ordered), rank) / 2 ** len(ordered)) <= 0.05:
        rank += 1
    return ordered[max(rank - 1, 0)], ordered[-max(rank, 1)]


async def paced(apis: Sequence[str], *, agents: Sequence[int], turns: int, group: int) -> None:
    """What a client waits beyond the engine's own time, from the second turn of a session on: the first
    renders everything.
    """
    print(f"\nan engine that takes its time; {turns} turns of each agent, {group} of them with one head\n")
    print(
        "| API | agents | engine s | added p50 / p99 ms | beyond direct | first turn p50 / p99 ms | wall s (ideal)"
        " | core in use | CPU ms/call | us/token | lag p50 / p99 / max ms |"
    )
    print(f"|{'---|' * 11}")
    for api in apis:
        for stream in (False, True):
            for count in agents:
                generation = GENERATION_S.get(count, 1.0)
                engine = {**AT_ONCE, "tokens_per_s": 255 / generation}
                ramp = min(RAMP_S, generation)
                async with open_gateway(engine, doors=count, sessions=count + 1) as gateway:
                    stop_ids = tuple(gateway.stop_ids)
                    async with open_direct(gateway.engine) as bare:
                        await play_direct(bare, agents=1, turns=2, stop_ids=stop_ids, ramp_s=0.0)
                        direct = await play_direct(
                            bare, agents=count, turns=turns, stop_ids=stop_ids, ramp_s=ramp
                        )
                    print(direct_row(count, generation, direct), flush=True)
                    await play(gateway, api, agents=1, turns=2, stream=stream, first=count)
                    load = await play(
                        gateway,
                        api,
                        agents=count,
                        turns=turns,
                        stream=stream,
                        group=group,
                        ramp_s=ramp,
                    )
                name = f"{api}{', streamed' if stream else ''}"
                print(paced_row(name, count, generation, turns, load, direct), flush=True)


def added_ms(played: Sequence[Played], generation: float, *, later: bool) -> list[float]:
    """What each request took beyond the engine's own time, in order: of sessions' first turns, or `later`."""
    return sorted((each.last - each.sent - generation) * 1e3 for each in played if (each.turn > 0) is later)


def direct_row(count: int, generation: float, direct: Sequence[Played]) -> str:
    added = {later: added_ms(direct, generation, later=later) for later in (True, False)}
    cells = ("direct", count, generation, middle(added[True]), "–", middle(added[False]))
    return f"| {' | '.join(map(str, cells))} | – | – | – | – | – |"


def paced_row(
    name: str, count: int, generation: float, turns: int, load: Load, direct: Sequence[Played]
) -> str:
    added = {later: added_ms(load.played, generation, later=later) for later in (True, False)}
    bare = added_ms(direct, generation, later=True)
    ideal = generation * turns + min(RAMP_S, generation) * (count - 1) / count
    after = load.after
    lag = f"{after['lag_p50_ms']:.1f} / {after['lag_p99_ms']:.0f} / {after['lag_max_ms']:.0f}"
    cells = (
        name,
        count,
        generation,
        middle(added[True]),
        beyond(added[True], bare),
        middle(added[False]),
        f"{load.wall_s:.1f} ({ideal:.1f})",
        f"{load.spent('cpu_s') / load.wall_s:.0%}",
        f"{load.cpu_ms:.2f}",
        f"{load.spent('cpu_s') / load.spent('sampled') * 1e6:.0f}",
    )
    return f"| {' | '.join(map(str, cells))} | {lag} |"


def middle(ordered: Sequence[float]) -> str:
    return f"{quantile(ordered, 0.5):.1f} / {quantile(ordered, 0.99):.0f}" if ordered else "–"


def beyond(ordered: Sequence[float], direct: Sequence[float]) -> str:
    """The node's own share: each quantile less the same one of the engine without it."""
    if not ordered:
        return "–"
    own = [quantile(ordered, part) - quantile(direct, part) for part in (0.5, 0.99)]
    return f"{own[0]:.1f} / {own[1]:.1f}"


def quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[int(len(ordered) * part)]


@asynccontextmanager
async def profiled(pid: int, *, wanted: bool) -> AsyncIterator[None]:
    """py-spy beside a process; afterwards, the functions it was in."""
    if not wanted:
        yield
        return
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(pid), "--format", "raw", "--function", "--gil", "--rate", str(PROFILE_HZ), "--output", file.name,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)  # it writes what it has
            await process.wait()
            tell_profile(Path(file.name))


def tell_profile(file: Path, *, rows: int = 110) -> None:
    """Functions by the share of samples they were on top of, and by the share they were anywhere in."""
    stacks = file.read_text()
    own, within, total = Counter[str](), Counter[str](), 0
    for line in stacks.splitlines():
        stack, _, samples = line.rpartition(" ")
        frames, count = stack.split(";"), int(samples)
        total += count
        own[frames[-1]] += count
        within.update(dict.fromkeys(frames, count))
    for title, counted in (("of its own", own), ("with what it calls", within)):
        print(f"\n{title}:")
        for name, samples in counted.most_common(rows):
            print(f"  {samples / total:6.1%}  {name}")


def options() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["cost", "paced", []], help="cost, paced [default: both]")
    parser.add_argument("--api", nargs="+", default=list(APIS), choices=list(APIS))
    parser.add_argument(
        "--agents", nargs="+", type=int, help="[default: 32 for cost; 1 32 256 1000 for paced]"
    )
    parser.add_argument("--turns", type=int, help="of each session [default: 29 for cost, 3 for paced]")
    parser.add_argument(
        "--group",
        type=int,
        default=1,
        help=(
            "sessions that share a system prompt and tools, for paced [default: 1, as the peers were"
            " measured]"
        ),
    )
    parser.add_argument(
        "--chunks", nargs="*", type=int, default=[16, 1], help="tokens a streamed chunk, for cost"
    )
    parser.add_argument(
        "--against", type=Path, help="another checkout of this repository, for cost: before and after in turn"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each checkout, with --against [default: 3]")
    parser.add_argument("--profile", action="store_true", help="py-spy beside each load of cost")
    return parser.parse_args()


async def main() -> None:
    asked = options()
    parts = asked.parts or ["cost", "paced"]
    if "cost" in parts:
        agents, turns = asked.agents[0] if asked.agents else 32, asked.turns or TURNS
        if asked.against is None:
            await cost(asked.api, agents=agents, turns=turns, chunks=asked.chunks, profile=asked.profile)
        else:
            other = asked.against.resolve()
            await compare(
                asked.api, agents=agents, turns=turns, chunks=asked.chunks, other=other, rounds=asked.rounds
            )
    if "paced" in parts:
        await paced(
            asked.api, agents=asked.agents or list(GENERATION_S), turns=asked.turns or 3, group=asked.group
        )


if __name__ == "__main__":
    asyncio.run(main())
