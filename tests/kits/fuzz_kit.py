"""Fuzz targets: how one is played (some seconds in CI, minutes by `make fuzz`), and what one input may cost.

A target is a strategy of inputs and a check of one input. Answers are the check's business. What every input
is held to stands here: the memory it takes, how long it holds the event loop, and the descriptors it leaves
open. The bounds are relative to the size of the input, because a long input may take long.
"""

import gc
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen
from hypothesis import HealthCheck, Phase, Verbosity, example, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

# ── targets ───────────────────────────────────────────────────────────────────

# Set by `make fuzz`: the seconds that each target is played, and where its inputs are kept.
SECONDS = "POLARNODE_FUZZ_S"
FOLDER = Path(__file__).parents[2] / ".hypothesis" / "fuzz"
MOST_SHOWN = 4_000  # characters of an input that failed; all of it is in the database
ROUND_EXAMPLES = 2_000  # examples of one round of a long play; the clock is read between rounds
LONG = settings(max_examples=ROUND_EXAMPLES, database=DirectoryBasedExampleDatabase(FOLDER), print_blob=True)


@frozen(kw_only=True)
class Target:
    """What is fuzzed. `examples` are those of CI; `always` are inputs that once failed, or nearly did."""

    name: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    examples: int
    always: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name


def play(target: Target) -> None:
    """Check a target: some examples in CI, the same ones each time; rounds of new ones by `make fuzz`.

    What the process holds already is frozen: in a process of eight thousand tests one collection of garbage
    takes longer than a step may, and would be charged to whichever input it meets.
    """
    gc.collect()
    gc.freeze()
    try:
        _play_rounds(target)
    finally:
        gc.unfreeze()


def _play_rounds(target: Target) -> None:
    seconds = os.environ.get(SECONDS)
    if seconds is None:
        property_of(target, settings(max_examples=target.examples, derandomize=True, database=None))()
        return
    began, rounds = time.monotonic(), 0
    while time.monotonic() - began < float(seconds):
        property_of(target, LONG)()
        rounds += 1
    print(f"{target.name}: {_counted[target.name]} executions in {rounds} rounds")


_counted: dict[str, int] = {}


def property_of(target: Target, profile: settings) -> Any:
    """The target as a Hypothesis test; `hypothesis.fuzz_one_input` of it takes bytes of a coverage-guided
    fuzzer.
    """

    def check(value: Shown) -> None:
        _counted[target.name] = _counted.get(target.name, 0) + 1
        try:
            target.check(value.value)
        except Exception as error:
            error.add_note(f"{target.name} failed with {value!r}")  # pytest leaves out Hypothesis's own line
            raise

    check.__name__ = check.__qualname__ = target.name  # the database's key
    check.__module__ = "fuzz"
    found = given(value=target.inputs.map(Shown))(check)
    for value in target.always:
        found = example(value=Shown(value))(found)
    # A shrink replays a slow failure hundreds of times; the phases that explain one cost as much again.
    return settings(
        profile,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
        verbosity=Verbosity.normal,
    )(found)


@frozen(repr=False)
class Shown:
    """An input as a failure shows it: a long one cut, since Hypothesis prints it whole."""

    value: Any

    def __repr__(self) -> str:
        shown = repr(self.value)
        return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}… ({len(shown)} characters)"


# ── what an input may cost ────────────────────────────────────────────────────

# Seconds of the processor that one step of the loop may take, whatever the input. The promise of a node is
# 0.25 s; a test machine that does eight things at once, with a collector in between, gets twice that.
MAX_BLOCKED_S = 0.5
# and for each byte: JSON is read at 50 MB/s and more, then its values are checked at some 2 µs each, and the
# densest JSON has a value every second byte
MAX_BLOCKED_S_PER_BYTE = 2e-6
# Bytes of memory, whatever the input: a thread's stack and arena, and caches that the first call of a path fills
MAX_GROWTH_BYTES = 64 << 20
# and for each byte: the densest JSON (`[[],[],…`) is 60 bytes of Python a byte; tokens are encoded at 170 a
# character (docs/measurements.md), and both are held at once
MAX_GROWTH_PER_BYTE = 300


@define(eq=False)
class LongestStep(trio.abc.Instrument):
    """The longest step of a task: seconds of the processor in the loop's thread, so that another program's
    turn on a busy machine is not counted.
    """

    seconds: float = 0.0
    _began: float | None = None  # None in the step that adds this instrument

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began is not None:
            self.seconds = max(self.seconds, time.thread_time() - self._began)


@define(eq=False)
class Watched:
    """One input's cost, as it is measured."""

    size: int
    steps: LongestStep = field(factory=LongestStep)
    grown: int = 0

    def check(self) -> None:
        """Raise AssertionError when the input took more than its size allows."""
        allowed = MAX_BLOCKED_S + MAX_BLOCKED_S_PER_BYTE * self.size
        assert self.steps.seconds <= allowed, (
            f"{self.size} bytes held the loop for {self.steps.seconds:.2f} s of processor time; {allowed:.2f} are allowed"
        )
        most = MAX_GROWTH_BYTES + MAX_GROWTH_PER_BYTE * self.size
        assert self.grown <= most, (
            f"{self.size} bytes made the process grow by {self.grown >> 20} MiB; {most >> 20} are allowed"
        )


@contextmanager
def watched(size: int, *, on_loop: bool = False, descriptors: bool = True) -> Iterator[Watched]:
    """Measure a block that handles an input of `size` bytes, then check its cost, and that it left no
    descriptor open. A block without a loop of its own may stand on one, so all of it counts as one step; with
    `on_loop` its loop's steps are counted by an instrument. `descriptors`: false where a server in the same
    process closes them in its own time.
    """
    cost, open_before, before = Watched(size=size), _open_descriptors(), _reset_peak()
    began = time.thread_time()
    yield cost
    if not on_loop:
        cost.steps.seconds = time.thread_time() - began
    cost.grown = _peak_memory() - before
    cost.check()
    if descriptors and _open_descriptors() - open_before:
        gc.collect()  # what only a cycle holds is not leaked
        left = _open_descriptors() - open_before
        assert not left, f"left open: {sorted(left)}"


def run(work: Callable[..., Awaitable[None]], *args: Any, size: int) -> None:
    """`trio.run` of one input, watched. Trio itself ends with no task left."""
    with watched(size, on_loop=True) as cost:
        trio.run(work, *args, instruments=[cost.steps])


def _open_descriptors() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:  # the listing's own
            continue
    return found


def _reset_peak() -> int:
    """Forget the highest resident size. Returns the current one. Unlike tracemalloc this counts what
    libraries in C and Rust take, and costs nothing while the input runs.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _peak_memory() -> int:
    return _memory("VmHWM")


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc/self/status has no {name}")


# ── what an answer must be ────────────────────────────────────────────────────


def check_sentence(text: str) -> None:
    """A refusal is one readable sentence: not empty, not a traceback, not the whole input again."""
    assert text.strip(), "a refusal without a word"
    assert len(text) < 20_000, f"a refusal of {len(text)} characters"
    assert "Traceback" not in text
    assert " " in text.strip(), f"no sentence: {text!r}"
