"""A trainer's way to a node's weights, over HTTP, on simulated engine hosts: one version on all of them, or
the one before.
"""

import base64
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from control_plane_parts import TaskTaker
from fakes_engine import order, sample
from plane_kit import AsgiClient, stage
from weights_kit import MODEL, Plane, disk, open_weights_plane

from polarnode.api.metrics import render_metrics
from polarnode.core.errors import EngineError
from polarnode.engine import weights as weights_module
from polarnode.engine.checkpoints import fingerprint
from polarnode.engine.engines import open_engines
from polarnode.engine.protocol import Simulation
from polarnode.engine.settings import EngineSettings, SimulatedEngine
from polarnode.gateway.call import KeepAlivePacing
from polarnode.journal.journal import open_journal
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.opening import checkpoint_path, initial_weights
from polarnode.node.settings import simulated_marks
from polarnode.tokens.template import LoadedModel, load_model

SLOW = Simulation(tokens_per_s=100, first_token_s=0, prefill_tokens_per_s=0)
GOOD, BAD = base64.b64encode(b"\x80\x04").decode(), base64.b64encode(b"no pickle").decode()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(TINY_MODEL)


def new(version: str, path: Path = TINY_MODEL, **more: Any) -> dict[str, Any]:
    return {"version": version, "source": disk(path), **more}


def simulated(model: LoadedModel, tmp_path: Path, *, hosts: int = 2) -> EngineSettings:
    marks = SimulatedEngine(
        simulation=SLOW, marks=simulated_marks(model.family), vocab_size=model.tokenizer.vocab_size
    )
    return EngineSettings(
        model_path=TINY_MODEL, device="cpu", gpus=tuple(range(hosts)), state_dir=tmp_path, simulated=marks
    )


@asynccontextmanager
async def opened(model: LoadedModel, tmp_path: Path, *, hosts: int = 2) -> AsyncIterator[Plane]:
    with trio.fail_after(120):
        async with open_weights_plane(simulated(model, tmp_path, hosts=hosts), tmp_path / "journal") as plane:
            yield plane


async def test_new_weights_are_served_and_remembered(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path) as plane:
        node, engines = plane.node, plane.engines
        first = await node.post("/v1/weights", new("1"))
        assert first.status == 201, first.text
        assert first.json()["created"] is True
        assert [host["ok"] for host in first.json()["hosts"]] == [True, True]
        again = await node.post("/v1/weights", new("1", mode="retract"))
        assert (again.status, again.json()) == (200, first.json() | {"created": False})
        assert (await node.post("/v1/weights", new("1", tmp_path))).status == 409
        assert (await node.post("/v1/weights", new("0"))).status == 409
        assert (await node.post("/v1/weights", new("2"))).status == 201
        assert (await node.post("/v1/weights", new("1"))).status == 409
        told = (await node.get("/v1/weights")).json()
        assert (told["version"], told["versions"], told["updates"]) == ("2", ["0", "1", "2"], 2)
        assert [(each["version"], each["at"], each["source"]["path"]) for each in told["history"]] == [
            (one, 5.0, str(TINY_MODEL)) for one in "21"
        ]
        assert engines.versions == ("0", "1", "2")


async def test_invalid_update_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path, hosts=1) as plane:
        node, engines = plane.node, plane.engines
        for body, path in (
            (new("1", Path("here")), "$.source.path"),
            (new(""), "$.version"),
            (new("1", mode="later"), "$.mode"),
            ({"version": "1"}, "$.source"),
            ({"version": "1", "source": {"kind": "rumour"}}, "$.source"),
        ):
            refused = await node.post("/v1/weights", body)
            assert (refused.status, refused.json()["error"]["path"]) == (400, path)
        assert engines.versions == ("0",)


