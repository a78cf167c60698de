"""The node's side of `benchmarks/model_plane.py`: model plane, sessions, journal and simulated engine.

One process, started by the benchmark with its settings as JSON. It prints its address, then answers each line
of its input with measurements of itself. Each session has its own model endpoint, as on a node; the code
behind it is the node's.
"""

import ctypes
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from polarnode.core.conversation import Sampling
from polarnode.core.task import Budgets
from polarnode.core.trajectory import Turn
from polarnode.engine.engines import open_engines
from polarnode.engine.protocol import FamilyMarks, Simulation
from polarnode.engine.settings import EngineSettings, SimulatedEngine, engine_arguments
from polarnode.gateway.call import Model
from polarnode.gateway.endpoint import CaptureEndpoint, ModelPlane
from polarnode.gateway.live_sessions import LiveSession, LiveSessions, SessionBudget
from polarnode.http.connections import DirectApp
from polarnode.http.server import MAX_CAPTURE_CONNECTIONS, Address, Certificate, open_server
from polarnode.journal.journal import open_journal
from polarnode.journal.writer import JournalWriter
from polarnode.merge.lineage import Lineages
from polarnode.node.config import TINY_MODEL
from polarnode.node.opening import rare_collections
from polarnode.tokens.template import LoadedModel, load_model
from polarnode.tokens.tokenizer import LoadedTokenizer

# seconds between looks at the loop: what a step holds it beyond that is its lag. A look costs CPU time, which
# is in the CPU time of a request
TICK = 0.05


