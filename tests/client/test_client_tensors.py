"""A trainer's tensors as buckets: by handle into another process, and by handle and by broadcast into a real
engine.
"""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, field
from client_kit import here
from engine_reference import Reference, settings, temporary
from fakes_engine import joined, order, sample
from safetensors.torch import load, load_file
from weights_kit import open_weights_plane, simulated_tiny

from polarnode.client import ClientError, PolarnodeClient, Unreachable, WeightsReport
from polarnode.client.tensors import (
    WeightsGroup,
    buckets,
    parts,
    payload,
    push_adapter,
    push_tensors,
    save_checkpoint,
)
from polarnode.core.errors import Refused
from polarnode.engine.checkpoints import fingerprint, manifest
from polarnode.node.config import TINY_MODEL

__all__ = ["temporary"]  # a fixture, asked for by name
pytestmark = pytest.mark.filterwarnings("default")  # torch and transformers warn of themselves

READER = """
import base64, pickle, sys
for line in sys.stdin:
    for name, tensor in pickle.loads(base64.b64decode(line)):
        print(name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item(), tensor.is_shared(), flush=True)
    print(flush=True)
"""


def test_tensors_are_sent_in_order() -> None:
    named = [
        (name, torch.zeros(size, dtype=torch.uint8))
        for name, size in (("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 5))
    ]
    assert [[name for name, _ in part] for part in parts(named, 6)] == [["a", "b"], ["c"], ["d", "e"]]
    assert list(parts([], 6)) == []


def test_handles_open_in_other_process() -> None:
    """A process that is no child by fork, as an engine host is none."""
    weight = torch.nn.Parameter(torch.arange(200_000, dtype=torch.float32).reshape(2, -1))
    named = [("w", weight), ("b", torch.ones(3, dtype=torch.bfloat16)), ("t", weight.t()[:5])]
    before = torch.multiprocessing.get_sharing_strategy()
    made = payload(named)
    assert torch.multiprocessing.get_sharing_strategy() == before
    assert not weight.is_shared()
    assert len(made.text) < 3000, "numbers are not in it"
    done = subprocess.run(
        [sys.executable, "-c", READER], input=made.text + "\n", capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:3] == [
        f"w torch.float32 (2, 100000) {weight.double().sum().item()} True",
        "b torch.bfloat16 (3,) 3.0 True",
        f"t torch.float32 (5, 2) {weight.t()[:5].double().sum().item()} True",
    ]


@pytest.mark.engine
def test_engine_takes_handles_and_broadcast(tmp_path: Path, temporary: Path) -> None:
    """Read back through the engine: it answers as the weights that were sent."""
    prompt = list(range(100, 200))
    old, new = Reference(tmp_path / "old", seed=1), Reference(tmp_path / "new", seed=2)
    with here() as node:
        plane = node.open(open_weights_plane(settings(old, tmp_path), tmp_path / "journal"))
        client = PolarnodeClient(plane.node.url, token="secret")

        def answers() -> Any:
            return joined(node.do(lambda: sample(plane.engines, order(prompt))))

        assert (
            client.push_weights("1", buckets(weights_of(new), bucket_bytes=200_000), mode="retract").version
            == "1"
        )
        assert int(str(client.weights().history[0].source["buckets"])) > 2
        assert answers() == new.greedy(prompt, 8)
        group = WeightsGroup("127.0.0.1", backend="gloo")
        sending: Any = {
            "transport": "distributed",
            "group": group,
            "mode": "retract",
            "bucket_bytes": 200_000,
        }
        assert push_tensors(client, "2", weights_of(old), **sending).version == "2"
        assert answers() == old.greedy(prompt, 8)
        client.leave_weights_group()  # as after a restart of an engine: the group is joined again
        assert push_tensors(client, "3", new.model.state_dict(), **sending).version == "3"
        assert answers() == new.greedy(prompt, 8)
        group.leave(client)
        assert push_tensors(client, "4", old.model.state_dict(), transport="tensor", mode="retract").created
        assert answers() == old.greedy(prompt, 8)
        on_disk: Any = {"folder": tmp_path / "steps", "model": old.path, "mode": "retract"}
        served = push_tensors(client, "5", new.model.state_dict(), **on_disk)
        assert served.source == {"kind": "disk", "path": str(tmp_path / "steps" / "5")}
        assert answers() == new.greedy(prompt, 8)


# ── checkpoints ────────────────────────────────────────────────────────────────


def tiny() -> "dict[str, torch.Tensor]":
    """The tensors of the project's model, as a trainer holds them: in another type, the head
    beside the embedding.
    """
    named: dict[str, torch.Tensor] = {}
    for file in TINY_MODEL.glob("*.safetensors"):
        named |= {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    return {**named, "lm_head.weight": named["model.embed_tokens.weight"]}


def test_checkpoint_is_written_once_and_whole(tmp_path: Path) -> None:
    named = tiny()
    (tmp_path / ".writing-of-a-trainer-that-was-killed").mkdir()
    path, created = save_checkpoint(tmp_path, "a/7", named, model=TINY_MODEL, file_bytes=100_000)
    assert (path, created) == (tmp_path / "a_7", True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a_7"]
    assert len(list(path.glob("*.safetensors"))) > 2
    found, model = manifest(path), manifest(TINY_MODEL)
    assert found == model  # its types, and no second copy of what is tied
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        assert torch.equal(load_file(path / file)[name].bfloat16(), named[name])
    for file in ("config.json", "tokenizer.json"):
        assert (path / file).read_bytes() == (TINY_MODEL / file).read_bytes()
    before = fingerprint(path)
    again = save_checkpoint(tmp_path, "a/7", iter(named.items()), model=TINY_MODEL, file_bytes=100_000)
    assert (again, fingerprint(path)) == ((path, False), before)
    named["model.norm.weight"] = named["model.norm.weight"] + 1
    other, created = save_checkpoint(tmp_path, "a/7", named, model=TINY_MODEL)
    assert (other.name, created, fingerprint(path)) == ("a_7-2", True, before)
    with pytest.raises(Refused, match="give model="):
        save_checkpoint(tmp_path, "8", named, model=tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a_7", "a_7-2"]


def test_last_step_folders_are_kept(tmp_path: Path) -> None:
    """A version of other weights is the node's 409, and leaves no folder; the same weights are no update."""
    named, folder = tiny(), tmp_path / "steps"
    with here() as node:
        plane = node.open(open_weights_plane(simulated_tiny(tmp_path), tmp_path / "journal"))
        client = PolarnodeClient(plane.node.url, token="secret")
        (folder / "mine").mkdir(parents=True)
        for version in "1234":
            report = push_tensors(client, version, named, folder=folder, model=TINY_MODEL, keep=2)
            assert (report.created, report.source["path"]) == (True, str(folder / version))
        assert push_tensors(client, "4", named, folder=folder, model=TINY_MODEL).created is False
        other = {**named, "model.norm.weight": named["model.norm.weight"] + 1}
        with pytest.raises(ClientError) as refused:
            push_tensors(client, "4", other, folder=folder, model=TINY_MODEL)
        assert refused.value.status == 409
        assert sorted(each.name for each in folder.iterdir()) == ["3", "4", "mine"]
        with pytest.raises(Refused, match="give folder="):
            push_tensors(client, "5", named)
        with pytest.raises(Refused, match="group=WeightsGroup"):
            push_tensors(client, "5", named, transport="distributed")


@pytest.mark.parametrize(
    ("fails", "repeatable", "version"), [(0, True, "1"), (1, True, "1"), (1, False, None)]
)
def test_push_repeats_if_tensors_can(fails: int, repeatable: bool, version: str | None) -> None:
    """`fails`: how many buckets are taken before the connection breaks."""
    named = [(name, torch.zeros(8)) for name in "ab"]
    client = Breaking(fails)
    given: Any = named if repeatable else iter(named)
    if version is None:
        with pytest.raises(Unreachable):
            push_tensors(client, "1", given, transport="tensor", bucket_bytes=1)  # type: ignore[arg-type]
    else:
        push_tensors(client, "1", given, transport="tensor", bucket_bytes=1)  # type: ignore[arg-type]
    assert client.taken == ([fails, 2] if version else [fails])


@define
class Breaking:
    """A client whose first push breaks after so many buckets."""

    fails: int
    patience_s: float = 60.0
    taken: list[int] = field(factory=list)

    def push_weights(self, version: str, sent: Any, *, mode: str) -> WeightsReport:
        if not self.taken:
            self.taken.append(len(list(islice(sent, self.fails))))
            raise Unreachable("cut")
        self.taken.append(len(list(sent)))
        return WeightsReport(version=version, mode="in_place", source={}, seconds=0.0)


def weights_of(reference: Reference) -> "list[tuple[str, torch.Tensor]]":
    """By the checkpoint's names: the head is the embedding, and is not in it twice."""
    return [
        (name, tensor) for name, tensor in reference.model.state_dict().items() if name != "lm_head.weight"
    ]


# ── adapters ──────────────────────────────────────────────────────────────────


@define
class Sent:
    """In place of a client."""

    bodies: list[bytes] = field(factory=list)

    def send_adapter(self, name: str, version: str, body: bytes) -> None:
        assert (name, version) == ("run-a", "7")
        self.bodies.append(body)


def test_adapter_file_from_any_tensors() -> None:
    sent: Any = Sent()
    tensors = {"base_model.model.w.lora_A.weight": torch.arange(6.0).reshape(3, 2).t()}
    arrays = {name: each.contiguous().numpy() for name, each in tensors.items()}

    class Config:
        """As one of PEFT's."""

        def to_dict(self) -> dict[str, Any]:
            return {"r": 3, "target_modules": {"v_proj", "q_proj"}}

    push_adapter(sent, "run-a", "7", tensors, Config())
    push_adapter(sent, "run-a", "7", arrays.items(), {"r": 3, "target_modules": ["q_proj", "v_proj"]})
    for body in sent.bodies:
        (found,) = load(body).values()
        assert found.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
        head = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        told = json.loads(head["__metadata__"]["adapter_config"])
        assert told == {"r": 3, "target_modules": ["q_proj", "v_proj"]}
    with pytest.raises(Refused, match="give config="):
        push_adapter(sent, "run-a", "7", tensors)
