"""A node under SGLang's control routes: the sequences of requests that trainers send, in their own order.

The weights are a simulated engine's here; tests/engine/test_weights_real.py plays slime's on a real one.
"""

import pickle
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from fakes_engine import order, sample
from weights_kit import Plane, open_weights_plane, simulated_tiny

from polarnode.engine import weights as weights_module
from polarnode.engine.memory import EngineControl
from polarnode.integrations.sglang import SglangUpdates
from polarnode.integrations.sglang_operations import REFUSED, PauseGeneration
from polarnode.node.config import TINY_MODEL

GOOD, BAD = (b64encode(data).decode() for data in (pickle.dumps([]), b"this is no pickle"))


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[Plane]:
    with trio.fail_after(120):
        async with open_weights_plane(simulated_tiny(tmp_path), tmp_path / "journal") as plane:
            yield plane


async def asked(plane: Plane, path: str, body: Any = None) -> dict[str, Any]:
    """A POST that must succeed."""
    answer = await plane.node.post(path, {} if body is None else body)
    assert answer.status == 200, (path, answer.text)
    found: dict[str, Any] = answer.json()
    return found


def bucket(version: str | None = None, payload: str = GOOD) -> dict[str, Any]:
    body = {"serialized_named_tensors": [payload], "load_format": None, "flush_cache": False}
    return body if version is None else {**body, "weight_version": version}


async def slimes(plane: Plane, version: str, payloads: tuple[str, ...] = (GOOD, GOOD)) -> None:
    """slime's update of a colocated engine (update_weight_from_tensor.py at 624b824a8)."""
    await asked(plane, "/pause_generation")
    assert (await plane.node.get("/flush_cache")).status == 200
    for payload in payloads:
        await asked(plane, "/update_weights_from_tensor", bucket(version, payload))
    await asked(plane, "/continue_generation")


async def state(plane: Plane) -> tuple[Any, ...]:
    told = await plane.told()
    return told["version"], told["updating"], told["paused"]


async def test_slime_buckets_become_one_version(tmp_path: Path) -> None:
    async with opened(tmp_path) as plane:
        await asked(plane, "/pause_generation")
        assert await state(plane) == ("0", None, "retract")
        for _ in range(2):
            await asked(plane, "/update_weights_from_tensor", bucket("1"))
        assert await state(plane) == ("0", "1", "retract")
        with trio.move_on_after(0.3) as held:
            await sample(plane.engines, order([1]))
        assert held.cancelled_caught
        assert "'1'" in (await asked(plane, "/continue_generation"))["message"]
        assert await state(plane) == ("1", None, None)
        assert (await plane.told())["history"][0]["source"] == {"kind": "tensor", "buckets": "2"}
        for path in ("/get_weight_version", "/weight_version", "/model_info", "/get_model_info"):
            assert (await plane.node.get(path)).json()["weight_version"] == "1"
        assert (await sample(plane.engines, order([1])))[-1].version_spans[0].version == "1"


async def test_trainer_hangup_while_resuming(
    tmp_path: Path,
) -> None:
    """A trainer that hangs up while generation continues leaves no agent waiting."""
    async with opened(tmp_path) as plane:
        updates = NeverServed(
            weights=plane.weights, control=EngineControl(weights=plane.weights, keeps=False)
        )
        await updates.pause(PauseGeneration())
        assert (await state(plane))[2] == "retract"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(updates.resume)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert (await state(plane))[2] is None


class NeverServed(SglangUpdates):
    """Its weights take for ever."""

    async def _commit(self) -> None:
        await trio.sleep_forever()


async def test_restarted_trainer_counts_from_one(tmp_path: Path) -> None:
    """slime and AReaL do; a name is never given to other weights."""
    async with opened(tmp_path) as plane:
        await slimes(plane, "1")
        # ended in the middle of its second update
        await asked(plane, "/pause_generation")
        await asked(plane, "/update_weights_from_tensor", bucket("2"))
        await slimes(plane, "1")
        assert plane.engines.versions == ("0", "1", "1~2")
        await slimes(plane, "2")
        assert plane.engines.versions[-1] == "2"


