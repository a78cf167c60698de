"""The node's metrics in Prometheus text format: one metric family for each number.

Nothing here runs on the event loop: `render_metrics` takes immutable values and is called in a thread. A
published name keeps its meaning, and every label has a small fixed set of values; sessions, tasks and models
are not labels.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from attrs import field, frozen
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from polarnode.api.callbacks import CallbackStatistics
from polarnode.containers.pool import RuntimesStatistics
from polarnode.core.weights import AdaptersState, WeightsState
from polarnode.engine.routing import EngineStatistics, HostStatistics
from polarnode.support.concurrency import SemaphoreStatistics
from polarnode.support.metrics import (
    DURATION_BOUNDS_S,
    WAIT_BOUNDS_S,
    DurationHistogram,
    LagStatistics,
    NodeCounters,
)

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_TURN_LABELS: Final = ("provider", "kind", "reason", "role", "state")


@frozen(kw_only=True)
class Figures:
    """The state of a node at one moment. `pass_s` is how long one round of the event loop took just then;
    `lag` is how late the loop was within the last minute.
    """

    tally: NodeCounters
    engine: EngineStatistics
    stages: Mapping[str, SemaphoreStatistics]
    live: int
    journal_bytes: int
    journal_backlog: int
    captures: int = 0
    callbacks: CallbackStatistics = field(factory=CallbackStatistics)
    pass_s: float = 0.0
    lag: LagStatistics = field(factory=LagStatistics)
    runtimes: RuntimesStatistics | None = None
    weights: WeightsState | None = None
    adapters: AdaptersState | None = None
    queued: int = 0  # places in the log that are not over
    log_position: int = 0
    log_unacknowledged_bytes: int = 0
    log_away: bool = False


def render_metrics(figures: Figures) -> bytes:
    """The text of GET /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(figures))
    return generate_latest(registry)


@frozen(eq=False)
class _MetricsCollector(Collector):
    figures: Figures

    def collect(self) -> Iterable[Metric]:
        yield from _turn_metrics(self.figures.tally)
        yield from _session_metrics(self.figures.tally)
        yield from _engine_metrics(self.figures.engine)
        yield from _of_node(self.figures)
        yield from _callback_metrics(self.figures.callbacks)
        if self.figures.weights is not None:
            yield from _weights_metrics(self.figures.weights)
        if self.figures.adapters is not None:
            yield from _adapter_metrics(self.figures.adapters)
        if self.figures.runtimes is not None:
            yield from _runtime_metrics(self.figures.runtimes)


def _turn_metrics(tally: NodeCounters) -> Iterator[Metric]:
    turns = CounterMetricFamily("polarnode_turns", "Recorded model calls.", labels=_TURN_LABELS)
    for labels, count in tally.turns.items():
        turns.add_metric(labels, count)
    yield turns
    yield _labelled_counter("polarnode_sampled_tokens", "Tokens sampled.", "role", tally.sampled_tokens)
    yield _labelled_counter(
        "polarnode_prompt_tokens",
        "Tokens of prompts: reused from the turn extended, or new.",
        "source",
        tally.prompt_tokens,
    )
    yield _labelled_counter(
        "polarnode_turn_notes",
        "Notes of turns: edits kept, ambiguities, rewrites and so on.",
        "word",
        tally.notes,
    )
    yield _plain_counter(
        "polarnode_malformed_calls",
        "Tool calls that were sampled and could not be read.",
        tally.malformed_calls,
    )
    yield _labelled_counter(
        "polarnode_refusals", "Model calls that were refused, by the kind of fault.", "kind", tally.refusals
    )
    yield HistogramMetricFamily(
        "polarnode_sample_wait_seconds",
        "Seconds until the engine took a sample.",
        buckets=_histogram_buckets(WAIT_BOUNDS_S, tally.waits),
        sum_value=tally.waited_s,
    )
    yield _duration_histogram("polarnode_turn_seconds", "Seconds of a model call.", tally.turn_s)
    yield _duration_histogram(
        "polarnode_first_token_seconds",
        "Seconds of a model call until its first token.",
        tally.first_token_s,
    )


