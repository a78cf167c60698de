"""A trainer's way to a node's adapters, over HTTP, on a simulated engine: a version is whole, written down and
served, or the one before is; also after a restart.
"""

import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from adapters_kit import write_adapter
from fakes_engine import order, sample
from safetensors.numpy import load_file, save
from weights_kit import Plane, disk, open_weights_plane, simulated_tiny

from polarnode.core.errors import ConfigError, JournalError
from polarnode.engine import adapter_store
from polarnode.engine.weights import Weights
from polarnode.http import server
from polarnode.node.config import TINY_MODEL


@asynccontextmanager
async def opened(folder: Path, *, lora_rank: int = 8) -> AsyncIterator[Plane]:
    with trio.fail_after(60):
        settings = simulated_tiny(folder / "state", lora_rank=lora_rank)
        async with open_weights_plane(settings, folder / "journal") as plane:
            yield plane


def new(name: str, version: str, path: Path) -> dict[str, Any]:
    return {"name": name, "version": version, "source": disk(path)}


def packed(folder: Path, **metadata: str) -> bytes:
    """The body of a PUT."""
    text = (folder / "adapter_config.json").read_text()
    return save(load_file(folder / "adapter_model.safetensors"), {"adapter_config": text} | metadata)


async def send(plane: Plane, name: str, version: str, body: bytes) -> Any:
    return await plane.node.call("PUT", f"/v1/adapters/{name}/versions/{version}", body=body)


async def told(plane: Plane) -> dict[str, Any]:
    found: dict[str, Any] = (await plane.node.get("/v1/adapters")).json()
    return found


async def sampled_by(plane: Plane, name: str) -> str:
    chunks = await sample(plane.engines, order(max_tokens=2, adapter=name))
    return str(chunks[-1].version_spans[0].version)


async def test_adapter_is_copied_served_and_remembered(tmp_path: Path) -> None:
    first, second = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", seed=2)
    async with opened(tmp_path) as plane:
        answer = await plane.node.post("/v1/adapters", new("a", "a-1", first))
        assert (answer.status, answer.json()["created"]) == (201, True), answer.text
        assert answer.json()["source"] == {"kind": "adapter", "adapter": "a", "base": "0", "path": str(first)}
        again = await plane.node.post("/v1/adapters", new("a", "a-1", first))
        assert (again.status, again.json()) == (200, answer.json() | {"created": False})
        shutil.rmtree(first)  # the node has its own
        sent = await send(plane, "a", "a-2", packed(second))
        assert (sent.status, sent.json()["version"]) == (201, "a-2"), sent.text
        assert (await send(plane, "a", "a-2", packed(second))).status == 200
        assert (await send(plane, "b", "b-1", packed(second))).status == 201
        assert [await sampled_by(plane, name) for name in ("", "a", "b")] == ["0", "a-2", "b-1"]
        state = await told(plane)
        assert [(each["name"], each["version"], each["warning"]) for each in state["adapters"]] == [
            ("a", "a-2", None),
            ("b", "b-1", None),
        ]
        assert (state["updates"], state["lora_rank"]) == (3, 8)
        assert (await plane.told())["history"] == [], "they are no updates of the base"
    async with opened(tmp_path) as plane:
        assert plane.reports == [
            "serving version 'b-1' of adapter 'b'",
            "serving version 'a-2' of adapter 'a'",
        ]
        assert await sampled_by(plane, "a") == "a-2"
        # what nobody can be asked for again takes no room
        assert [each.name for each in (tmp_path / "adapters" / "a").iterdir()] == ["a-2"]
        assert (await send(plane, "a", "a-2", packed(second))).json()["created"] is False


