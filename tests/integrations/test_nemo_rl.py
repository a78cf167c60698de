"""NeMo RL's weights into a node, by the attribute that its `refit_policy_generation` asks a generation for
(NVIDIA-NeMo/RL, nemo_rl/algorithms/grpo.py at 7ea279a). NeMo RL is on no package index: its function is
written down here, as are the two things of its `setup` that are used.
"""

import pickle
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from attrs import define, field

from polarnode.client import ClientError
from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.errors import ConfigError
from polarnode.integrations import nemo_rl
from polarnode.integrations.nemo_rl import NodeWeights, attach, main


@define(eq=False)
class WeightsNode:
    """A node's weights routes: what was pushed, in order; `status` is what it answers."""

    version: str = "default"
    served: list[str] = field(factory=list)  # before
    pushed: list[tuple[str, str]] = field(factory=list)
    status: int = 200
    url: str = ""

    def answer(self, method: str, body: Any) -> tuple[int, Any]:
        if method == "POST" and self.status == 200:
            self.pushed.append((body["version"], body["source"]["path"]))
            self.version = body["version"]
        state: dict[str, Any] = {"version": self.version, "mode": "in_place", "source": {}, "seconds": 0.1}
        if method == "GET":
            state = {"version": self.version, "versions": ["0", *self.served], "history": []}
        return (
            self.status,
            state if self.status == 200 else {"error": {"type": "conflict", "message": "no"}},
        )


@pytest.fixture
def node() -> Iterator[WeightsNode]:
    found = WeightsNode()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            status, value = found.answer(self.command, read_json(self.rfile.read(length)) if length else None)
            data = dump_json(value)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _do

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@define(eq=False)
class Policy:
    """NeMo RL's Policy: `save_checkpoint` as its DTensor workers of version 2 write."""

    done: list[str]
    consolidated: bool = True
    asked: list[dict[str, Any]] = field(factory=list)

    def save_checkpoint(self, **asked: Any) -> None:
        self.asked.append(asked)
        self.done.append("saved")
        folder = Path(asked["weights_path"], "model", *(["consolidated"] if self.consolidated else []))
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")