def _duration_histogram(name: str, text: str, found: DurationHistogram) -> Metric:
    buckets = _histogram_buckets(DURATION_BOUNDS_S, found.counts)
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.total)


def _histogram_buckets(bounds: Sequence[float], counts: Mapping[int, int]) -> list[tuple[str, float]]:
    """Upper bounds, each with the number of values up to it."""
    upto = accumulate(counts.get(place, 0) for place in range(len(bounds) + 1))
    return list(zip((*map(str, bounds), "+Inf"), upto, strict=True))


def _session_metrics(tally: NodeCounters) -> Iterator[Metric]:
    yield _labelled_counter("polarnode_sessions", "Sessions that ended.", "status", tally.sessions)
    yield _labelled_counter(
        "polarnode_retried_sessions",
        "Sessions replaced by another attempt, by whose fault.",
        "boundary",
        tally.replaced,
    )
    yield _duration_histogram(
        "polarnode_session_seconds",
        "Seconds of a session, without its wait for a run slot.",
        tally.session_s,
    )
    yield _duration_histogram(
        "polarnode_session_ready_seconds", "Seconds a session waited for a run slot.", tally.ready_s
    )
    yield _plain_counter("polarnode_rows", "Training rows published.", tally.traces)
    yield _plain_counter("polarnode_trainable_tokens", "Published tokens with loss.", tally.trainable_tokens)
    yield _labelled_counter(
        "polarnode_left_out_turns", "Turns that no row trains.", "reason", tally.left_out_turns
    )
    yield _labelled_counter(
        "polarnode_left_out_tokens", "Sampled tokens that no row trains.", "reason", tally.left_out_tokens
    )
    yield _labelled_counter("polarnode_groups", "Groups that are over.", "state", tally.groups)
    yield _plain_counter(
        "polarnode_early_stopped_sessions",
        "Sessions ended, or not begun, because their group had enough.",
        tally.stopped_early,
    )
    yield _labelled_counter(
        "polarnode_stale_sessions",
        "Sessions staler than their task allows, by what the task does with them.",
        "action",
        tally.stale,
    )
    yield _plain_counter("polarnode_snapshots", "Snapshots taken of sessions.", tally.snapshots)
    yield _plain_counter(
        "polarnode_snapshot_bytes", "Bytes of content in snapshots taken.", tally.snapshot_bytes
    )
    yield _plain_counter(
        "polarnode_snapshot_seconds", "Seconds calls were held for snapshots.", tally.snapshot_s
    )


def _engine_metrics(engine: EngineStatistics) -> Iterator[Metric]:
    yield _host_gauge(
        "polarnode_engine_ready",
        "1 where the engine host answers.",
        engine,
        lambda host: float(host.state == "ready"),
    )
    yield _host_gauge(
        "polarnode_engine_in_flight",
        "Calls under way on the engine host.",
        engine,
        lambda host: host.in_flight,
    )
    yield _host_gauge(
        "polarnode_engine_running",
        "Requests that the engine is generating.",
        engine,
        lambda host: host.running,
    )
    yield _host_gauge(
        "polarnode_engine_waiting", "Requests in the engine's queue.", engine, lambda host: host.waiting
    )
    yield _host_gauge(
        "polarnode_engine_queued",
        "Calls that wait in the node for their session's turn.",
        engine,
        lambda host: host.queued,
    )
    yield _host_gauge(
        "polarnode_engine_token_usage",
        "Share of the engine's KV cache in use.",
        engine,
        lambda host: host.token_usage,
    )
    yield from _residency_metrics(engine)
    yield from _draft_metrics(engine)
    restarts = CounterMetricFamily(
        "polarnode_engine_restarts", "Times the engine host was started again.", labels=["host"]
    )
    for host in engine.hosts:
        restarts.add_metric([str(host.index)], host.restarts)
    yield restarts
    yield GaugeMetricFamily(
        "polarnode_engine_paused", "1 while generation is paused.", float(engine.paused is not None)
    )