async def test_version_names_one_adapter_forever(tmp_path: Path) -> None:
    one, other = packed(write_adapter(tmp_path / "1")), packed(write_adapter(tmp_path / "2", seed=2))
    async with opened(tmp_path) as plane:
        assert (await send(plane, "a", "1", one)).status == 201
        for name, version, body, why in (
            ("a", "1", other, "version '1' named other weights"),
            ("b", "1", one, "version '1' named other weights"),
            ("a", "0", one, "version '0' is that of the base weights"),
        ):
            refused = await send(plane, name, version, body)
            assert (refused.status, why in refused.text) == (409, True), refused.text
        assert (await send(plane, "a", "2", other)).status == 201
        refused = await send(plane, "a", "1", one)
        assert (refused.status, "was served before and another is now" in refused.text) == (409, True)
        refused = await plane.node.post("/v1/weights", {"version": "3", "source": disk(TINY_MODEL)})
        assert (refused.status, "DELETE /v1/adapters" in refused.text) == (409, True), refused.text
        assert (await plane.node.call("DELETE", "/v1/adapters/a")).json()["version"] == "2"
        assert (await plane.node.call("DELETE", "/v1/adapters/a")).status == 404
        refused = await plane.node.post("/v1/weights", {"version": "1", "source": disk(TINY_MODEL)})
        assert (refused.status, "is one of adapter 'a'" in refused.text) == (409, True), refused.text
        assert (
            await plane.node.post("/v1/weights", {"version": "3", "source": disk(TINY_MODEL)})
        ).status == 201
        assert (await send(plane, "a", "2", other)).status == 409, "it was deleted"
    async with opened(tmp_path) as plane:
        assert (plane.reports, (await told(plane))["adapters"]) == ([], [])
        assert list((tmp_path / "adapters").iterdir()) == []


async def test_invalid_adapter_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write_adapter(tmp_path / "good")
    async with opened(tmp_path) as plane:
        assert (await send(plane, "a", "1", packed(good))).status == 201
        for name, version, body, why in (
            ("a", "2", packed(write_adapter(tmp_path / "large", rank=16)), "rank"),
            ("a", "2", b"nothing", "no safetensors file"),
            ("a", "2", packed(good)[:-9], "is cut"),
            ("a", "2", save(load_file(good / "adapter_model.safetensors")), "adapter_config"),
            ("a", "2", packed(good, adapter_config="{"), "adapter_config.json"),
            ("a%2F", "2", packed(good), "nothing is served at this path"),
            ("-a", "2", packed(good), "name must be 1 to 64"),
            ("a", "x%20y", packed(good), "version must be 1 to 128"),
        ):
            refused = await send(plane, name, version, body)
            assert (refused.status in (400, 404), why in refused.text) == (True, True), refused.text
        for path, why in ((tmp_path / "no", "PEFT's save_pretrained"), (Path("here"), "must be an absolute")):
            refused = await plane.node.post("/v1/adapters", new("a", "2", path))
            assert (refused.status, why in refused.text) == (400, True), refused.text
        monkeypatch.setattr(adapter_store, "MOST_BYTES", 1000)
        refused = await send(plane, "a", "2", packed(good))
        assert (refused.status, "at most 1000 are taken" in refused.text) == (400, True)
        monkeypatch.undo()
        plane.adapters.reserve = 1 << 60
        refused = await send(plane, "a", "2", packed(good))
        assert (refused.status, "disk_reserve_mb" in refused.text) == (507, True)
        assert await sampled_by(plane, "a") == "1"
        assert [each.name for each in (tmp_path / "adapters").rglob("*") if each.is_dir()] == ["a", "1"]
        assert (await told(plane))["updates"] == 1
    async with opened(tmp_path / "none", lora_rank=0) as plane:
        refused = await send(plane, "a", "1", packed(good))
        assert (refused.status, "lora_rank" in refused.text) == (409, True)