def refit_policy_generation(policy: Any, generation: Any, colocated: bool, **more: Any) -> dict[str, float]:
    """NeMo RL's own: a synchronizer where the generation has one, else its transports."""
    synchronizer = getattr(generation, "weight_synchronizer", None)
    if synchronizer is not None:
        return synchronizer.sync_weights(timer=more.get("timer"), kv_scales=more.get("kv_scales")) or {}
    generation.done.append(f"refitted, colocated={colocated}")
    return {}


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `nemo_rl.algorithms.grpo`."""
    module = ModuleType("nemo_rl.algorithms.grpo")
    module.refit_policy_generation = refit_policy_generation  # type: ignore[attr-defined]
    parent = ModuleType("nemo_rl.algorithms")
    parent.grpo = module  # type: ignore[attr-defined]
    for name, each in (
        ("nemo_rl", ModuleType("nemo_rl")),
        ("nemo_rl.algorithms", parent),
        ("nemo_rl.algorithms.grpo", module),
    ):
        monkeypatch.setitem(sys.modules, name, each)
    return module


def config(**policy: Any) -> Any:
    dtensor = {"enabled": True, "_v2": True}
    generation = {"colocated": {"enabled": True}}
    return SimpleNamespace(
        policy={"dtensor_cfg": dtensor, "generation": generation} | policy,
        checkpointing={"enabled": True, "save_consolidated": False},
    )


def attached(node: WeightsNode, folder: Path, before: Any = None) -> tuple[list[str], Policy, Any]:
    done: list[str] = []
    policy, generation = Policy(done), SimpleNamespace(weight_synchronizer=before, done=done)
    attach(generation, policy, config(), url=node.url, folder=folder)
    return done, policy, generation


def test_each_refit_serves_its_checkpoint(node: WeightsNode, grpo: ModuleType, tmp_path: Path) -> None:
    done, policy, generation = attached(node, tmp_path)
    assert generation.weight_synchronizer.is_stale
    for _ in range(4):
        refit_policy_generation(policy, generation, True)
    assert not generation.weight_synchronizer.is_stale
    # before the policy leaves the GPU, its own workers still get the weights, and the node has them at the end
    assert done == ["saved", "refitted, colocated=True"] * 4
    assert node.pushed == [
        (str(version), str(tmp_path / f"version_{version}/model/consolidated")) for version in (1, 2, 3, 4)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_3", "version_4"]
    asked = policy.asked[0]["checkpointing_cfg"]
    assert asked == {
        "enabled": True,
        "save_consolidated": True,
        "model_save_format": "safetensors",
        "is_async": False,
    }
    assert "optimizer_path" not in policy.asked[0]


def test_second_run_continues_node_version(node: WeightsNode, grpo: ModuleType, tmp_path: Path) -> None:
    node.version, node.served = "unnamed-1", ["41", "7", "unnamed-1"]
    _, policy, generation = attached(node, tmp_path)
    refit_policy_generation(policy, generation, True)
    assert [version for version, _ in node.pushed] == ["42"]


def test_own_nemo_rl_synchronizer_still_runs(node: WeightsNode, grpo: ModuleType, tmp_path: Path) -> None:
    calls: list[str] = []
    own = SimpleNamespace(
        sync_weights=lambda **_: calls.append("synced") or {"bytes": 1.0},
        init_communicator=lambda: calls.append("opened"),
        shutdown=lambda: calls.append("closed"),
    )
    _, policy, generation = attached(node, tmp_path, own)
    generation.weight_synchronizer.init_communicator()
    assert refit_policy_generation(policy, generation, False) == {"bytes": 1.0}
    generation.weight_synchronizer.shutdown()
    assert calls == ["opened", "synced", "closed"]


def test_refused_weights_end_the_step(node: WeightsNode, grpo: ModuleType, tmp_path: Path) -> None:
    _, policy, generation = attached(node, tmp_path)
    node.status = 409
    with pytest.raises(ClientError):
        refit_policy_generation(policy, generation, True)
    assert generation.weight_synchronizer.is_stale
    policy.consolidated, node.status = False, 200
    with pytest.raises(ConfigError, match="save_consolidated: true"):
        refit_policy_generation(policy, generation, True)
    assert node.pushed == []


def test_pickled_generation_pushes_nothing(tmp_path: Path) -> None:
    weights = NodeWeights(url="http://127.0.0.1:1", folder=tmp_path, policy=object(), refit=print)
    assert pickle.loads(pickle.dumps(weights)) is None


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ({"dtensor_cfg": {"enabled": False, "_v2": True}}, "policy.megatron_cfg.enabled: false"),
        ({"dtensor_cfg": {"enabled": True, "_v2": False}}, "policy.dtensor_cfg._v2: true"),
        (
            {"dtensor_cfg": {"enabled": True, "_v2": True, "lora_cfg": {"enabled": True}}},
            "pushes whole checkpoints",
        ),
    ],
)
def test_unreadable_policy_checkpoints_are_refused(
    grpo: ModuleType, tmp_path: Path, policy: Any, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        attach(SimpleNamespace(), None, config(**policy), url="http://127.0.0.1:1", folder=tmp_path)


def test_nemo_rl_script_uses_node_weights(
    node: WeightsNode, grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `run_grpo_nemo_gym.py` does: it imports `setup`, and trains what that returns."""
    done: list[str] = []
    grpo.done, grpo.config = done, config()
    generation = SimpleNamespace(done=done)
    grpo.setup = lambda config, *rest, processor: (Policy(done), generation, None)
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from nemo_rl.algorithms.grpo import config, done, refit_policy_generation, setup\n"
        "done.append(sys.argv[1:])\n"
        "policy, generation, _ = setup(config, 'tokenizer', processor=None)\n"
        "refit_policy_generation(policy, generation, True)\n"
    )
    monkeypatch.setattr(sys, "argv", ["before"])
    weights = tmp_path / "weights"
    weights.mkdir()
    main(
        [str(script), "--config", "grpo.yaml"],
        {"POLARNODE_URL": node.url, "POLARNODE_WEIGHTS": str(weights)},
    )
    assert done == [["--config", "grpo.yaml"], "saved", "refitted, colocated=True"]
    assert [version for version, _ in node.pushed] == ["1"]


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ([], {"POLARNODE_WEIGHTS": "/w"}, "name the script"),
        (["run.py"], {}, "POLARNODE_WEIGHTS is not set"),
    ],
)
def test_missing_arguments_are_named(
    arguments: list[str], environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        main(arguments, environment)
    assert "nemo_rl.algorithms" not in vars(nemo_rl)
