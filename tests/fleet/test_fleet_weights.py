"""A trainer's way to the weights of all nodes: real planes of weights over simulated engines, and the front."""

import pickle
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import trio
from adapters_kit import write_adapter
from attrs import define
from client_kit import KINDS, here, open_client
from control_plane_parts import Caller
from hypothesis import given
from hypothesis import strategies as st
from polarnode.core.fleet import NodeReport
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.engine_routes import FleetWeightsRoutes
from polarnode.fleet.front import Front
from polarnode.fleet.link import Link
from polarnode.fleet.members import FleetMember
from polarnode.fleet.openapi import fleet_operations
from polarnode.fleet.pools import WeightPools
from polarnode.fleet.sglang import FleetSglang
from polarnode.fleet.updates import fresh, newest, payloads_of, rank_offsets, verdict
from polarnode.fleet.weights import FleetWeights
from safetensors.numpy import load_file, save
from weights_kit import Plane, disk, open_weights_plane, simulated_tiny

from polarnode.api.app import Extension, control_plane
from polarnode.client import ClientError
from polarnode.http.server import Address, open_server
from polarnode.node.config import TINY_MODEL

# ── the plan ────────────────────────────────────────────────────────────


@given(st.integers(0, 64), st.integers(1, 64), st.floats(0.01, 1.0))
def test_a_change_that_no_node_took_is_refused(took: int, asked: int, least: float) -> None:
    took = min(took, asked)
    judged = verdict(took, asked, least)
    assert (judged == "refused") == (took == 0)
    assert (judged == "served") == (took > 0 and took / asked >= least)


@given(st.integers(1, 9), st.lists(st.integers(1, 8), min_size=1, max_size=64))
def test_ranks_of_a_fleet_are_each_of_one_node(first: int, ranks: list[int]) -> None:
    offsets = rank_offsets(first, ranks)
    every = [at + rank for at, each in zip(offsets, ranks, strict=True) for rank in range(each)]
    assert every == list(range(first, first + sum(ranks)))
    handles = [str(each) for each in range(sum(ranks))]
    assert [each for part in payloads_of(handles, ranks) for each in part] == handles
    assert payloads_of(["one"] * (sum(ranks) + 1), ranks) == [["one"] * (sum(ranks) + 1)] * len(ranks)


def test_names_are_never_used_again() -> None:
    assert fresh("1", set()) == "1"
    assert fresh("1", {"1", "1~2"}) == "1~3"
    assert fresh(None, {"unnamed-1"}) == "unnamed-2"
    assert newest([[], [{"at": 2.0, "version": "b"}], [{"at": 1.0, "version": "c"}]]) == {
        "at": 2.0,
        "version": "b",
    }
    assert newest([]) is None


# ── the fleet ────────────────────────────────────────────────────────────


@define(eq=False)
class Fleet:
    planes: list[Plane]
    front: Front
    weights: FleetWeights
    trainer: Caller

    async def served(self) -> list[str]:
        return [(await each.told())["version"] for each in self.planes]


@asynccontextmanager
async def opened(
    tmp_path: Path,
    count: int = 2,
    models: tuple[str, ...] = ("m",) * 9,
    *,
    lora_rank: int = 0,
    **more: Any,
) -> AsyncIterator[Fleet]:
    with trio.fail_after(120):
        async with AsyncExitStack() as stack:
            planes = []
            for number in range(count):
                folder = tmp_path / f"n{number}"
                folder.mkdir()
                plane = open_weights_plane(simulated_tiny(folder, lora_rank=lora_rank), folder / "journal")
                planes.append(await stack.enter_async_context(plane))
            nursery = await stack.enter_async_context(trio.open_nursery())
            config = FleetConfig(nodes=("@",), state_dir=str(tmp_path), **more)
            front = Front(config=config, nursery=nursery)
            for number, plane in enumerate(planes):
                member = FleetMember(
                    link=Link(url=plane.node.url, token="secret"), last_byte=trio.current_time() + 1000
                )
                member.report = NodeReport(
                    node=f"n{number}", journal=f"j{number}", model=models[number], ready=True
                )
                member.rows, member.state = {}, "up"
                front.roster.members[plane.node.url] = member
            pools = WeightPools(front=front)
            weights = pools.of(models[0])
            rows = (*pools.rows(lambda pool: FleetWeightsRoutes(weights=pool).rows()),)
            sglang = (*pools.rows(lambda pool: FleetSglang(weights=pool).extension().rows),)
            extensions = (
                Extension(rows=rows, operations=fleet_operations()),
                Extension(rows=sglang, basic=True),
            )
            app = control_plane((), token="secret", extensions=extensions)
            address = await stack.enter_async_context(open_server(app, Address(host="127.0.0.1", port=0)))
            try:
                yield Fleet(planes, front, weights, Caller(url=f"http://127.0.0.1:{address.port}"))
            finally:
                for member in front.roster.members.values():
                    await member.link.close()  # noqa: ASYNC102 - bounded there
                nursery.cancel_scope.cancel()


