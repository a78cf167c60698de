"""Weights and adapters of nodes that share a log: simulated engines and real control planes on one PostgreSQL."""

import pickle
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import trio
from adapters_kit import write_adapter
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from journal_samples import make_trajectory
from log_kit import claim, submit
from postgres_kit import Cluster, running_cluster
from safetensors.numpy import load_file, save
from trainers_kit import make_turn
from weights_kit import MODEL, Plane, disk, open_weights_plane, simulated_tiny

from polarnode.api.weight_nodes import PASSED_BY, rank_offsets, split_payloads
from polarnode.engine import weights as weights_module
from polarnode.engine.adapter_store import AdapterStore
from polarnode.engine.settings import ExternalEngine
from polarnode.engine.weight_copies import Copies
from polarnode.engine.weight_values import Served, in_order
from polarnode.groups.group import updates_behind
from polarnode.journal.log.port import Log
from polarnode.journal.log.postgres.postgres import PostgresLog
from polarnode.node.config import TINY_MODEL

LABELS = {"model": MODEL}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as found:
        yield found


@pytest.fixture
def dsn(cluster: Cluster) -> str:
    return cluster.database()


def node(folder: Path, name: str, dsn: str, **more: Any) -> Any:
    """A node of a shared log, whose files are below `folder`."""
    own = folder / name
    own.mkdir(exist_ok=True)
    settings = simulated_tiny(own, lora_rank=more.pop("lora_rank", 0))
    return open_weights_plane(settings, own / "journal", dsn=dsn, name=name, **more)


@asynccontextmanager
async def nodes(folder: Path, dsn: str, *names: str, **more: Any) -> AsyncIterator[list[Plane]]:
    with trio.fail_after(120):
        async with AsyncExitStack() as stack:
            planes = [await stack.enter_async_context(node(folder, name, dsn, **more)) for name in names]
            for plane in planes:  # a node is there once it has said what it serves
                await plane.following.look()
            yield planes


async def until(holds: Callable[[], Any]) -> None:
    """Until something holds that is looked at again and again."""
    while not await holds():  # noqa: ASYNC110
        await trio.sleep(0.05)


async def serves(plane: Plane, version: str) -> bool:
    return plane.engines.versions[-1] == version


def new(version: str, path: Path = TINY_MODEL, **more: Any) -> dict[str, Any]:
    return {"version": version, "source": disk(path), **more}


def test_versions_are_put_in_order() -> None:
    assert in_order((), ("0",), after=None) == ("0",)
    assert in_order(("1", "2", "3"), ("0", "3"), after=None) == ("0", "1", "2", "3")
    assert in_order(("1", "2", "3", "4"), ("0", "4"), after="3") == ("1", "2", "3", "0", "4")


