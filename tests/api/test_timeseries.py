"""Samples of a node: rates between two of them, what is unknown, and the bound of what is kept."""

from collections import Counter
from pathlib import Path

import httpx
import pytest
from attrs import evolve

from polarnode.api.app import control_plane
from polarnode.api.metrics import Figures
from polarnode.api.timeseries import KEPT, History
from polarnode.engine.residency import ResidencyStatistics
from polarnode.engine.routing import EngineStatistics, HostStatistics
from polarnode.http.server import Address, open_server
from polarnode.support.metrics import NodeCounters

RESIDENCY = ResidencyStatistics(
    capacity=1, budget=1, margin=1.0, lends=False, tokens=0, busy=0, idle=0, displaced=0, held=0, oldest_held_s=0.0, prompt_tokens=0, reread_planned=0, reread_unplanned=0
)  # fmt: skip
HOST = HostStatistics(
    index=0, state="ready", pid=1, gpus=(), in_flight=0, running=3, waiting=2, token_usage=0.5, restarts=0, weight_version="1", last_error=None, queued=4, residency=RESIDENCY
)  # fmt: skip


def figures(tokens: int, prompt: int, reread: int) -> Figures:
    residency = evolve(RESIDENCY, prompt_tokens=prompt, reread_planned=reread)
    engine = EngineStatistics(
        hosts=(evolve(HOST, residency=residency),), vocab_size=1, context_length=1, weight_version="0", paused=None
    )  # fmt: skip
    tally = NodeCounters(sampled_tokens=Counter(main=tokens))
    return Figures(tally=tally, engine=engine, stages={}, live=7, journal_bytes=1, journal_backlog=0)


@pytest.fixture
def history() -> History:
    """Three samples: at 100 s, at 110 s, and at 115 s, after the counters began anew."""
    moments = iter([100.0, 110.0, 115.0])
    states = iter([figures(50, 0, 0), figures(250, 1000, 30), figures(10, 1000, 30)])
    found = History(figures=lambda: next(states), now=lambda: next(moments))
    for _ in range(3):
        found.look()
    return found


async def test_rates_since_previous_sample(history: History, tmp_path: Path) -> None:
    app = control_plane(tuple(history.rows()), token=None)
    async with open_server(app, Address(host="127.0.0.1", port=0)) as address, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{address.port}/v1/timeseries"
        found = (await client.get(url)).json()
        later = (await client.get(url, params={"since": "100"})).json()
        refused = await client.get(url, params={"since": "yesterday"})
    assert (found["every_s"], found["at"]) == (10.0, [100.0, 110.0, 115.0])
    values = found["values"]
    assert values["sampled_tokens_per_s"] == [None, 20.0, None]
    assert values["reread_share"] == [None, 0.03, None]
    assert (values["live"], values["calls_running"], values["calls_waiting"]) == ([7] * 3, [3] * 3, [6] * 3)
    assert values["token_usage"] == [0.5] * 3
    assert later["at"] == [110.0, 115.0]
    assert later["values"]["sampled_tokens_per_s"] == [20.0, None]
    assert (refused.status_code, refused.json()["error"]["path"]) == (400, "?since")


def test_samples_are_limited() -> None:
    found = History(figures=lambda: figures(0, 0, 0), now=lambda: 1.0)
    for _ in range(KEPT + 5):
        found.look()
    assert len(found._samples) == KEPT
