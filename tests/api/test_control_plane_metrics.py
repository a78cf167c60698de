"""GET /metrics: what Prometheus's own parser reads from it, behind the token as every other route."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from attrs import evolve
from control_plane_parts import Caller, open_plane
from journal_samples import make_trajectory, make_turn
from prometheus_client.parser import text_string_to_metric_families

from polarnode.api.metrics import CONTENT_TYPE, Figures, render_metrics
from polarnode.containers.pool import RuntimesStatistics
from polarnode.engine.residency import ResidencyStatistics
from polarnode.engine.routing import EngineStatistics, HostStatistics
from polarnode.support.concurrency import SemaphoreStatistics
from polarnode.support.metrics import LagStatistics, NodeCounters

ROOT = Path(__file__).parents[2]

HOST = HostStatistics(
    index=0,
    state="ready",
    pid=1,
    gpus=(0,),
    in_flight=3,
    running=2,
    waiting=1,
    token_usage=0.25,
    restarts=4,
    weight_version="7",
    last_error=None,
    drafted=110,
    accepted=12,
    verified=10,
    residency=ResidencyStatistics(
        capacity=1000,
        budget=930,
        margin=0.8,
        lends=False,
        tokens=700,
        busy=3,
        idle=2,
        displaced=1,
        held=1,
        oldest_held_s=4.0,
        prompt_tokens=5000,
        reread_planned=40,
        reread_unplanned=30,
    ),
)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Every sample by name and labels, each of which stands there once."""
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_labels = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(by_labels) == len(found)
    return by_labels


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def figures(tally: NodeCounters) -> Figures:
    hosts = (HOST, evolve(HOST, index=1, state="dead"))
    engine = EngineStatistics(
        hosts=hosts, vocab_size=10, context_length=10, weight_version="7", paused="for weights"
    )
    stages = {
        "run": SemaphoreStatistics(limit=8, inside=5, waiting=2),
        "init": SemaphoreStatistics(limit=0, inside=0, waiting=1, held_back="memory"),
    }
    runtimes = RuntimesStatistics(
        live=4,
        warm=3,
        started=9,
        served_warm=6,
        failed=1,
        swept=0,
        service_restarts=0,
        prepared=2,
        copied=2,
        reused=5,
    )
    return Figures(
        tally=tally,
        engine=engine,
        stages=stages,
        live=7,
        journal_bytes=100,
        journal_backlog=9,
        pass_s=0.5,
        runtimes=runtimes,
    )


def test_admission_and_start_metrics() -> None:
    found = samples(render_metrics(figures(NodeCounters())).decode())
    assert [value(found, "polarnode_stage_held_back", stage=stage) for stage in ("run", "init")] == [0, 1]
    names = ("started_total", "served_warm_total", "reused_total", "failed_total", "live", "warm", "prepared")
    assert [value(found, f"polarnode_runtimes_{name}") for name in names] == [9, 6, 5, 1, 4, 3, 2]


def test_event_loop_lag_is_measured() -> None:
    found = samples(
        render_metrics(
            evolve(figures(NodeCounters()), lag=LagStatistics(p50=0.001, p99=0.04, max=0.2))
        ).decode()
    )
    assert [
        value(found, "polarnode_event_loop_lag_seconds", quantile=quantile)
        for quantile in ("0.5", "0.99", "1")
    ] == [0.001, 0.04, 0.2]


def busy() -> NodeCounters:
    tally = NodeCounters()
    turn = evolve(make_turn("s"), reason="first")
    for number in range(3):
        tally.turn(evolve(turn, index=number, notes=("edited: something",)))
    tally.published(make_trajectory("s"))
    tally.malformed_calls = 2
    tally.refusals = Counter(budget_spent=2)
    for seconds in (0.0, 0.05, 0.1, 2.0, 1000.0):
        tally.waited(seconds)
    return tally