@define(eq=False)
class Figures:
    """What the gateway knows of itself."""

    writer: JournalWriter
    lags: list[float] = field(factory=list)
    turns: int = 0
    extended: int = 0
    sampled: int = 0
    collecting_s: float = 0.0
    encoding_s: float = 0.0  # CPU time of the tokenizer
    asked_s: float = 0.0  # CPU time of `as_json`, which is no request's: some 0.1 ms of each of a load's

    def record(self, turn: Turn) -> None:
        self.turns += 1
        self.extended += turn.parent is not None
        self.sampled += len(turn.sampled)
        self.writer.record_turn(turn)

    def watch_collections(self) -> None:
        """The time Python's garbage collector takes."""
        began = [0.0]

        def note(phase: str, _: dict[str, int]) -> None:
            if phase == "start":
                began[0] = time.perf_counter()
            else:
                self.collecting_s += time.perf_counter() - began[0]

        gc.callbacks.append(note)

    def watch_tokenizer(self) -> None:
        """The CPU time of encoding text, which no node can save: it is the same library's in every system."""
        encode = LoadedTokenizer.encode_plain

        def timed(tokenizer: LoadedTokenizer, text: str) -> list[int]:
            began = time.thread_time()
            try:
                return encode(tokenizer, text)
            finally:
                self.encoding_s += time.thread_time() - began

        LoadedTokenizer.encode_plain = timed  # type: ignore[method-assign]

    async def watch_lag(self) -> None:
        """How late this task is each time, in seconds."""
        while True:
            before = time.perf_counter()
            await trio.sleep(TICK)
            self.lags.append(time.perf_counter() - before - TICK)

    def as_json(self, folder: Path) -> dict[str, Any]:
        """Since the start, but for the lag: since it was last asked. `kept` is memory after what is free was
        given back, `rss` before.
        """
        lags, self.lags = sorted(self.lags) or [0.0], []
        began = time.thread_time()
        spent = {
            "cpu_s": time.process_time() - self.asked_s,
            "loop_s": began - self.asked_s,
            "gc_s": self.collecting_s,
            "encoding_s": self.encoding_s,
            "writer_s": thread_s("journal writer"),
            "rss": resident(),
        }
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        kept = resident()
        self.asked_s += time.thread_time() - began
        return {
            **spent,
            "kept": kept,
            "disk": sum(path.stat().st_size for path in folder.iterdir()),
            "lag_p50_ms": lags[len(lags) // 2] * 1e3,
            "lag_p99_ms": lags[int(len(lags) * 0.99)] * 1e3,
            "lag_max_ms": lags[-1] * 1e3,
            "turns": self.turns,
            "extended": self.extended,
            "sampled": self.sampled,
        }


def resident() -> int:
    """Bytes of memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def thread_s(name: str) -> float:
    """CPU seconds of this process's threads of a name."""
    tasks = [thread.native_id for thread in threading.enumerate() if thread.name == name]
    return sum(int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def main(settings: dict[str, Any]) -> None:
    """Serve until the input ends."""
    model = load_model(TINY_MODEL)
    with tempfile.TemporaryDirectory(prefix="pnbench") as name:
        folder = Path(name)
        engine = EngineSettings(
            model_path=TINY_MODEL,
            device="cpu",
            state_dir=folder / "engine",
            simulated=simulated(model, settings["simulation"]),
        )
        (folder / "journal").mkdir()
        async with (
            open_journal(folder / "journal" / "journal.sqlite", now=time.time) as journal,
            open_engines(engine) as engines,
        ):
            figures = Figures(journal.writer)
            plane = ModelPlane(sessions=sessions(settings["sessions"], figures), model=served(model, engines))
            # beside the load: what is measured is the node's own core
            os.sched_setaffinity(engines.statistics().hosts[0].pid or 0, settings["beside"])
            async with doors(plane, settings["doors"], settings["captures"]) as ports:
                opened = {
                    "ports": ports,
                    "pid": os.getpid(),
                    "engine": engine_arguments(engine, nccl_port=0),
                    "stop_ids": model.template.stop_ids,
                }
                with rare_collections():
                    await answer(figures, opened, folder / "journal")


async def answer(figures: Figures, served: dict[str, Any], folder: Path) -> None:
    """Say where it serves, then figures for every line of the input."""
    figures.watch_collections()
    figures.watch_tokenizer()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(figures.watch_lag)
        emit(served)
        while await trio.to_thread.run_sync(sys.stdin.readline):
            await figures.writer.flush()
            emit(figures.as_json(folder))
        nursery.cancel_scope.cancel()


def simulated(model: LoadedModel, settings: dict[str, Any]) -> SimulatedEngine:
    family = model.family
    marks = FamilyMarks(
        turn_end=family.turn_end, think_open=family.think_open, think_close=family.think_close, call_open=family.call_open, call_close=family.call_close
    )  # fmt: skip
    return SimulatedEngine(
        simulation=Simulation(**settings), marks=marks, vocab_size=model.tokenizer.vocab_size
    )


def sessions(count: int, figures: Figures) -> LiveSessions:
    """Sessions whose keys are their numbers."""
    lives = LiveSessions()
    for number in range(count):
        lineages = Lineages(session_id=f"s{number}", secret=b"s" * 32)
        budget = SessionBudget(Budgets())
        lives.add(LiveSession(f"s{number}", f"key-{number}", lineages, Sampling(), budget, figures.record))
    return lives


def served(model: LoadedModel, engines: Any) -> Model:
    return Model(
        engine=engines,
        template=model.template,
        tokenizer=model.tokenizer,
        family=model.family,
        context_length=engines.context_length,
        id="simulated:tiny",
        now=time.time,
    )


@asynccontextmanager
async def doors(plane: ModelPlane, count: int, captures: dict[str, str] | None) -> AsyncIterator[list[int]]:
    """The ports of so many servers of one plane; with a certificate, as captures' endpoints."""
    async with AsyncExitStack() as stack:
        certificate = None if captures is None else Certificate(**captures)
        app = plane.app_for(None)
        if captures is not None:
            app = DirectApp(CaptureEndpoint(plane, public=True).serve)
        where = Address(host="127.0.0.1", port=0)
        opened = [
            open_server(app, where, connections=MAX_CAPTURE_CONNECTIONS, certificate=certificate)
            for _ in range(count)
        ]
        yield [(await stack.enter_async_context(each)).port for each in opened]


def emit(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    os.sched_setaffinity(0, settings["core"])
    trio.run(main, settings)