def _draft_metrics(engine: EngineStatistics) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "polarnode_engine_draft_tokens",
        "Tokens that the engine drafted, and those of them that it accepted.",
        labels=["host", "kind"],
    )
    steps = CounterMetricFamily(
        "polarnode_engine_verify_steps", "Steps in which the engine verified drafts.", labels=["host"]
    )
    for host in engine.hosts:
        tokens.add_metric([str(host.index), "drafted"], host.drafted)
        tokens.add_metric([str(host.index), "accepted"], host.accepted)
        steps.add_metric([str(host.index)], host.verified)
    yield from (tokens, steps)


def _residency_metrics(engine: EngineStatistics) -> Iterator[Metric]:
    sessions = GaugeMetricFamily(
        "polarnode_engine_sessions",
        "Sessions whose tokens are counted against the engine's cache.",
        labels=["host", "state"],
    )
    tokens = GaugeMetricFamily(
        "polarnode_engine_session_tokens",
        "Tokens of resident sessions, and the budget for them.",
        labels=["host", "kind"],
    )
    held = GaugeMetricFamily(
        "polarnode_engine_held_calls", "Calls held for their session's place.", labels=["host"]
    )
    prompts = CounterMetricFamily(
        "polarnode_engine_prompt_tokens", "Prompt tokens that the engine was given.", labels=["host"]
    )
    again = CounterMetricFamily(
        "polarnode_engine_reread_tokens",
        "Prompt tokens that had been in the cache before, by whether the node decided so.",
        labels=["host", "decided"],
    )
    for host in engine.hosts:
        if (found := host.residency) is not None:
            index = str(host.index)
            for state in ("busy", "idle", "displaced"):
                sessions.add_metric([index, state], getattr(found, state))
            tokens.add_metric([index, "resident"], found.tokens)
            tokens.add_metric([index, "budget"], found.budget)
            held.add_metric([index], found.held)
            prompts.add_metric([index], found.prompt_tokens)
            again.add_metric([index, "yes"], found.reread_planned)
            again.add_metric([index, "no"], found.reread_unplanned)
    yield from (sessions, tokens, held, prompts, again)


def _weights_metrics(weights: WeightsState) -> Iterator[Metric]:
    updates = CounterMetricFamily("polarnode_weight_updates", "Updates of the weights.", labels=["outcome"])
    updates.add_metric(["served"], weights.updates)
    updates.add_metric(["failed"], weights.failures)
    yield updates
    yield GaugeMetricFamily(
        "polarnode_weight_update_seconds", "Duration of the last update.", weights.last_seconds or 0.0
    )


def _adapter_metrics(state: AdaptersState) -> Iterator[Metric]:
    adapters = GaugeMetricFamily("polarnode_adapters", "Adapters, by where they are.", labels=["place"])
    found = Counter(
        "engine" if each.loaded else "disk" if each.warning is None else "lost" for each in state.adapters
    )
    for place in ("engine", "disk", "lost"):
        adapters.add_metric([place], found[place])
    yield adapters
    yield _plain_counter("polarnode_adapter_updates", "Updates of adapters.", state.updates)