def new(version: str, path: Path = TINY_MODEL, **more: Any) -> dict[str, Any]:
    return {"version": version, "source": disk(path), **more}


async def test_one_request_updates_every_node(tmp_path: Path) -> None:
    async with opened(tmp_path) as fleet:
        answer = await fleet.trainer.post("/v1/weights", new("7"))
        assert answer.status == 201, answer.text
        assert [each["index"] for each in answer.json()["hosts"]] == [0, 1]
        assert await fleet.served() == ["7", "7"]
        again = await fleet.trainer.post("/v1/weights", new("7"))
        assert (again.status, again.json()["created"]) == (200, False)
        barrier = await fleet.trainer.post("/v1/weights", new("8", switch="barrier"))
        assert barrier.status == 201, barrier.text
        state = (await fleet.trainer.get("/v1/weights")).json()
        assert (state["version"], state["paused"], state["ranks"]) == ("8", None, 2)
        bad = await fleet.trainer.post("/v1/weights", new("9", tmp_path / "none"))
        assert bad.status == 400
        assert await fleet.served() == ["8", "8"]
        assert not fleet.front.roster.in_state("stale")


async def test_an_update_of_one_model_reaches_no_node_of_another(tmp_path: Path) -> None:
    async with opened(tmp_path, 3, ("policy", "policy", "judge")) as fleet:
        for path, body in (("/v1/weights", new("7")), ("/pause_generation", {}), ("/v1/engine/pause", {})):
            refused = await fleet.trainer.post(path, body)
            assert refused.status == 400, (path, refused.text)
            error = refused.json()["error"]
            assert error["path"] == "?model"
            assert "serves judge, policy" in error["message"]
        assert (await fleet.trainer.post("/v1/weights?model=other", new("7"))).status == 400
        answer = await fleet.trainer.post("/v1/weights?model=policy", new("7"))
        assert answer.status == 201, answer.text
        assert len(answer.json()["hosts"]) == 2
        before = (await fleet.planes[2].told())["version"]
        assert await fleet.served() == ["7", "7", before]
        disk_update = {"model_path": str(TINY_MODEL), "weight_version": "8"}
        answer = await fleet.trainer.post("/update_weights_from_disk?model=judge", disk_update)
        assert answer.status == 200, answer.text
        assert await fleet.served() == ["7", "7", "8"]
        assert (await fleet.trainer.get("/v1/weights?model=judge")).json()["version"] == "8"
        begun = await fleet.trainer.post(
            "/v1/weights/updates?model=judge",
            {"version": "9", "source": {"kind": "tensor", "buckets": []}},
        )
        path = f"/v1/weights/updates/{begun.json()['update_id']}"
        added = await fleet.trainer.post(f"{path}/buckets?model=judge", {"payloads": ["gAQ="]})
        assert added.status == 200, added.text
        assert (await fleet.trainer.post(f"{path}/commit?model=policy", {})).status == 409
        assert (await fleet.trainer.post(f"{path}/commit?model=judge", {})).status == 201
        joiner = fleet.front.roster.members[fleet.planes[1].node.url]
        joiner.state = "joining"
        assert await fleet.weights.bring(joiner)
        assert await fleet.served() == ["7", "7", "9"]
        assert not fleet.front.roster.in_state("stale")