async def test_unnamed_weights_get_own_version(tmp_path: Path) -> None:
    """AReaL names none: pause_generation twice, buckets, continue_generation (sglang_remote.py at
    cbff54d64).
    """
    async with opened(tmp_path) as plane:
        for number in (1, 2):
            await asked(plane, "/pause_generation")
            await asked(plane, "/pause_generation", {"mode": "in_place"})
            assert (await state(plane))[2] == "retract"
            await asked(plane, "/update_weights_from_tensor", bucket())
            await asked(plane, "/continue_generation")
            assert plane.engines.versions[-1] == f"unnamed-{number}"
        disk = {"model_path": str(TINY_MODEL), "abort_all_requests": True}
        done = await asked(plane, "/update_weights_from_disk", disk)
        assert (done["success"], done["num_paused_requests"]) == (True, 0)
        assert plane.engines.versions == ("0", "unnamed-1", "unnamed-2", "unnamed-3")


async def test_miles_session_of_buckets(tmp_path: Path) -> None:
    """miles/backends/megatron_utils/update_weight/update_weight_from_distributed/mixin.py at 31f1ca961; a
    restarted one too.
    """
    async with opened(tmp_path) as plane:
        for served in ("1", "1~2"):
            await asked(plane, "/pause_generation", {"mode": "in_place"})
            await asked(plane, "/begin_weight_update", {"selector": "all"})
            await asked(plane, "/update_weights_from_tensor", bucket("1") | {"selector": "all"})
            await asked(plane, "/update_weight_version", {"new_version": "1", "abort_all_requests": False})
            refused = await plane.node.post("/update_weight_version", {"new_version": "2"})
            assert (refused.status, refused.json()["success"]) == (409, False)
            await asked(plane, "/end_weight_update")
            assert await state(plane) == (served, None, "in_place")
            await asked(plane, "/continue_generation")
            assert await state(plane) == (served, None, None)


async def test_slime_checkpoint_keeps_its_version(tmp_path: Path) -> None:
    """slime/ray/actor_group.py at 624b824a8; its answer is read by `get_weight_version`."""
    async with opened(tmp_path) as plane:
        body = {"model_path": str(TINY_MODEL), "weight_version": "7"}
        await asked(plane, "/pause_generation")
        for _ in range(2):  # the second is of a broken connection
            await asked(plane, "/update_weights_from_disk", body)
        assert await state(plane) == ("7", None, "retract")
        await asked(plane, "/continue_generation")
        assert plane.engines.versions == ("0", "7")
        for wrong, status in (
            ({"model_path": "here"}, 400),
            ({"model_path": str(tmp_path)}, 400),
            ({"model_path": str(TINY_MODEL), "load_format": "dummy"}, 400),
            ({}, 400),
        ):
            refused = await plane.node.post("/update_weights_from_disk", wrong)
            assert (refused.status, refused.json()["success"]) == (status, False), refused.text
        assert await state(plane) == ("7", None, None)


async def test_failure_keeps_previous_weights(tmp_path: Path) -> None:
    async with opened(tmp_path) as plane:
        await slimes(plane, "1")
        await asked(plane, "/pause_generation")
        await asked(plane, "/update_weights_from_tensor", bucket("2"))
        other = await plane.node.post("/update_weights_from_tensor", bucket("3"))
        assert (other.status, "continue_generation serves it" in other.text) == (409, True)
        refused = await plane.node.post("/update_weights_from_tensor", bucket("2", BAD))
        assert (refused.status, refused.json()["success"]) == (400, False)
        assert await state(plane) == ("1", None, "retract")
        await asked(plane, "/continue_generation")
        assert await state(plane) == ("1", None, None)
        # without pause_generation one request is the whole model
        await asked(plane, "/update_weights_from_tensor", bucket("2"))
        assert plane.engines.versions == ("0", "1", "2")


