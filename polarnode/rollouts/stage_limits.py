"""Decides how many sessions may be in each stage, from readings of the machine and the engine.

Pure: one step a second, no clock.

INIT stops when memory or disk is short, because a session needs both until it is over. RUN shrinks by a
fraction when the queue of an engine whose cache nobody counts is long and grows by one when it is short, as
TCP does: the number of agents that an engine can serve is unknown in advance, and more agents do not raise
throughput. POST shrinks when programs wait for the CPU. Invariant: nothing stops for ever. With no session
at work one begins whatever is short, since waiting would free nothing.
"""

from attrs import evolve, frozen

# multiple of a reserve that must be free before INIT resumes: ending sessions free it in pieces, and each
# piece would start one session and stop again
RELIEF = 1.1

# weight of each second's queue in the mean: agents call in bursts, and a burst is over in a few seconds
QUEUE_MEAN = 0.2
# ratio of waiting to running requests: a queue of half the engine's batch is more than keeps it full
LONG_QUEUE = 0.5
SHORT_QUEUE = 0.1  # below it the engine may soon have nothing to do
FEW = 4  # requests waiting that are no queue yet, however few run
SHRINK = 0.8  # share of the running harnesses that remains when the queue is long
SETTLE = 15  # seconds until it may shrink again: running harnesses continue, and a turn or two end meanwhile
# of so many parts of its limit RUN keeps one: the engine's batch is full of fewer than that only where each
# asks a thousand tokens
RUN_PART = 8

# percent of time in which some program waited for the CPU: above it an evaluation slows the others, below it
# has room
BUSY, FREE = 80.0, 50.0
POST_EVERY = 5  # seconds between steps of POST: the kernel's mean is over ten
POST_PART = 4  # of so many parts of its limit POST keeps one: evaluations also wait for containers and judges


@frozen(kw_only=True)
class Bounds:
    """Limits from the node's config: the largest limit of each stage, and the MiB kept free."""

    init: int
    run: int
    post: int
    memory_mb: int
    disk_mb: int


@frozen(kw_only=True)
class Readings:
    """The machine and the engine at one moment; None where it is unknown. `waiting` and `running` are
    the engine's requests.
    """

    memory_mb: float | None = None
    disk_mb: float | None = None
    cpu: float | None = None
    running: int = 0
    waiting: int = 0
    serving: bool = True  # whether an engine answers and is not paused; otherwise its queue means nothing
    gated: bool = False  # sessions begin by what the engine's cache holds, which knows better than its queue


@frozen(kw_only=True)
class Standing:
    """Where the sessions are: `at_work` have begun and are not over, `running` of them are in RUN."""

    at_work: int
    running: int


@frozen(kw_only=True)
class State:
    """The limits now, why a stage is throttled, and what the next step needs."""

    init: int
    run: int
    post: int
    memory_short: bool = False
    init_held: str | None = None
    run_held: str | None = None
    post_held: str | None = None
    queue: float = 0.0
    settling: int = 0
    post_in: int = 0

    @property
    def short(self) -> bool:
        """Whether memory or disk is short."""
        return self.init_held is not None


def begin(bounds: Bounds) -> State:
    """The state before the first reading: the config's limits."""
    return State(init=bounds.init, run=bounds.run, post=bounds.post)


def decide(state: State, readings: Readings, standing: Standing, bounds: Bounds) -> State:
    """The state a second later."""
    return _post(_run(_init(state, readings, standing, bounds), readings, standing, bounds), readings, bounds)


def _init(state: State, readings: Readings, standing: Standing, bounds: Bounds) -> State:
    needed = RELIEF if state.short else 1.0
    memory = _short("memory", readings.memory_mb, bounds.memory_mb, needed)
    held = memory or _short("disk", readings.disk_mb, bounds.disk_mb, needed)
    state = evolve(state, memory_short=memory is not None, init_held=held)
    if held is None:
        return evolve(state, init=bounds.init)
    return evolve(state, init=0 if standing.at_work else 1)


def _short(what: str, free: float | None, reserve: int, needed: float) -> str | None:
    if free is None or free >= reserve * needed:
        return None
    return f"{what}: {free:.0f} MiB left of the {reserve} kept free"


def _run(state: State, readings: Readings, standing: Standing, bounds: Bounds) -> State:
    if readings.gated:
        return evolve(state, run=bounds.run, run_held=None, queue=0.0, settling=0)
    if not readings.serving:
        return state
    share = readings.waiting / max(1, readings.running) if readings.waiting >= FEW else 0.0
    queue = (1 - QUEUE_MEAN) * state.queue + QUEUE_MEAN * share
    state = evolve(state, queue=queue, settling=max(0, state.settling - 1))
    if queue > LONG_QUEUE and not state.settling:
        run = max(1, bounds.run // RUN_PART, min(state.run, int(SHRINK * min(state.run, standing.running))))
        return _run_at(evolve(state, settling=SETTLE), run, readings, bounds)
    if queue < SHORT_QUEUE and state.run < bounds.run:
        return _run_at(state, state.run + 1, readings, bounds)
    return state


def _run_at(state: State, run: int, readings: Readings, bounds: Bounds) -> State:
    if run >= bounds.run:
        return evolve(state, run=bounds.run, run_held=None)
    waits = f"engine: {readings.waiting} requests wait while {readings.running} are served"
    return evolve(
        state,
        run=run,
        run_held=waits if run < state.run else "engine: its queue is short again, one more a second",
    )


def _post(state: State, readings: Readings, bounds: Bounds) -> State:
    if state.post_in > 0:
        return evolve(state, post_in=state.post_in - 1)
    cpu = readings.cpu if readings.cpu is not None else 0.0
    if cpu > BUSY:
        post = max(1, bounds.post // POST_PART, state.post - 1)
    elif cpu < FREE:
        post = min(bounds.post, state.post + 1)
    else:
        return state
    held = f"cpu: some program waited for it {cpu:.0f} % of the time" if post < bounds.post else None
    return evolve(state, post=post, post_held=held, post_in=POST_EVERY - 1)