async def test_a_late_node_takes_no_tasks_until_it_has_caught_up(tmp_path: Path) -> None:
    async with opened(tmp_path, 3, min_nodes=0.6) as fleet:
        late = fleet.front.roster.members[fleet.planes[2].node.url]
        url, late.link.url = late.link.url, "http://127.0.0.1:9"
        fleet.front.roster.members["http://127.0.0.1:9"] = fleet.front.roster.members.pop(url)
        answer = await fleet.trainer.post("/v1/weights", new("7"))
        assert answer.status == 201, answer.text
        assert late.state == "stale"
        late.link.url = url
        await late.link.close()
        assert await fleet.weights.bring(late)
        assert late.state == "up"
        assert await fleet.served() == ["7", "7", "7"]


async def test_too_few_nodes_are_an_error_and_sending_it_again_mends_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as fleet:
        late = fleet.front.roster.members[fleet.planes[1].node.url]
        late.link.url = "http://127.0.0.1:9"
        answer = await fleet.trainer.post("/v1/weights", new("7"))
        assert answer.status == 503, answer.text
        assert "n1" in answer.json()["error"]["message"]
        assert [each.name for each in fleet.front.roster.in_state("stale")] == ["n1"]
        late.link.url = fleet.planes[1].node.url
        assert (await fleet.trainer.post("/v1/weights", new("7"))).status == 201
        assert await fleet.served() == ["7", "7"]
        assert not fleet.front.roster.in_state("stale")


async def test_a_node_that_does_not_see_the_folder_takes_the_files_from_a_peer(tmp_path: Path) -> None:
    async with opened(tmp_path) as fleet:
        first, second = fleet.front.roster.members.values()
        own = copytree(TINY_MODEL, tmp_path / "copy")
        assert (await fleet.planes[0].node.post("/v1/weights", new("7", own))).status == 201
        assert await fleet.weights.bring(first)
        fleet.weights.want({**(fleet.weights.desired or {}), "source": disk(tmp_path / "elsewhere")})
        second.state = "joining"
        assert await fleet.weights.bring(second)
        second.state = "up"
        assert await fleet.served() == ["7", "7"]
        (copy,) = (tmp_path / "n1" / "weights").iterdir()
        assert {each.name: each.read_bytes() for each in copy.iterdir()} == {
            each.name: each.read_bytes() for each in own.iterdir() if each.is_file()
        }
        again = await fleet.trainer.post("/v1/weights", new("7", own))
        assert again.status == 200, again.text
        assert (await fleet.trainer.post("/v1/weights", new("8", own))).status == 201
        assert await fleet.served() == ["8", "8"]


async def test_a_new_front_learns_what_the_nodes_serve_and_a_joiner_gets_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as fleet:
        await fleet.planes[0].node.post("/v1/weights", new("7"))
        first, second = fleet.front.roster.members.values()
        assert await fleet.weights.bring(first)
        second.state = "joining"
        assert await fleet.weights.bring(second)
        assert await fleet.served() == ["7", "7"]


async def test_engines_are_held_and_go_on_together(tmp_path: Path) -> None:
    async with opened(tmp_path) as fleet:
        held = await fleet.trainer.post("/v1/engine/pause", {"mode": "retract"})
        assert (held.status, held.json()["paused"]) == (200, "retract")
        assert [(await each.told())["paused"] for each in fleet.planes] == ["retract"] * 2
        assert (await fleet.trainer.post("/v1/engine/resume", {})).status == 200
        assert [(await each.told())["paused"] for each in fleet.planes] == [None] * 2


async def test_an_update_of_several_requests_is_one_on_all_nodes(tmp_path: Path) -> None:
    good = "gAQ="
    source: dict[str, Any] = {"kind": "tensor", "buckets": []}
    async with opened(tmp_path) as fleet:
        begun = await fleet.trainer.post("/v1/weights/updates", {"version": "7", "source": source})
        assert begun.status == 201, begun.text
        path = f"/v1/weights/updates/{begun.json()['update_id']}"
        added = await fleet.trainer.post(f"{path}/buckets", {"payloads": [good, good]})
        assert added.status == 200, added.text
        done = await fleet.trainer.post(f"{path}/commit", {})
        assert done.status == 201, done.text
        assert await fleet.served() == ["7", "7"]
        assert (await fleet.trainer.post(f"{path}/commit", {})).json()["created"] is False