async def test_only_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write_adapter(tmp_path / "good")

    def beside(name: str, make: Callable[[Path], object], file: str = "adapter_model.safetensors") -> Path:
        shutil.copytree(good, tmp_path / name)
        (tmp_path / name / file).unlink()
        make(tmp_path / name / file)
        return tmp_path / name

    async with opened(tmp_path) as plane:
        for path, why in (
            (beside("zero", lambda file: file.symlink_to("/dev/zero")), "no regular file"),
            (beside("pipe", os.mkfifo), "no regular file"),
            (beside("folder", Path.mkdir), "no regular file"),
            (beside("socket", lambda file: bound(file)), "cannot be read"),
            (beside("config", os.mkfifo, "adapter_config.json"), "no regular file"),
            (beside("gone", lambda file: file.symlink_to("nowhere")), "cannot be read"),
            (beside("proc", lambda file: file.symlink_to("/proc/self/maps")), "safetensors"),
            (beside("head", lambda file: file.write_bytes(LARGE_HEAD)), "at most 1048576 are read"),
        ):
            refused = await plane.node.post("/v1/adapters", new("a", "1", path))
            assert (refused.status, why in refused.text) == (400, True), refused.text
        assert list((tmp_path / "adapters").iterdir()) == [], "refused ones leave no folders"
        linked = beside("linked", lambda file: file.symlink_to(good / file.name))
        assert (await plane.node.post("/v1/adapters", new("a", "1", linked))).status == 201
        monkeypatch.setattr(adapter_store, "MOST_BYTES", 100)
        grows = beside("grows", lambda file: file.symlink_to("/proc/self/maps"))
        refused = await plane.node.post("/v1/adapters", new("a", "2", grows))
        assert (refused.status, "at most 100 are taken" in refused.text) == (400, True), (
            "its size is said as 0"
        )
    pipe = tmp_path / "weights" / "model.safetensors"
    shutil.copytree(TINY_MODEL, pipe.parent)
    pipe.unlink()
    os.mkfifo(pipe)
    async with opened(tmp_path / "other") as plane:
        refused = await plane.node.post("/v1/weights", {"version": "2", "source": disk(pipe.parent)})
        assert (refused.status, "model.safetensors is no regular file" in refused.text) == (400, True)
        again = await plane.node.post("/v1/weights", {"version": "3", "source": disk(TINY_MODEL)})
        assert again.status == 201, again.text


LARGE_HEAD = (2 << 20).to_bytes(8, "little") + b'{"a":[' + b"[]," * 700_000


def bound(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(file))