def _of_node(figures: Figures) -> Iterator[Metric]:
    stages = GaugeMetricFamily(
        "polarnode_stage_sessions", "Sessions in a stage, and waiting before it.", labels=["stage", "place"]
    )
    limits = GaugeMetricFamily("polarnode_stage_limit", "The limit of a stage now.", labels=["stage"])
    held = GaugeMetricFamily(
        "polarnode_stage_held_back", "1 while a stage takes fewer than its config allows.", labels=["stage"]
    )
    for name, gate in figures.stages.items():
        stages.add_metric([name, "inside"], gate.inside)
        stages.add_metric([name, "waiting"], gate.waiting)
        limits.add_metric([name], gate.limit)
        held.add_metric([name], float(gate.held_back is not None))
    yield from (stages, limits, held)
    yield GaugeMetricFamily("polarnode_live_sessions", "Sessions that are not over.", figures.live)
    yield GaugeMetricFamily(
        "polarnode_open_captures",
        "Open captures: sessions whose harness the caller runs.",
        figures.captures,
    )
    yield GaugeMetricFamily("polarnode_journal_bytes", "Bytes the journal holds.", figures.journal_bytes)
    yield GaugeMetricFamily(
        "polarnode_journal_backlog_bytes",
        "Bytes not yet written to the journal's disk.",
        figures.journal_backlog,
    )
    yield GaugeMetricFamily(
        "polarnode_open_places", "Places of tasks in the log that are not over.", figures.queued
    )
    yield GaugeMetricFamily(
        "polarnode_log_position", "The number of the log's last event.", figures.log_position
    )
    yield GaugeMetricFamily(
        "polarnode_log_unacknowledged_bytes",
        "Bytes of events that some consumer has not acknowledged.",
        figures.log_unacknowledged_bytes,
    )
    yield GaugeMetricFamily("polarnode_log_away", "1 while the log does not answer.", float(figures.log_away))
    yield GaugeMetricFamily(
        "polarnode_event_loop_pass_seconds",
        "How long the event loop took for one round at this scrape.",
        figures.pass_s,
    )
    late = GaugeMetricFamily(
        "polarnode_event_loop_lag_seconds",
        "How late the event loop was within the last minute.",
        labels=["quantile"],
    )
    for quantile, seconds in (("0.5", figures.lag.p50), ("0.99", figures.lag.p99), ("1", figures.lag.max)):
        late.add_metric([quantile], seconds)
    yield late


def _callback_metrics(callbacks: CallbackStatistics) -> Iterator[Metric]:
    yield _plain_counter(
        "polarnode_callbacks_taken", "Events that callback receivers accepted.", callbacks.taken
    )
    yield _plain_counter(
        "polarnode_callbacks_failed",
        "Failed attempts to send a callback; each is repeated.",
        callbacks.failed,
    )
    yield _plain_counter(
        "polarnode_callbacks_expired",
        "Events pruned by the journal's retention before their callback was accepted.",
        callbacks.expired,
    )
    yield GaugeMetricFamily(
        "polarnode_callbacks_owed", "Events whose callbacks are pending.", callbacks.pending
    )
    yield GaugeMetricFamily(
        "polarnode_callbacks_under_way", "Callbacks that are being sent.", callbacks.under_way
    )


def _runtime_metrics(runtimes: RuntimesStatistics) -> Iterator[Metric]:
    yield _plain_counter("polarnode_runtimes_started", "Containers started.", runtimes.started)
    yield _plain_counter(
        "polarnode_runtimes_served_warm",
        "Containers that were ready when a session needed them.",
        runtimes.served_warm,
    )
    yield _plain_counter(
        "polarnode_runtimes_reused", "Containers started from a prepared workspace.", runtimes.reused
    )
    yield _plain_counter("polarnode_runtimes_failed", "Containers that did not start.", runtimes.failed)
    yield GaugeMetricFamily("polarnode_runtimes_live", "Containers with sessions.", runtimes.live)
    yield GaugeMetricFamily(
        "polarnode_runtimes_frozen", "Containers whose programs are stopped now.", runtimes.frozen
    )
    yield GaugeMetricFamily("polarnode_runtimes_warm", "Containers that are ready now.", runtimes.warm)
    yield GaugeMetricFamily(
        "polarnode_runtimes_prepared", "Prepared workspaces kept as images.", runtimes.prepared
    )


def _labelled_counter(name: str, documentation: str, label: str, counts: "Counter[str]") -> Metric:
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _plain_counter(name: str, documentation: str, count: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=count)


def _host_gauge(
    name: str, documentation: str, engine: EngineStatistics, of: Callable[[HostStatistics], float]
) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=["host"])
    for host in engine.hosts:
        family.add_metric([str(host.index)], of(host))
    return family