async def test_one_request_updates_all_nodes(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        answer = await second.node.post("/v1/weights", new("7"))
        assert (answer.status, answer.json()["stale"]) == (201, []), answer.text
        assert [each.engines.versions for each in (first, second)] == [("0", "7")] * 2
        again = await second.node.post("/v1/weights", new("7"))
        assert (again.status, again.json()["created"]) == (200, False)
        there = await first.node.post("/v1/weights", new("7"))
        assert (there.status, there.json()["created"]) == (200, False), there.text
        assert not (tmp_path / "a" / "weights").exists(), "the folder is the same one"
        assert [each["version"] for each in (await first.told())["history"]] == ["7"]


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make nodes see no trainer's folder, as if they were on other machines; by their own folders."""
    real = weights_module.folder_here
    unseeing: list[Path] = []

    def folder_here(served: Served, copies: Path) -> Path | None:
        if copies.parent in unseeing:
            served = evolve(served, source={**served.source, "path": "/nowhere"})
        return real(served, copies)

    monkeypatch.setattr(weights_module, "folder_here", folder_here)
    return unseeing.append


async def test_files_are_copied_from_holder(tmp_path: Path, dsn: str, blind: Callable[[Path], None]) -> None:
    """A folder that one machine has is copied, and the copy is found again after a restart."""
    blind(tmp_path / "b")
    own = copytree(TINY_MODEL, tmp_path / "step")
    async with nodes(tmp_path, dsn, "a") as (first,), nodes(tmp_path, dsn, "b") as (second,):
        answer = await first.node.post("/v1/weights", new("7", own))
        assert (answer.status, answer.json()["stale"]) == (201, []), answer.text
        assert await serves(second, "7")
        (copy,) = (tmp_path / "b" / "weights").iterdir()
        files = {each.name: each.read_bytes() for each in copy.iterdir()}
        assert files == {each.name: each.read_bytes() for each in own.iterdir() if each.is_file()}
        (row,) = await first.log.weights(model=MODEL)
        assert (row.current, len(row.holders)) == (True, 2)
        assert (await second.node.post("/v1/weights", new("7", own))).status == 200
    async with nodes(tmp_path, dsn, "b", begins=True) as (again,):
        assert again.engines.versions == ("7",), "its first weights, with no other node there"


async def test_uploader_dies_between_rows(
    tmp_path: Path, dsn: str, blind: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that one node has is not the current one, so nobody waits for its files."""
    blind(tmp_path / "b")
    own = copytree(TINY_MODEL, tmp_path / "step")
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        assert (await first.node.post("/v1/weights", new("1"))).status == 201

        async def no_copy(*_: Any) -> bool:
            await trio.lowlevel.checkpoint()
            return False

        monkeypatch.setattr(Copies, "copy", no_copy)
        first.weights.spread_s = 0.0
        short = await first.node.post("/v1/weights", new("2", own))
        assert short.status == 429
        assert "b had no copy" in short.json()["error"]["message"]
        await submit(first.log, "t")
        assert not await claim(first.log, first.incarnation, labels=LABELS, serving=first.weights.serving())
        await until(lambda: _expired(second.log, first.incarnation))  # it signs meanwhile
        await second.log.put_back_lost()
        rows = await second.log.weights(model=MODEL)
        assert [(each.version, each.current) for each in rows] == [("2", False), ("1", True)]
        assert await claim(second.log, second.incarnation, labels=LABELS, serving=second.weights.serving())
        again = await second.node.post("/v1/weights", new("2", own))
        assert again.status == 201, again.text
        assert [each.current for each in await second.log.weights(model=MODEL)] == [True, False]


async def _expired(log: Log, incarnation: int) -> bool:
    return await log.declare_lost(incarnation, (await log.read_signs())[incarnation])


async def test_stale_node_returns_with_files(tmp_path: Path, dsn: str, blind: Callable[[Path], None]) -> None:
    """It is stale, named and idle until it has the files, and then claims again."""
    blind(tmp_path / "b")
    own = copytree(TINY_MODEL, tmp_path / "step")
    async with nodes(tmp_path, dsn, "a") as (first,):
        answer = await first.node.post("/v1/weights", new("7", own))
        assert answer.status == 201, "one holder is enough where one node is alive"
        own.rename(tmp_path / "moved")
        async with nodes(tmp_path, dsn, "b") as (second,):
            await until(lambda: _is_stale(first, "b"))
            await submit(second.log, "t")
            offered = {"labels": LABELS, "serving": second.weights.serving()}
            assert not await claim(second.log, second.incarnation, **offered)
            await until(lambda: _warns(second, "no node gave its files"))
            (tmp_path / "moved").rename(own)
            await until(lambda: serves(second, "7"))
            await until(lambda: _is_stale(first))
            assert (await second.told())["warning"] is None
            offered = {"labels": LABELS, "serving": second.weights.serving()}
            assert await claim(second.log, second.incarnation, **offered)


async def _is_stale(plane: Plane, *names: str) -> bool:
    return bool((await plane.told())["stale"] == list(names))


async def _warns(plane: Plane, text: str) -> bool:
    return text in ((await plane.told())["warning"] or "")


async def test_version_without_row_is_unserved(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's connection is busy with a body for too long: the others would never hear of the version."""
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):

        async def add_weights(*_: Any, **__: Any) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(weights_module, "WRITTEN_S", 0.1)
        monkeypatch.setattr(PostgresLog, "add_weights", add_weights)
        answer = await first.node.post("/v1/weights", new("7"))
        assert (answer.status, answer.json()["error"]["type"]) == (503, "log_away"), answer.text
        assert [each.engines.versions for each in (first, second)] == [("0",)] * 2


async def test_nobody_waits_for_external_engine(tmp_path: Path, dsn: str) -> None:
    """Its weights are its owner's: it holds no files, and a version counts without it."""
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        second.engines._external = ExternalEngine(
            urls=("http://127.0.0.1:9",), vocab_size=9, context_length=9
        )
        await second.following.look()
        answer = await first.node.post("/v1/weights", new("7"))
        assert (answer.status, answer.json()["stale"]) == (201, []), answer.text
        assert [each.engines.versions[-1] for each in (first, second)] == ["7", "0"]
        await until(lambda: _is_stale(first, "b"))


async def test_copies_leave_room_on_disk(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        assert (await first.node.post("/v1/weights", new("7"))).status == 201
        (row,) = await second.log.weights(model=MODEL)
        copies, folder = second.following.copies, tmp_path / "copied"
        folder.mkdir()
        assert not await evolve(copies, reserve=1 << 60).copy(row, folder)
        assert not [*folder.iterdir()]
        assert await copies.copy(row, folder)


async def test_following_weights_survives_full_disk(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(*_: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError("No space left on device")

    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        monkeypatch.setattr(AdapterStore, "follow", no_room)
        first.weights.spread_s = 1.0  # the answer waits so long for a node that cannot say what it serves
        await second.following.look()
        assert (await first.node.post("/v1/weights", new("7"))).status == 201
        assert await serves(second, "7")


async def test_settings_adapter_waits_for_nobody(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node starts where another one cannot take the adapter that its settings name."""

    async def no_copy(*_: Any) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    monkeypatch.setattr(Copies, "copy", no_copy)
    folder = write_adapter(tmp_path / "adapter")
    async with nodes(tmp_path, dsn, "a", "b", lora_rank=4) as (first, _):
        first.weights.spread_s, said = 0.0, list[str]()
        await first.adapters.serve_from_start({"a": str(folder)}, said.append)
        assert "b had no copy" in said[0]


async def test_deadline_names_nodes_without_version(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a", "b", "c") as (first, second, third):
        second.weights.released.add("weights")  # its memory is lent to a trainer
        first.weights.spread_s = 0.5
        for version in ("3", "4", "5"):
            await until(partial(_served_but, first, version, "b"))
        assert await serves(third, "5")
        await until(lambda: _is_stale(third, "b"))
        second.weights.released.clear()
        await until(lambda: serves(second, "5"))
        assert second.engines.versions == ("0", "5")


async def _served_but(plane: Plane, version: str, name: str) -> bool:
    """Send an update again until it counts, which is when another node has its files, too."""
    answer = await plane.node.post("/v1/weights", new(version))
    assert answer.status in (200, 201, 429), answer.text
    return answer.status < 300 and bool(answer.json()["stale"] == [name])


async def test_staleness_follows_log_order(tmp_path: Path, dsn: str) -> None:
    """A session at a node that is two versions behind is stale by two."""
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        assert (await first.node.post("/v1/weights", new("3"))).status == 201
        second.weights.released.add("weights")
        first.weights.spread_s = 0.0
        for version in ("4", "5"):
            await until(partial(_served_but, first, version, "b"))
        await until(lambda: _ordered(second, ("0", "3", "4", "5")))
        turn = make_turn(0, None, [1], [2], versions=[("3", 1)])
        sampled = evolve(make_trajectory("s"), turns=(turn,))
        assert updates_behind(sampled, second.weights.order()) == 2
        assert updates_behind(sampled, first.weights.order()) == 2
        assert (await second.told())["versions"] == ["0", "3", "4", "5"]


async def _ordered(plane: Plane, versions: tuple[str, ...]) -> bool:
    return plane.weights.order() == versions


async def test_adapters_reach_all_nodes(tmp_path: Path, dsn: str, blind: Callable[[Path], None]) -> None:
    folder = write_adapter(tmp_path / "adapter")
    config = (folder / "adapter_config.json").read_text()
    body = save(load_file(folder / "adapter_model.safetensors"), {"adapter_config": config})
    async with nodes(tmp_path, dsn, "a", "b", lora_rank=4) as (first, second):
        put = await first.node.call("PUT", "/v1/adapters/a/versions/1", body=body)
        assert (put.status, put.json()["stale"]) == (201, []), put.text
        assert await _adapters(second) == {"a": "1"}
        posted = {"name": "b", "version": "2", "source": disk(folder)}
        assert (await second.node.post("/v1/adapters", posted)).status == 201
        assert await _adapters(first) == await _adapters(second) == {"a": "1", "b": "2"}
        assert (await first.node.post("/v1/adapters", posted)).status == 200
        async with nodes(tmp_path, dsn, "c", lora_rank=4) as (third,):
            await until(lambda: _has_adapters(third, {"a": "1", "b": "2"}))
        assert (await second.node.call("DELETE", "/v1/adapters/a")).status == 200
        await until(lambda: _has_adapters(first, {"b": "2"}))
        await until(lambda: _is_gone(tmp_path / "a" / "adapters" / "a"))  # its files go last


async def test_adapter_deletion_needs_its_row(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the log does not take the deletion in time the trainer is told, and the adapter is served again."""

    async def change_weights(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    posted = {"name": "a", "version": "1", "source": disk(write_adapter(tmp_path / "adapter"))}
    async with nodes(tmp_path, dsn, "a", "b", lora_rank=4) as (first, second):
        assert (await first.node.post("/v1/adapters", posted)).status == 201
        with monkeypatch.context() as patch:
            patch.setattr(weights_module, "WRITTEN_S", 0.1)
            patch.setattr(PostgresLog, "change_weights", change_weights)
            answer = await first.node.call("DELETE", "/v1/adapters/a")
            assert (answer.status, answer.json()["error"]["type"]) == (503, "log_away"), answer.text
        await first.following.look()
        assert await _adapters(first) == await _adapters(second) == {"a": "1"}


async def test_node_without_adapter_support_is_named(tmp_path: Path, dsn: str) -> None:
    """A node without `lora_rank` is named at once, and nobody waits for it."""
    folder = write_adapter(tmp_path / "adapter")
    async with nodes(tmp_path, dsn, "a", lora_rank=4) as (first,), nodes(tmp_path, dsn, "b") as (second,):
        answer = await first.node.post("/v1/adapters", {"name": "a", "version": "1", "source": disk(folder)})
        assert (answer.status, answer.json()["stale"]) == (201, ["b"]), answer.text
        await submit(second.log, "t", adapter="a")
        offered = {"labels": LABELS, "serving": second.weights.serving()}
        assert not await claim(second.log, second.incarnation, **offered)
        offered = {"labels": LABELS, "serving": first.weights.serving()}
        assert await claim(first.log, first.incarnation, **offered)


async def _is_gone(path: Path) -> bool:
    return not await trio.Path(path).exists()


async def _adapters(plane: Plane) -> dict[str, str]:
    found = (await plane.node.get("/v1/adapters")).json()["adapters"]
    return {each["name"]: each["version"] for each in found}


async def _has_adapters(plane: Plane, adapters: dict[str, str]) -> bool:
    return await _adapters(plane) == adapters


# ── what has no files ─────────────────────────────────────────────────────────


GOOD, BAD = (b64encode(data).decode() for data in (pickle.dumps([]), b"this is no pickle"))


def tensors(version: str, *payloads: str) -> dict[str, Any]:
    return {"version": version, "source": {"kind": "tensor", "buckets": [{"payloads": list(payloads)}]}}


@given(st.integers(1, 9), st.lists(st.integers(1, 8), min_size=1, max_size=64))
def test_ranks_each_of_one_node(first: int, ranks: list[int]) -> None:
    offsets = rank_offsets(first, ranks)
    every = [at + rank for at, each in zip(offsets, ranks, strict=True) for rank in range(each)]
    assert every == list(range(first, first + sum(ranks)))
    handles = [str(each) for each in range(sum(ranks))]
    assert [each for part in split_payloads(handles, ranks) for each in part] == handles
    assert split_payloads(["one"] * (sum(ranks) + 1), ranks) == [["one"] * (sum(ranks) + 1)] * len(ranks)


async def test_tensor_handles_reach_all_nodes(tmp_path: Path, dsn: str) -> None:
    """Each node gets the payloads of its GPUs; who refuses them is stale, and named."""
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        assert (await first.told())["ranks"] == 2
        answer = await second.node.post("/v1/weights", tensors("1", GOOD, GOOD))
        assert (answer.status, answer.json()["stale"]) == (201, []), answer.text
        assert [each["index"] for each in answer.json()["hosts"]] == [0, 1]
        assert [each.engines.versions[-1] for each in (first, second)] == ["1", "1"]
        answer = await first.node.post("/v1/weights", tensors("2", GOOD, BAD))
        assert (answer.status, answer.json()["stale"]) == (201, ["b"]), answer.text
        assert [each.engines.versions[-1] for each in (first, second)] == ["2", "1"]
        await until(lambda: _is_stale(second, "b"))
        await until(lambda: _warns(second, "no disk has them"))
        assert (await first.node.post("/v1/weights", tensors("3", BAD, BAD))).status == 400
        assert (await second.node.post("/v1/weights", new("4"))).status == 201
        assert [each.engines.versions[-1] for each in (first, second)] == ["4", "4"]


async def test_buckets_form_one_update(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a", "b") as planes:
        trainer = planes[1].node
        source: dict[str, Any] = {"kind": "tensor", "buckets": []}
        for version, payload in (("7", GOOD), ("8", BAD)):
            begun = await trainer.post("/v1/weights/updates", {"version": version, "source": source})
            assert begun.status == 201, begun.text
            path = f"/v1/weights/updates/{begun.json()['update_id']}"
            added = await trainer.post(f"{path}/buckets", {"payloads": [GOOD, payload]})
            assert added.status == (200 if payload == GOOD else 400), added.text
            done = await trainer.post(f"{path}/commit", {})
            assert done.status == (201 if payload == GOOD else 409), done.text
            if payload == GOOD:
                assert (await trainer.post(f"{path}/commit", {})).json()["created"] is False
        assert [each.engines.versions for each in planes] == [("0", "7")] * 2
        assert [each.weights.status().updating for each in planes] == [None, None]


async def test_requests_may_reach_different_nodes(tmp_path: Path, dsn: str) -> None:
    """As a load balancer sends them; payloads are in one order, whichever node is asked."""
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        source: dict[str, Any] = {"kind": "tensor", "buckets": []}
        for version, payload in (("7", GOOD), ("8", BAD), ("9", None)):
            begun = await first.node.post("/v1/weights/updates", {"version": version, "source": source})
            assert begun.status == 201, begun.text
            path = f"/v1/weights/updates/{begun.json()['update_id']}"
            if payload is None:
                assert (await second.node.call("DELETE", path)).status == 200
            else:
                for at, each, status in (
                    (second, GOOD, 200),
                    (first, payload, 200 if payload == GOOD else 400),
                ):
                    added = await at.node.post(f"{path}/buckets", {"payloads": [GOOD, each]})
                    assert added.status == status, added.text
            done = await second.node.post(f"{path}/commit", {})
            assert done.status == (201 if payload == GOOD else 409), done.text
            if payload == GOOD:
                assert (await first.node.post(f"{path}/commit", {})).json()["created"] is False
            assert [each.weights.status().updating for each in (first, second)] == [None, None]
        assert [each.engines.versions for each in (first, second)] == [("0", "7")] * 2
        answer = await second.node.post("/v1/weights", tensors("10", GOOD, BAD))
        assert (answer.status, answer.json()["stale"]) == (201, ["b"]), answer.text


async def test_group_is_known_at_every_node(tmp_path: Path, dsn: str) -> None:
    group = {"name": "g", "address": "127.0.0.1", "port": 29500, "world_size": 3, "rank_offset": 1}
    update = {"version": "7", "source": {"kind": "distributed", "group": "g", "buckets": []}}
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        joined = await first.node.post("/v1/weights/groups", group)
        assert joined.status == 201, joined.text
        begun = await second.node.post("/v1/weights/updates", update)
        assert begun.status == 201, begun.text
        path = f"/v1/weights/updates/{begun.json()['update_id']}"
        bucket = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2, 2]]}
        added = await first.node.post(f"{path}/buckets", bucket)
        assert added.status == 200, added.text
        assert (await second.node.post(f"{path}/commit", {})).status == 201
        assert [each.engines.versions[-1] for each in (first, second)] == ["7", "7"]
        assert (await second.node.call("DELETE", "/v1/weights/groups/g")).status == 200
        left = await first.node.post("/v1/weights/updates", {**update, "version": "8"})
        assert (left.status, "is not joined by all" in left.text) == (409, True), left.text


async def test_all_nodes_pause_at_barrier(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a", "b") as planes:
        held = await planes[0].node.post("/v1/engine/pause", {"mode": "retract"})
        assert (held.status, held.json()["paused"]) == (200, "retract")
        assert [each.weights.status().paused for each in planes] == ["retract"] * 2
        assert (await planes[1].node.post("/v1/engine/resume", {})).status == 200
        assert [each.weights.status().paused for each in planes] == [None] * 2
        barrier = await planes[0].node.post("/v1/weights", new("8", switch="barrier"))
        assert barrier.status == 201, barrier.text
        assert [each.engines.versions[-1] for each in planes] == ["8", "8"]
        assert [each.weights.status().paused for each in planes] == [None] * 2
        with trio.move_on_after(0.3):  # the trainer goes while one node has not said yet that it holds
            async with planes[1].weights.alone():
                await planes[0].node.post("/v1/weights", new("9", switch="barrier"))
        await until(lambda: _goes_on(planes[0]))
        await until(lambda: _goes_on(planes[1]))
        assert (await planes[1].node.post("/v1/engine/pause", {})).status == 200
        assert (await planes[0].node.post("/v1/weights", new("9", switch="barrier"))).status == 201
        assert [each.weights.status().paused for each in planes] == ["in_place"] * 2, "as the trainer left it"


async def test_joining_node_is_held(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a") as (first,):
        for pause, resume, held in (
            ("/v1/engine/pause", "/v1/engine/resume", "retract"),
            (f"/v1/engine/pause?model={MODEL}", f"/v1/engine/resume?model={MODEL}", "abort"),
            ("/pause_generation", "/continue_generation", "in_place"),
        ):
            assert (await first.node.post(pause, {"mode": held})).status == 200
            async with nodes(tmp_path, dsn, "b") as (second,):
                assert second.weights.status().paused == held, pause
                assert (await second.node.post(resume, {})).status == 200
                assert [each.weights.status().paused for each in (first, second)] == [None, None], resume
            async with nodes(tmp_path, dsn, "c") as (third,):
                assert third.weights.status().paused is None, resume


async def test_node_missing_request_follows_log(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a") as (plane,):
        await plane.log.hold_generation("in_place", model=MODEL)
        await until(lambda: _holds(plane))
        async with plane.weights.alone():
            plane.weights.released.add("weights")
            await plane.log.hold_generation(None, model=MODEL)
        await plane.following.look()
        assert await _holds(plane), "its memory is lent: nothing could be sampled"
        plane.weights.released.clear()
        assert (await plane.node.post("/v1/engine/resume", {})).status == 200
        await plane.log.hold_generation("in_place")
        await until(lambda: _holds(plane))
        await plane.log.hold_generation(None)
        await until(lambda: _goes_on(plane))


async def test_request_barrier_is_no_log_hold(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a", "b") as (first, second):
        assert (await first.node.post("/v1/weights", new("1", switch="barrier"))).status == 201
        assert (await first.log.generation_hold(model=MODEL), second.weights.status().paused) == (None, None)


async def _holds(plane: Plane) -> bool:
    return plane.weights.status().paused is not None


async def _goes_on(plane: Plane) -> bool:
    return plane.weights.status().paused is None


async def test_weight_requests_name_their_model(tmp_path: Path, dsn: str) -> None:
    """Any node takes what is for another model, and a request that names none is refused."""
    async with (
        nodes(tmp_path, dsn, "a") as (policy,),
        nodes(tmp_path, dsn, "b", model="judge") as (judge,),
    ):
        await until(lambda: _known(policy, 2))
        refused = await policy.node.post("/v1/weights", new("1"))
        assert (refused.status, refused.json()["error"]["path"]) == (400, "?model"), refused.text
        assert f"serves judge, {MODEL}" in refused.json()["error"]["message"]
        assert (await policy.node.post("/v1/weights?model=other", new("1"))).status == 400
        for model in ("judge", MODEL):
            answer = await policy.node.post(f"/v1/weights?model={model}", new("1"))
            assert answer.status == 201, answer.text
        assert [each.engines.versions for each in (policy, judge)] == [("0", "1")] * 2
        answer = await judge.node.post(f"/v1/weights?model={MODEL}", tensors("2", GOOD))
        assert answer.status == 201, answer.text
        assert [each.engines.versions[-1] for each in (policy, judge)] == ["2", "1"]
        assert (await policy.node.post("/v1/engine/pause?model=judge", {})).status == 200
        assert [each.weights.status().paused for each in (policy, judge)] == [None, "in_place"]
        headers = {PASSED_BY: "b"}
        back = await policy.node.call("GET", "/v1/weights", params={"model": "judge"}, headers=headers)
        assert (back.status, back.json()["error"]["type"]) == (502, "astray"), "requests go round"


async def test_adapter_is_put_at_any_node(tmp_path: Path, dsn: str) -> None:
    folder = write_adapter(tmp_path / "adapter")
    config = (folder / "adapter_config.json").read_text()
    body = save(load_file(folder / "adapter_model.safetensors"), {"adapter_config": config})
    async with (
        nodes(tmp_path, dsn, "a") as (policy,),
        nodes(tmp_path, dsn, "b", model="judge", lora_rank=4) as (judge,),
    ):
        await until(lambda: _known(policy, 2))
        path = "/v1/adapters/a/versions/1"
        put = await policy.node.call("PUT", path, params={"model": "judge"}, body=body)
        assert put.status == 201, put.text
        assert [each.version for each in judge.adapters.status().adapters] == ["1"]


async def _known(plane: Plane, count: int) -> bool:
    return len([each for each in await plane.log.nodes() if each.serving]) == count


async def test_sglang_update_uses_one_name(tmp_path: Path, dsn: str) -> None:
    async with nodes(tmp_path, dsn, "a", "b") as planes:
        trainer = planes[1].node

        turns = cycle(planes)  # each request goes to another node

        async def asked(path: str, status: int = 200, **body: Any) -> None:
            answer = await next(turns).node.post(path, body)
            assert answer.status == status, (path, answer.text)

        def served() -> list[str]:
            return [each.engines.versions[-1] for each in planes]

        assert (await planes[0].node.post("/v1/weights", new("1"))).status == 201
        info = (await trainer.get("/server_info")).json()
        assert (info["num_gpus"], info["dp_size"]) == (2, 2)
        update = partial(asked, "/update_weights_from_tensor", weight_version="1")
        for payload, status in ((GOOD, 200), (BAD, 400)):
            await asked("/pause_generation")
            await update(serialized_named_tensors=[GOOD, GOOD])
            await update(status, serialized_named_tensors=[GOOD, payload])
            await asked("/continue_generation")
            assert served() == ["1~2", "1~2"]
        await asked("/update_weights_from_disk", model_path=str(TINY_MODEL), weight_version="2")
        await asked("/update_weights_from_disk", model_path=str(TINY_MODEL), weight_version="2")
        await asked("/update_weights_from_disk", model_path=str(TINY_MODEL))
        assert served() == ["unnamed-1", "unnamed-1"]
