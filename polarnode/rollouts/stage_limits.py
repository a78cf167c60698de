"""Decides how many sessions may be in each stage, from readings of the machine and the engine.

Pure: one step a second, no clock.

INIT stops when memory or disk is short, because a session needs both until it is over. RUN follows the queue
of an engine whose cache nobody counts: it shrinks by a fraction when the queue is long and grows by one when
it is short, as TCP does, because the number of agents that an engine can serve is unknown in advance, and
more agents do not raise throughput. POST shrinks when programs wait for the CPU. Invariant: nothing stops for
ever. When no session is at work, one begins even if memory or disk is short, because waiting would free
nothing.
"""

from attrs import evolve, frozen

# The multiple of a reserve that must be free before INIT resumes. Ending sessions free it in pieces, and each
# piece would start one session and then stop INIT again.
RESUME_FACTOR = 1.1

# The weight of each second's queue in the mean. Agents call in bursts, and a burst is over in a few seconds.
QUEUE_WEIGHT = 0.2
# The ratio of waiting to running requests. A queue of half the engine's batch is more than keeps it full.
LONG_QUEUE_RATIO = 0.5
SHORT_QUEUE_RATIO = 0.1  # below it the engine may soon have nothing to do
FEW = 4  # fewer waiting requests are no queue, however few run
SHRINK = 0.8  # the share of the running harnesses that remains when the queue is long
SETTLE = 15  # seconds until RUN may shrink again; running harnesses go on, and end a turn or two meanwhile
# RUN keeps at least this fraction (1/8) of its limit. Fewer sessions fill the engine's batch only where each
# asks for a thousand tokens.
MIN_RUN_DIVISOR = 8

# The percentages of time in which some program waited for the CPU. Above BUSY an evaluation slows the others,
# and below FREE there is room for one more.
BUSY, FREE = 80.0, 50.0
POST_STEP_S = 5  # seconds between steps of POST; the kernel's mean is over ten
# POST keeps at least this fraction (1/4) of its limit, because evaluations also wait for containers and
# judges.
MIN_POST_DIVISOR = 4


@frozen(kw_only=True)
class StageBounds:
    """Limits from the node's config: the largest limit of each stage, and the MiB kept free."""

    init: int
    run: int
    post: int
    memory_mb: int
    disk_mb: int


@frozen(kw_only=True)
class LoadReadings:
    """The state of the machine and the engine at one moment; None where it is unknown. `waiting` and
    `running` count the engine's requests.
    """

    memory_mb: float | None = None
    disk_mb: float | None = None
    cpu: float | None = None
    running: int = 0
    waiting: int = 0
    serving: bool = True  # whether an engine answers and is not paused; otherwise its queue means nothing
    gated: bool = False  # whether the engine's cache decides which sessions begin, and not its queue


@frozen(kw_only=True)
class SessionCounts:
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


def begin(bounds: StageBounds) -> State:
    """The state before the first reading: the config's limits."""
    return State(init=bounds.init, run=bounds.run, post=bounds.post)


def decide(state: State, readings: LoadReadings, standing: SessionCounts, bounds: StageBounds) -> State:
    """The state a second later."""
    return _post(_run(_init(state, readings, standing, bounds), readings, standing, bounds), readings, bounds)


def _init(state: State, readings: LoadReadings, standing: SessionCounts, bounds: StageBounds) -> State:
    needed = RESUME_FACTOR if state.short else 1.0
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


def _run(state: State, readings: LoadReadings, standing: SessionCounts, bounds: StageBounds) -> State:
    if readings.gated:
        return evolve(state, run=bounds.run, run_held=None, queue=0.0, settling=0)
    if not readings.serving:
        return state
    share = readings.waiting / max(1, readings.running) if readings.waiting >= FEW else 0.0
    queue = (1 - QUEUE_WEIGHT) * state.queue + QUEUE_WEIGHT * share
    state = evolve(state, queue=queue, settling=max(0, state.settling - 1))
    if queue > LONG_QUEUE_RATIO and not state.settling:
        run = max(
            1, bounds.run // MIN_RUN_DIVISOR, min(state.run, int(SHRINK * min(state.run, standing.running)))
        )
        return _set_run_limit(evolve(state, settling=SETTLE), run, readings, bounds)
    if queue < SHORT_QUEUE_RATIO and state.run < bounds.run:
        return _set_run_limit(state, state.run + 1, readings, bounds)
    return state


def _set_run_limit(state: State, run: int, readings: LoadReadings, bounds: StageBounds) -> State:
    if run >= bounds.run:
        return evolve(state, run=bounds.run, run_held=None)
    waits = f"engine: {readings.waiting} requests wait while {readings.running} are served"
    return evolve(
        state,
        run=run,
        run_held=waits if run < state.run else "engine: its queue is short again, one more a second",
    )


def _post(state: State, readings: LoadReadings, bounds: StageBounds) -> State:
    if state.post_in > 0:
        return evolve(state, post_in=state.post_in - 1)
    cpu = readings.cpu if readings.cpu is not None else 0.0
    if cpu > BUSY:
        post = max(1, bounds.post // MIN_POST_DIVISOR, state.post - 1)
    elif cpu < FREE:
        post = min(bounds.post, state.post + 1)
    else:
        return state
    held = f"cpu: some program waited for it {cpu:.0f} % of the time" if post < bounds.post else None
    return evolve(state, post=post, post_held=held, post_in=POST_STEP_S - 1)