async def test_a_trainer_of_sglang_servers_updates_every_node_under_one_name(tmp_path: Path) -> None:
    good, bad = (b64encode(data).decode() for data in (pickle.dumps([]), b"this is no pickle"))

    async def asked(path: str, status: int = 200, **body: Any) -> None:
        answer = await fleet.trainer.post(path, body)
        assert answer.status == status, (path, answer.text)

    async with opened(tmp_path) as fleet:
        assert (await fleet.planes[1].node.post("/v1/weights", new("1"))).status == 201
        info = (await fleet.trainer.get("/server_info")).json()
        assert (info["num_gpus"], info["dp_size"]) == (2, 2)
        assert (info["host"], info["port"]) == ("127.0.0.1", 80), "as the trainer's Host has it, of no node"
        for payloads, status in (([good, good], 200), ([good, bad], 400)):
            await asked("/pause_generation")
            await asked(
                "/update_weights_from_tensor", serialized_named_tensors=[good, good], weight_version="1"
            )
            await asked(
                "/update_weights_from_tensor",
                status,
                serialized_named_tensors=payloads,
                weight_version="1",
            )
            await asked("/continue_generation")
            assert await fleet.served() == ["1~2", "1~2"]
            assert not fleet.front.roster.in_state("stale")
        await asked("/update_weights_from_disk", model_path=str(TINY_MODEL), weight_version="2")
        await asked("/update_weights_from_disk", model_path=str(TINY_MODEL), weight_version="2")
        await asked("/update_weights_from_disk", model_path=str(TINY_MODEL))
        assert await fleet.served() == ["unnamed-1", "unnamed-1"]


async def test_an_adapter_that_came_as_a_file_is_brought_to_nodes_that_join(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    body = save(tensors, {"adapter_config": (folder / "adapter_config.json").read_text()})
    async with opened(tmp_path, 3, lora_rank=4) as fleet:
        first, second, third = fleet.front.roster.members.values()
        second.state = third.state = "gone"
        put = await fleet.trainer.call("PUT", "/v1/adapters/a/versions/1", body=body)
        assert put.status == 201, put.text
        second.state = third.state = "joining"
        assert await fleet.weights.bring(second)
        new_front = FleetWeights(front=fleet.front)
        assert await new_front.bring(third), "a new front finds it at the nodes"
        for plane in fleet.planes:
            (state,) = (await plane.node.get("/v1/adapters")).json()["adapters"]
            assert (state["name"], state["version"]) == ("a", "1")
        assert not fleet.front.roster.in_state("stale")
        third.state = "joining"
        assert await new_front.bring(third), "nothing is sent twice"
        assert (await fleet.planes[2].node.get("/v1/adapters")).json()["updates"] == 1
        fleet.weights.adapters["b"] = {"name": "b", "version": "1"}
        second.state = "joining"
        assert await fleet.weights.bring(second)
        assert second.stale
        assert "no other node has the file of version '1': send it again" in second.problem
        assert first.state == "up"


# ── every kind of client ──────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_every_client_gives_weights_to_a_fleet_as_to_a_node(kind: str, tmp_path: Path) -> None:
    """The contract of test_client_rooms.py, on a front."""
    bucket = {"payloads": [b64encode(pickle.dumps([])).decode()] * 2}  # one for each GPU of the fleet
    with here() as thread:
        fleet = thread.open(opened(tmp_path))
        with open_client(kind, fleet.trainer.url, token="secret", patience_s=5.0) as client:
            report = client.update_weights("1", path=TINY_MODEL)
            assert (report.version, report.created, [host.ok for host in report.hosts]) == (
                "1",
                True,
                [True] * 2,
            )
            assert client.update_weights("1", path=TINY_MODEL).created is False
            with pytest.raises(ClientError) as other:
                client.update_weights("1", path=tmp_path)
            assert other.value.status == 409
            assert client.pause("retract").paused == "retract"
            assert client.resume().paused is None
            assert client.push_weights("2", iter([bucket, bucket]), mode="retract").version == "2"
            with pytest.raises(ClientError, match="payload"):
                client.push_weights("3", [{"payloads": ["no base64!"]}])
            assert (client.weights().version, client.weights().updating) == ("2", None)
        assert thread.do(fleet.served) == ["2", "2"]