def test_every_number_has_its_labels() -> None:
    found = samples(render_metrics(figures(busy())).decode())
    assert (
        value(
            found,
            "polarnode_turns_total",
            provider="anthropic",
            kind="root",
            reason="first",
            role="main",
            state="complete",
        )
        == 3
    )
    assert value(found, "polarnode_sampled_tokens_total", role="main") == 9
    assert value(found, "polarnode_prompt_tokens_total", source="new") == 12
    assert value(found, "polarnode_turn_notes_total", word="edited") == 3
    assert value(found, "polarnode_malformed_calls_total") == 2
    assert value(found, "polarnode_refusals_total", kind="budget_spent") == 2
    upto = [value(found, "polarnode_sample_wait_seconds_bucket", le=le) for le in ("0.01", "0.1", "5.0")]
    assert upto == [1, 3, 4]
    assert value(found, "polarnode_sample_wait_seconds_bucket", le="+Inf") == 5
    assert value(found, "polarnode_sample_wait_seconds_sum") == 1002.15
    upto = [value(found, "polarnode_turn_seconds_bucket", le=le) for le in ("0.1", "+Inf")]
    assert upto == [3, 3]
    assert value(found, "polarnode_session_seconds_bucket", le="+Inf") == 1
    assert value(found, "polarnode_session_ready_seconds_sum") == 0
    assert value(found, "polarnode_first_token_seconds_bucket", le="+Inf") == 0
    assert value(found, "polarnode_engine_queued", host="0") == 0
    assert value(found, "polarnode_sessions_total", status="completed") == 1
    assert value(found, "polarnode_rows_total") == 1
    assert value(found, "polarnode_trainable_tokens_total") == 3
    assert value(found, "polarnode_engine_ready", host="0") == 1
    assert value(found, "polarnode_engine_ready", host="1") == 0
    assert value(found, "polarnode_engine_token_usage", host="0") == 0.25
    assert value(found, "polarnode_engine_sessions", host="0", state="displaced") == 1
    assert value(found, "polarnode_engine_session_tokens", host="0", kind="budget") == 930
    assert value(found, "polarnode_engine_held_calls", host="0") == 1
    assert value(found, "polarnode_engine_prompt_tokens_total", host="0") == 5000
    assert value(found, "polarnode_engine_reread_tokens_total", host="0", decided="no") == 30
    assert value(found, "polarnode_engine_draft_tokens_total", host="0", kind="drafted") == 110
    assert value(found, "polarnode_engine_draft_tokens_total", host="0", kind="accepted") == 12
    assert value(found, "polarnode_engine_verify_steps_total", host="0") == 10
    assert value(found, "polarnode_engine_restarts_total", host="0") == 4
    assert value(found, "polarnode_engine_paused") == 1
    assert value(found, "polarnode_stage_sessions", stage="run", place="waiting") == 2
    assert value(found, "polarnode_live_sessions") == 7
    assert value(found, "polarnode_event_loop_pass_seconds") == 0.5


def test_idle_node_has_all_families() -> None:
    names = {
        family.name
        for family in text_string_to_metric_families(render_metrics(figures(NodeCounters())).decode())
    }
    assert {
        "polarnode_turns",
        "polarnode_sessions",
        "polarnode_left_out_turns",
        "polarnode_malformed_calls",
    } <= names


async def test_metrics_need_token_and_accumulate(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        client = Caller(url=plane.url)
        refused = await client.call("GET", "/metrics", headers={"Authorization": ""})
        assert refused.status == 401
        first = await client.get("/metrics")
        assert (first.status, first.headers["content-type"]) == (200, CONTENT_TYPE)
        assert ("polarnode_sessions_total", frozenset({("status", "completed")})) not in samples(first.text)
        plane.service.tally.published(make_trajectory("s"))
        assert (
            value(
                samples((await client.get("/metrics")).text), "polarnode_sessions_total", status="completed"
            )
            == 1
        )
        strange = await client.get("/metrics", name="polarnode_turns")
        assert strange.status == 400


@pytest.mark.parametrize("hostile", ['a"b', "a\nb", "a\\b"])
def test_label_cannot_break_text_format(hostile: str) -> None:
    tally = NodeCounters()
    tally.refusals[hostile] = 1
    assert (
        value(samples(render_metrics(figures(tally)).decode()), "polarnode_refusals_total", kind=hostile) == 1
    )


def test_dashboard_uses_existing_metrics() -> None:
    board = json.loads((ROOT / "tools" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"polarnode_\w+", target["expr"])
    }
    served = {name for name, _ in samples(render_metrics(figures(busy())).decode())}
    assert len(asked) > 15
    documented = (
        ROOT / "docs" / "api.md"
    ).read_text()  # of what these figures lack: updates of weights, lost sessions
    assert {name for name in asked - served if f"`{name.removesuffix('_bucket')}`" not in documented} == set()
