"""The node's numbers as Prometheus reads them: one family a number, counters from the tally, gauges from what the node says of itself.

The rules for whoever edits it. Nothing here runs on the event loop: it is given values and called in a thread. A name, once served, keeps its
meaning; every label has a small fixed set of values. Sessions, tasks and models are no labels.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from attrs import frozen
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from polarnode.shell.engine.statistics import EngineStatistics, HostStatistics
from polarnode.shell.gates import GateStatistics
from polarnode.shell.tally import Tally

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_TURN: Final = ("provider", "kind", "reason", "role", "state")


@frozen(kw_only=True)
class Figures:
    """A node at one moment. `pass_s` is how long its event loop took for a round just then."""

    tally: Tally
    engine: EngineStatistics
    stages: Mapping[str, GateStatistics]
    live: int
    journal_bytes: int
    journal_backlog: int
    pass_s: float = 0.0


def exposition(figures: Figures) -> bytes:
    """The text of GET /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(figures))
    return generate_latest(registry)


@frozen(eq=False)
class _Once(Collector):
    figures: Figures

    def collect(self) -> Iterable[Metric]:
        yield from _of_turns(self.figures.tally)
        yield from _of_sessions(self.figures.tally)
        yield from _of_engine(self.figures.engine)
        yield from _of_node(self.figures)


def _of_turns(tally: Tally) -> Iterator[Metric]:
    turns = CounterMetricFamily("polarnode_turns", "Model calls that were recorded.", labels=_TURN)
    for labels, count in tally.turns.items():
        turns.add_metric(labels, count)
    yield turns
    yield _counter("polarnode_sampled_tokens", "Tokens sampled.", "role", tally.sampled_tokens)
    yield _counter("polarnode_prompt_tokens", "Tokens of prompts: reused from the turn extended, or new.", "source", tally.prompt_tokens)
    yield _counter("polarnode_turn_notes", "What turns' notes say: edits kept, ambiguities, rewrites and so on.", "word", tally.notes)
    yield _single("polarnode_malformed_calls", "Tool calls that were sampled and could not be read.", tally.malformed_calls)
    yield _counter("polarnode_refusals", "Model calls that were refused, by the kind of fault.", "kind", tally.refusals)


def _of_sessions(tally: Tally) -> Iterator[Metric]:
    yield _counter("polarnode_sessions", "Sessions that ended.", "status", tally.sessions)
    yield _single("polarnode_rows", "Training rows published.", tally.traces)
    yield _single("polarnode_trainable_tokens", "Tokens published with loss.", tally.trainable_tokens)
    yield _counter("polarnode_left_out_turns", "Turns that no row trains.", "reason", tally.left_out_turns)
    yield _counter("polarnode_left_out_tokens", "Sampled tokens that no row trains.", "reason", tally.left_out_tokens)


def _of_engine(engine: EngineStatistics) -> Iterator[Metric]:
    yield _by_host("polarnode_engine_ready", "1 where the engine host answers.", engine, lambda host: float(host.state == "ready"))
    yield _by_host("polarnode_engine_in_flight", "Calls under way on the engine host.", engine, lambda host: host.in_flight)
    yield _by_host("polarnode_engine_running", "Requests the engine is generating for.", engine, lambda host: host.running)
    yield _by_host("polarnode_engine_waiting", "Requests in the engine's queue.", engine, lambda host: host.waiting)
    yield _by_host("polarnode_engine_token_usage", "Share of the engine's KV cache in use.", engine, lambda host: host.token_usage)
    restarts = CounterMetricFamily("polarnode_engine_restarts", "Times the engine host was started again.", labels=["host"])
    for host in engine.hosts:
        restarts.add_metric([str(host.index)], host.restarts)
    yield restarts
    yield GaugeMetricFamily("polarnode_engine_paused", "1 while generation is paused.", float(engine.paused is not None))


def _of_node(figures: Figures) -> Iterator[Metric]:
    stages = GaugeMetricFamily("polarnode_stage_sessions", "Sessions in a stage, and waiting before it.", labels=["stage", "place"])
    limits = GaugeMetricFamily("polarnode_stage_limit", "The most sessions a stage takes.", labels=["stage"])
    for name, gate in figures.stages.items():
        stages.add_metric([name, "inside"], gate.inside)
        stages.add_metric([name, "waiting"], gate.waiting)
        limits.add_metric([name], gate.limit)
    yield from (stages, limits)
    yield GaugeMetricFamily("polarnode_live_sessions", "Sessions that are not over.", figures.live)
    yield GaugeMetricFamily("polarnode_journal_bytes", "Bytes the journal holds.", figures.journal_bytes)
    yield GaugeMetricFamily("polarnode_journal_backlog_bytes", "Bytes that wait for the journal's disk.", figures.journal_backlog)
    yield GaugeMetricFamily("polarnode_event_loop_pass_seconds", "How long the event loop took for one round at this scrape.", figures.pass_s)


def _counter(name: str, says: str, label: str, counts: "Counter[str]") -> Metric:
    family = CounterMetricFamily(name, says, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _single(name: str, says: str, count: int) -> Metric:
    return CounterMetricFamily(name, says, value=count)


def _by_host(name: str, says: str, engine: EngineStatistics, of: Callable[[HostStatistics], float]) -> Metric:
    family = GaugeMetricFamily(name, says, labels=["host"])
    for host in engine.hosts:
        family.add_metric([str(host.index)], of(host))
    return family