async def test_upload_streams_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size, and never whole in memory; a client that is refused can read why."""
    monkeypatch.setattr(server, "MAX_BUFFERED_BYTES", 1 << 16)
    monkeypatch.setattr("polarnode.api.app.BODY_BYTES", 1 << 16)
    big = packed(write_adapter(tmp_path / "1"), filling="x" * (900 << 10))
    async with opened(tmp_path) as plane:
        held = []
        room = server.StreamedBody.wait_room

        async def watched(self: Any) -> None:
            await room(self)
            held.append(len(self._data))

        monkeypatch.setattr(server.StreamedBody, "wait_room", watched)
        assert (await send(plane, "a", "1", big)).status == 201
        assert max(held) <= 1 << 16
        assert (await send(plane, "-", "1", big)).status == 400
        refused = await plane.node.call(
            "PUT", "/v1/adapters/a/versions/2", body=big, headers={"Authorization": "Bearer wrong"}
        )
        assert refused.status == 401
        assert (await plane.node.post("/v1/adapters", {"name": "x" * (1 << 17)})).status == 413


async def test_killed_node_leftovers_are_swept(tmp_path: Path) -> None:
    first, second = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", seed=2)
    async with opened(tmp_path) as plane:
        assert (await send(plane, "run-a", "1", packed(first))).status == 201
    files = tmp_path / "adapters"
    shutil.copytree(second, files / ".incoming-run-a-0123456789abcdef")  # an upload
    shutil.copytree(
        second, files / "run-a" / "2"
    )  # whole, but it was not written down: nothing was sampled by it
    shutil.copytree(second, files / "run-b" / "1")
    async with opened(tmp_path) as plane:
        swept = "a version of adapter {!r} was not served yet when the node ended, and its files are removed"
        assert [each.partition(":")[0] for each in plane.reports[:-1]] == [
            swept.format(name) for name in ("run-a", "run-a", "run-b")
        ]
        assert await sampled_by(plane, "run-a") == "1"
        assert sorted(str(each.relative_to(files)) for each in files.rglob("*") if each.is_dir()) == [
            "run-a",
            "run-a/1",
        ]
        assert (await send(plane, "run-a", "2", packed(second))).status == 201


async def test_damaged_adapter_is_named_alone(tmp_path: Path) -> None:
    bodies = {name: packed(write_adapter(tmp_path / name, seed=ord(name))) for name in "abc"}
    async with opened(tmp_path) as plane:
        for name, body in bodies.items():
            assert (await send(plane, name, f"{name}-1", body)).status == 201
    damaged = tmp_path / "adapters" / "a" / "a-1" / "adapter_model.safetensors"
    changed = bytearray(damaged.read_bytes())
    changed[-1] ^= 1
    damaged.write_bytes(changed)
    shutil.rmtree(tmp_path / "adapters" / "b")
    async with opened(tmp_path) as plane:
        state = {each["name"]: each for each in (await told(plane))["adapters"]}
        assert "damaged files" in state["a"]["warning"]
        assert "is gone" in state["b"]["warning"]
        assert (state["c"]["version"], state["c"]["warning"]) == ("c-1", None)
        assert plane.engines.adapters.refusal("a") == state["a"]["warning"]
        assert await sampled_by(plane, "c") == "c-1"
        again = await send(plane, "a", "a-1", bodies["a"])
        assert (again.status, await sampled_by(plane, "a")) == (201, "a-1"), again.text
        assert (await plane.node.call("DELETE", "/v1/adapters/b")).status == 200
    async with opened(tmp_path) as plane:
        assert [each["name"] for each in (await told(plane))["adapters"]] == ["c", "a"]
    async with opened(tmp_path, lora_rank=0) as plane:
        assert all("lora_rank" in each["warning"] for each in (await told(plane))["adapters"])


async def test_version_is_journaled_before_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, other = packed(write_adapter(tmp_path / "1")), packed(write_adapter(tmp_path / "2", seed=2))
    async with opened(tmp_path) as plane:
        assert (await send(plane, "a", "1", body)).status == 201
        seen = []

        async def written(*_: Any) -> None:
            seen.append(await sampled_by(plane, "a"))
            raise JournalError("the disk is gone")

        monkeypatch.setattr(Weights, "write_down", written)
        assert (await send(plane, "a", "2", other)).status == 500
        assert (seen, await sampled_by(plane, "a")) == (["1"], "1")
        assert not (tmp_path / "adapters" / "a" / "2").exists()
        assert (await told(plane))["updates"] == 1


async def test_areal_names_each_adapter_version(tmp_path: Path) -> None:
    """As `areal/engine/sglang_remote.py` sends it, generation held meanwhile."""
    async with opened(tmp_path) as plane:

        async def load(name: str, folder: Path) -> Any:
            await plane.node.post("/pause_generation", {})
            body = {"lora_name": name, "lora_path": str(folder)}
            answer = await plane.node.post("/load_lora_adapter", body)
            await plane.node.post("/continue_generation", {})
            return answer

        first, second = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", seed=2)
        for name, folder, version in (
            ("actor-v1", first, "actor-v1"),
            ("actor-v2", second, "actor-v2"),
            ("actor-v2", second, "actor-v2"),  # a broken connection
            ("actor-v1", second, "actor-v1~2"),  # a trainer that starts again
        ):
            answer = await load(name, folder)
            assert (answer.status, answer.json()["success"]) == (200, True), answer.text
            assert await sampled_by(plane, "actor") == version
        refused = await load("actor-v3", tmp_path)
        assert (refused.status, refused.json()["success"]) == (400, False)
        assert (await plane.node.post("/unload_lora_adapter", {"lora_name": "actor"})).status == 200
        assert (await plane.node.post("/unload_lora_adapter", {"lora_name": "actor"})).status == 400


async def test_configured_adapters_serve_until_replaced(tmp_path: Path) -> None:
    """The adapters of the settings are served until others come."""
    first = write_adapter(tmp_path / "1")
    reports: list[str] = []
    names = set()
    for _ in range(2):  # a restart serves the same version
        async with opened(tmp_path) as plane:
            await plane.adapters.serve_from_start({"a": str(first)}, reports.append)
            names.add(await sampled_by(plane, "a"))
            with pytest.raises(ConfigError, match=r"adapters.b: .*cannot be read"):
                await plane.adapters.serve_from_start({"b": str(tmp_path / "none")}, reports.append)
    (name,) = names
    assert name.startswith("a-")
    async with opened(tmp_path) as plane:
        second = write_adapter(tmp_path / "2", seed=2)
        assert (await plane.node.post("/v1/adapters", new("a", "a-2", second))).status == 201
        await plane.adapters.serve_from_start({"a": str(first)}, reports.append)
        assert await sampled_by(plane, "a") == "a-2"
    assert reports[-1].startswith("adapter 'a' stays at version 'a-2'")


async def test_hosts_find_relative_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `.polarnode`, the default, is relative; hosts work in folders of their own
    write_adapter(tmp_path / "1")
    async with opened(Path()) as plane:
        await plane.adapters.serve_from_start({"a": "1"}, print)
        assert (await sampled_by(plane, "a")).startswith("a-")


async def test_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    """It would sample from a policy that nobody trains: its base was updated, or restored, since."""
    step = tmp_path / "step-9"
    shutil.copytree(TINY_MODEL, step)
    own = packed(write_adapter(tmp_path / "own"))
    by_folder = packed(write_adapter(tmp_path / "folder", base_model_name_or_path=str(step)))
    by_version = packed(write_adapter(tmp_path / "version", base_model_name_or_path="9"))
    unnamed = packed(write_adapter(tmp_path / "unnamed", base_model_name_or_path=None))
    async with opened(tmp_path) as plane:
        await plane.update("9", disk(step))
        for number, body in enumerate((own, unnamed)):
            answer = await send(plane, "a", f"a-{number}", body)
            assert answer.status == 409, answer.text
            assert "the node serves the weights '9'" in answer.text
        for name, body in (("b", by_folder), ("c", by_version)):
            assert (await send(plane, name, f"{name}-1", body)).status == 201
            assert (await plane.node.call("DELETE", f"/v1/adapters/{name}")).status == 200
        await plane.update("10", disk(TINY_MODEL))  # the node's own again
        for name, body in (("b", by_folder), ("c", by_version)):
            assert (await send(plane, name, f"{name}-2", body)).status == 409
        assert (await send(plane, "a", "a-2", own)).status == 201
        [state] = (await told(plane))["adapters"]
        assert state["versions"] == ["a-2"]


@pytest.mark.parametrize("base", ["ba\0se", "x" * 20_000])
async def test_invalid_base_path_is_another_name(tmp_path: Path, base: str) -> None:
    step = tmp_path / "step-9"
    shutil.copytree(TINY_MODEL, step)
    body = packed(write_adapter(tmp_path / "1", base_model_name_or_path=base))
    async with opened(tmp_path) as plane:
        await plane.update("9", disk(step))
        answer = await send(plane, "a", "a-1", body)
        assert answer.status == 409, answer.text
        assert "the node serves the weights '9'" in answer.text
        assert len(answer.text) < 1000
        await plane.update("10", disk(TINY_MODEL))
        assert (await send(plane, "a", "a-1", body)).status == 201