async def test_hanging_disk_blocks_no_thread(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken, looks = threading.Event(), list[Path]()

    def hang(path: Path) -> None:
        looks.append(path)
        woken.wait(120)

    monkeypatch.setattr(weights_module, "check_files", hang)
    monkeypatch.setattr(weights_module, "OPEN_S", 0.1)
    try:
        async with opened(model, tmp_path, hosts=1) as plane:
            for _ in range(3):  # a trainer that tries again
                refused = await plane.node.post("/v1/weights", new("1"))
                assert refused.status == 400
                assert "look at its disk" in refused.text
            assert len(looks) == 1
            assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
    finally:
        woken.set()


async def test_generation_pauses_and_resumes(model: LoadedModel, tmp_path: Path) -> None:
    async with (
        opened(model, tmp_path, hosts=1) as plane,
        plane.engines.generate(order([1], max_tokens=None)) as stream,
    ):
        await stream.__anext__()
        assert (await plane.node.post("/v1/engine/pause", {"mode": "retract"})).json()["paused"] == "retract"
        with trio.move_on_after(0.5) as held:
            async for _ in stream:
                pass
        assert held.cancelled_caught
        assert json.loads((await plane.node.call("POST", "/v1/engine/resume")).text)["paused"] is None
        assert (await stream.__anext__()).ids


# ── tensors ───────────────────────────────────────────────────────────────────


def tensors(version: str, *buckets: list[str], **more: Any) -> dict[str, Any]:
    return {
        "version": version,
        "source": {"kind": "tensor", "buckets": [{"payloads": payloads} for payloads in buckets]},
        **more,
    }


async def test_trainer_tensors_reach_all_or_none(model: LoadedModel, tmp_path: Path) -> None:
    """One payload for each GPU, or one for each of an engine's; the second host's is bad, and the first goes
    back.
    """
    async with opened(model, tmp_path) as plane:
        refused = await plane.node.post("/v1/weights", tensors("1", [GOOD, GOOD], [GOOD, BAD]))
        assert (refused.status, "engine host 1: a payload is no pickle" in refused.text) == (400, True)
        assert [host.weight_version for host in plane.engines.statistics().hosts] == ["0", "0"]
        assert (await plane.node.post("/v1/weights", tensors("1", [GOOD, GOOD], [GOOD]))).status == 201
        assert [host.weight_version for host in plane.engines.statistics().hosts] == ["1", "1"]
        told = await plane.told()
        assert (told["updates"], told["failures"], told["history"][0]["source"]) == (
            1,
            1,
            {"kind": "tensor", "buckets": "2"},
        )
        found = render_metrics(
            evolve(TaskTaker(journal=plane.journal).figures(), weights=plane.weights.status())
        ).decode()
        assert 'polarnode_weight_updates_total{outcome="failed"} 1.0' in found
        assert f"polarnode_weight_update_seconds {told['last_seconds']}" in found
        for body, sentence in (
            (tensors("2", [GOOD] * 3), "has 3 entries, this node takes 2"),
            (tensors("2", ["no base64"]), "is no base64"),
            (tensors("2", [base64.b64encode(bytes(9 << 20)).decode()]), "send handles"),
            (tensors("2"), "nothing was sent"),
        ):
            refused = await plane.node.post("/v1/weights", body)
            assert (refused.status, sentence in refused.text) == (400, True), refused.text


async def test_update_of_several_requests(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path) as plane:
        begun = await plane.node.post("/v1/weights/updates", tensors("1", [GOOD]))
        where = f"/v1/weights/updates/{begun.json()['update_id']}"
        assert (begun.status, begun.json()["buckets"], begun.json()["idle_s"]) == (
            201,
            1,
            weights_module.IDLE_S,
        )
        for call in (
            plane.node.post("/v1/weights", new("2")),
            plane.node.post("/v1/engine/pause", {}),
            plane.node.call("POST", "/v1/engine/resume"),
            plane.node.post("/v1/weights/updates", tensors("2")),
            plane.node.post("/v1/weights/updates/other/buckets", {"payloads": [GOOD]}),
        ):
            assert (await call).status == 409
        with trio.move_on_after(0.3) as held:
            await sample(plane.engines, order([1]))
        assert held.cancelled_caught  # new calls wait for it
        assert (await plane.node.post(f"{where}/buckets", {"payloads": [GOOD, GOOD]})).json()["buckets"] == 2
        assert (
            await plane.node.post(
                f"{where}/buckets", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
            )
        ).status == 400
        done = await plane.node.call("POST", f"{where}/commit")
        assert done.status == 201
        assert (await sample(plane.engines, order([1])))[-1].version_spans[0].version == "1"
        again = await plane.node.call("POST", f"{where}/commit")
        assert (again.status, again.json()) == (200, done.json() | {"created": False})
        assert (await plane.node.call("POST", "/v1/weights/updates/other/commit")).status == 409


async def test_restarted_update_replaces_unanswered_one(model: LoadedModel, tmp_path: Path) -> None:
    """An update begun again replaces the one whose trainer got no answer."""
    async with opened(model, tmp_path) as plane:
        first, second = [
            (await plane.node.post("/v1/weights/updates", tensors("1", [GOOD]))).json()["update_id"]
            for _ in range(2)
        ]
        lost = f"/v1/weights/updates/{first}/buckets"
        assert (await plane.node.post(lost, {"payloads": [GOOD]})).status == 409
        done = await plane.node.call("POST", f"/v1/weights/updates/{second}/commit")
        assert (done.status, done.json()["source"]["buckets"]) == (201, "1")


async def test_rewritten_folder_is_another_version(model: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(TINY_MODEL, folder)
    async with opened(model, tmp_path, hosts=1) as plane:
        assert (await plane.node.post("/v1/weights", new("1", folder))).status == 201
        assert (await plane.node.post("/v1/weights", new("1", folder))).status == 200
        os.utime(folder / "config.json", (1, 1))
        refused = await plane.node.post("/v1/weights", new("1", folder))
        assert (refused.status, "have changed" in refused.text) == (409, True)


async def test_update_is_aborted_or_times_out(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is given up by its trainer, or for its silence."""
    monkeypatch.setattr(weights_module, "IDLE_S", 0.5)
    async with opened(model, tmp_path) as plane:
        begun = (await plane.node.post("/v1/weights/updates", tensors("1"))).json()["update_id"]
        assert (await plane.node.call("DELETE", f"/v1/weights/updates/{begun}")).json()["updating"] is None
        broken = (await plane.node.post("/v1/weights/updates", tensors("1"))).json()["update_id"]
        assert (
            await plane.node.post(f"/v1/weights/updates/{broken}/buckets", {"payloads": [GOOD, BAD]})
        ).status == 400
        assert (await plane.node.call("POST", f"/v1/weights/updates/{broken}/commit")).status == 409
        await plane.node.post("/v1/weights/updates", tensors("1", [GOOD]))
        while plane.weights.status().updating is not None:  # noqa: ASYNC110 - nobody tells of it
            await trio.sleep(0.05)
        assert (await sample(plane.engines, order([1])))[-1].version_spans[0].version == "0"
        assert plane.weights.status().failures == 3


async def test_stopping_node_aborts_open_update(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path) as plane:
        assert (await plane.node.post("/v1/weights/updates", tensors("1", [GOOD]))).status == 201
    assert plane.weights.status().version == "0"


async def test_weights_arrive_over_a_group(model: LoadedModel, tmp_path: Path) -> None:
    bucket = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2, 2]]}
    update = {"version": "1", "source": {"kind": "distributed", "buckets": [bucket]}}
    group = {"address": "127.0.0.1", "port": 4000, "world_size": 3, "backend": "gloo"}
    async with opened(model, tmp_path) as plane:
        assert (await plane.node.post("/v1/weights", update)).status == 409
        for wrong in ({"world_size": 2}, {"port": 0}, {"rank_offset": 0}, {"backend": "mpi"}):
            assert (await plane.node.post("/v1/weights/groups", group | wrong)).status == 400
        assert (await plane.node.post("/v1/weights/groups", group)).status == 201
        assert (await plane.node.post("/v1/weights/groups", group)).status == 409
        unknown: tuple[dict[str, Any], ...] = ({"names": []}, {"dtypes": ["float7"]}, {"shapes": [[-1]]})
        for field in unknown:
            said = {"version": "1", "source": {"kind": "distributed", "buckets": [bucket | field]}}
            assert (await plane.node.post("/v1/weights", said)).status == 400
        assert (await plane.node.post("/v1/weights", update)).status == 201
        os.kill(plane.engines.statistics().hosts[1].pid or 0, 9)
        while plane.engines.statistics().hosts[1].state != "stale":  # noqa: ASYNC110 - a test looks from outside
            await trio.sleep(0.05)
        again = await plane.node.post("/v1/weights", update | {"version": "2"})
        assert (again.status, "leave the group and join it again" in again.text) == (409, True)
        assert (await plane.node.call("DELETE", "/v1/weights/groups/weights")).status == 200
        assert (await plane.node.call("DELETE", "/v1/weights/groups/weights")).status == 404


# ── agents meanwhile ──────────────────────────────────────────────────────────


async def test_agent_call_survives_an_update(model: LoadedModel, tmp_path: Path) -> None:
    """One begun before goes on behind it, one that comes meanwhile begins behind it; both are kept alive, and
    each turn says its versions.
    """
    async with opened(model, tmp_path, hosts=1) as plane:
        here, before, meanwhile = (
            stage(plane.engines, pacing=KeepAlivePacing(opening_s=0.2, quiet_s=0.2)),
            AsgiClient(),
            AsgiClient(),
        )
        body = json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        ).encode()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(before.request, here.app, "/v1/chat/completions", body)
            while not plane.engines.statistics().hosts[0].running:  # noqa: ASYNC110 - a test looks from outside
                await trio.sleep(0.05)
            begun = (await plane.node.post("/v1/weights/updates", tensors("1", [GOOD]))).json()["update_id"]
            nursery.start_soon(
                meanwhile.request, here.app, "/v1/chat/completions", body.replace(b"hi", b"ho")
            )
            await trio.sleep(1.5)
            # chunks that say nothing
            assert [asgi.body.count(b'"delta":{}') > 2 for asgi in (before, meanwhile)] == [True, True]
            assert (await plane.node.call("POST", f"/v1/weights/updates/{begun}/commit")).status == 201
        assert [asgi.status for asgi in (before, meanwhile)] == [200, 200]
        assert all(asgi.body.rstrip().endswith(b"[DONE]") for asgi in (before, meanwhile))
        assert sorted([span.version for span in turn.version_spans] for turn in here.turns) == [
            ["0", "1"],
            ["1"],
        ]


# ── memory ────────────────────────────────────────────────────────────────────


async def test_engine_without_memory_saver_lends_nothing(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path, hosts=1) as plane:
        early = await plane.node.call("POST", "/v1/engine/memory/release")
        assert (early.status, "pause with mode retract or abort" in early.text) == (409, True)
        await plane.node.post("/v1/engine/pause", {"mode": "retract"})
        assert (await plane.node.post("/v1/engine/memory/release", {"tags": ["weights"]})).status == 409
        assert (await plane.node.post("/v1/engine/memory/release", {"tags": ["wits"]})).status == 400
        assert (await plane.told())["released"] == []
    with pytest.raises(EngineError, match="memory_saver lends the memory of GPUs"):
        async with open_engines(
            EngineSettings(model_path=TINY_MODEL, device="cpu", state_dir=tmp_path, memory_saver="backup")
        ):
            pytest.fail("it has none")


# ── the next life of the node ─────────────────────────────────────────────────


async def test_node_begins_with_last_weights(model: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).symlink_to(TINY_MODEL / file)
    async with opened(model, tmp_path) as plane:
        assert (await plane.node.post("/v1/weights", new("7", folder))).status == 201
    config, said = NodeConfig(), list[str]()
    async with open_journal(tmp_path / "journal", now=lambda: 6.0) as journal:
        # the plane was told the model's path as it is, a node resolves it
        assert checkpoint_path(config) == str(TINY_MODEL)
        loaded, warning = await initial_weights(config, SqliteLog(journal), MODEL, said.append)
        assert loaded is not None
        assert (loaded.version, loaded.path, loaded.files, warning) == (
            "7",
            str(folder),
            fingerprint(folder),
            None,
        )
        assert said == [f"serving weights '7' from {folder}, the last that were served"]
        async with open_engines(simulated(model, tmp_path), loaded=loaded) as engines:
            assert engines.versions == ("7",)
            assert [host.weight_version for host in engines.statistics().hosts] == ["7", "7"]
        for other, reason in (
            (NodeConfig(model="/models/other"), "of another model"),
            (NodeConfig(resume_weights=False), "resume_weights is false"),
        ):
            loaded, warning = await initial_weights(other, SqliteLog(journal), MODEL, said.append)
            assert (loaded, reason in str(warning)) == (None, True)
        (folder / "more.json").write_text("{}")
        assert "have changed since" in str(
            (await initial_weights(config, SqliteLog(journal), MODEL, said.append))[1]
        )
        folder.rename(tmp_path / "elsewhere")
        assert "is gone" in str((await initial_weights(config, SqliteLog(journal), MODEL, said.append))[1])


async def test_tensors_do_not_survive_restart(model: LoadedModel, tmp_path: Path) -> None:
    """Their trainer may send them again under their name, as it may a disk's that did not come back."""
    async with opened(model, tmp_path) as plane:
        await plane.update("0.5", disk(TINY_MODEL))
        await plane.update("1", {"kind": "tensor", "buckets": [{"payloads": [GOOD]}]})
    async with opened(model, tmp_path) as plane:
        assert (await plane.node.post("/v1/weights", new("0.5"))).status == 409  # not the last
        assert (await plane.node.post("/v1/weights", new("1"))).status == 409
        assert (await plane.node.post("/v1/weights", tensors("1", [GOOD, GOOD]))).status == 201
        # handles do not tell whether they are the same
        assert (await plane.node.post("/v1/weights", tensors("1", [GOOD, GOOD]))).status == 409
        assert [each["version"] for each in (await plane.told())["history"]] == ["1", "0.5"]
    async with open_journal(tmp_path / "journal", now=lambda: 6.0) as journal:
        loaded, warning = await initial_weights(NodeConfig(), SqliteLog(journal), MODEL, print)
        assert (loaded, "came as tensor from a trainer" in str(warning)) == (None, True)
