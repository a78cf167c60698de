"""A trainer's tensors as buckets: by handle into another process, and by handle and by broadcast into a real
engine.
"""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from client_kit import here
from engine_reference import Reference, settings, temporary
from fakes_engine import joined, order, sample
from weights_kit import free_port, open_weights_plane

from polarnode.client import PolarnodeClient
from polarnode.client.tensors import broadcast_buckets, buckets, open_group, parts, payload

__all__ = ["temporary"]  # a fixture, asked for by name
pytestmark = pytest.mark.filterwarnings("default")  # torch and transformers warn of themselves

READER = """
import base64, pickle, sys
for line in sys.stdin:
    for name, tensor in pickle.loads(base64.b64decode(line)):
        print(name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item(), tensor.is_shared(), flush=True)
    print(flush=True)
"""


def test_tensors_go_in_parts_in_their_order() -> None:
    named = [
        (name, torch.zeros(size, dtype=torch.uint8))
        for name, size in (("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 5))
    ]
    assert [[name for name, _ in part] for part in parts(named, 6)] == [["a", "b"], ["c"], ["d", "e"]]
    assert list(parts([], 6)) == []


def test_a_payload_is_handles_that_another_process_reads_and_the_trainers_own_memory_stays() -> None:
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
def test_an_engine_takes_them_by_handle_and_by_broadcast(tmp_path: Path, temporary: Path) -> None:
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
        where: Any = {"address": "127.0.0.1", "port": free_port(), "world_size": 2, "backend": "gloo"}
        joining = threading.Thread(target=lambda: client.join_weights_group(**where))
        joining.start()
        group = open_group(**where)
        joining.join()
        sent = broadcast_buckets(weights_of(old), group, bucket_bytes=200_000)
        assert (
            client.push_weights("2", sent, kind="distributed", group="weights", mode="retract").version == "2"
        )
        assert answers() == old.greedy(prompt, 8)
        client.leave_weights_group()


def weights_of(reference: Reference) -> "list[tuple[str, torch.Tensor]]":
    """By the checkpoint's names: the head is the embedding, and is not in it twice."""
    return [
        (name, tensor) for name, tensor in reference.model.state_dict().items() if name != "lm_head.weight"
    ]