async def test_silent_trainer_gets_timeout_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "IDLE_S", 0.3)
    async with opened(tmp_path) as plane:
        await asked(plane, "/pause_generation")
        await asked(plane, "/update_weights_from_tensor", bucket("1"))
        while plane.weights.status().updating is not None:  # noqa: ASYNC110 - a test looks from outside
            await trio.sleep(0.05)
        late = await plane.node.post("/continue_generation", {})
        assert (late.status, "was silent" in late.text) == (409, True)
        assert await state(plane) == ("0", None, None)  # and agents go on


async def test_groups_joined_and_left_like_slime(tmp_path: Path) -> None:
    """One group for each pipeline stage, and again under its name after a restart of the trainer."""
    async with opened(tmp_path) as plane:
        for stage in (0, 1, 1):
            body = {"master_address": "[::1]", "rank_offset": 1, "world_size": 2, "backend": "gloo"}
            # AReaL sends the port as text
            await asked(
                plane,
                "/init_weights_update_group",
                {**body, "master_port": "4000", "group_name": f"slime-pp_{stage}"},
            )
        await asked(plane, "/pause_generation")
        for stage in (0, 1):
            sent = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2, 2]], "weight_version": "1"}
            await asked(
                plane, "/update_weights_from_distributed", {**sent, "group_name": f"slime-pp_{stage}"}
            )
        unjoined = await plane.node.post("/update_weights_from_distributed", {**sent, "group_name": "other"})
        assert (unjoined.status, "no group 'other' is joined" in unjoined.text) == (409, True)
        await asked(plane, "/continue_generation")
        assert plane.engines.versions == ("0", "1")
        for stage, status in ((0, 200), (1, 200), (1, 400)):
            left = await plane.node.post("/destroy_weights_update_group", {"group_name": f"slime-pp_{stage}"})
            assert left.status == status
        bad = {"master_address": "a", "master_port": "x", "rank_offset": 1, "world_size": 2}
        assert (await plane.node.post("/init_weights_update_group", bad)).status == 400


async def test_refused_memory_release_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as plane:
        refused = await plane.node.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        assert (refused.status, "no memory to give back" in refused.text) == (409, True)
        assert await state(plane) == ("0", None, None)


async def test_server_info_that_slime_reads(tmp_path: Path) -> None:
    """Its `discover_external_engines` and `_sanity_check_server_args` read these (external.py,
    sglang_engine.py at 624b824a8).
    """
    async with opened(tmp_path) as plane:
        info = (await plane.node.get("/server_info")).json()
        assert info == (await plane.node.get("/get_server_info")).json()
        assert (info["tp_size"], info["pp_size"], info["num_gpus"], info["disaggregation_mode"]) == (
            1,
            1,
            1,
            "null",
        )
        assert (info["enable_memory_saver"], info["host"], info["model_path"]) == (
            False,
            "127.0.0.1",
            str(TINY_MODEL),
        )
        assert (await plane.node.get("/health_generate")).status == 200


async def test_unsupported_requests_get_a_sentence(tmp_path: Path) -> None:
    async with opened(tmp_path) as plane:
        for path, sentence in REFUSED.items():
            refused = await plane.node.post(path, {"text": "x"})
            assert (refused.status, refused.json()) == (400, {"success": False, "message": sentence})


async def test_token_may_be_a_password(tmp_path: Path) -> None:
    """What `requests` sends from a .netrc, and aiohttp from http://any:token@host."""
    async with opened(tmp_path) as plane:
        node = plane.node
        for user, given, status in (("any", "secret", 200), ("secret", "", 401), ("any", "other", 401)):
            basic = "Basic " + b64encode(f"{user}:{given}".encode()).decode()
            answer = await node.call("GET", "/weight_version", headers={"Authorization": basic})
            assert answer.status == status
        basic = "Basic " + b64encode(b"any:secret").decode()
        assert (await node.call("GET", "/v1/status", headers={"Authorization": basic})).status == 401
        assert (await node.call("GET", "/weight_version", headers={"Authorization": ""})).status == 401
