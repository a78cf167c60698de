"""The plug-in for prime-rl in verifiers' own code, on a stand-in for a node: verifiers finds the harness and the
taskset by their id, its environment server runs each task over ZMQ, and its client reads the episode; then the
requests of prime-rl's weight update. A program of its own, because importing verifiers takes long and changes the
process.

verifiers 0.4.0 lies in .venv/oracles; of what it imports and is not installed, an empty module stands in. With
`--prime-rl SRC` also prime-rl's own code behind it: the samples of each trace, GRPO's advantages, the packing and
the decoder of its trainer (run by hand on PrimeIntellect-ai/prime-rl 559b44772 with verifiers a60a606ec).
"""

import asyncio
import http.client
import importlib.util
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from areal_program import Absent
from attrs import evolve
from safetensors.torch import save_file
from trainers_kit import make_turn, one_row, publish, session_of_two_rows, session_without_rows, taught

from polarnode.client import ClientError
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.integrations.rollout_tasks import SessionLost

# what verifiers and prime-rl import and these functions do not use
UNUSED = (
    "prime_sandboxes",
    "tomli_w",
    "math_verify",
    "mcp",
    "wandb",
    "modelexpress",
    "vllm",
    "torchtitan",
    "ring_flash_attn",
)
PEFT_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
TASKS = ("one", "two", "sliced", "zero", "unscored", "lost", "wrong", "taught", "looped", "late")


def sliced(**more: Any) -> Trajectory:
    """A row of five turns, cut where it would be longer than nine tokens."""
    turns = [make_turn(0, None, [10, 11, 12], [20, 21])]
    for index in range(1, 5):
        turns.append(make_turn(index, turns[-1], [13, 14], [30 + index, 40 + index, 50 + index]))
    return publish(turns, config={"train_roles": ["main"], "max_row_tokens": 9}, **more)


SESSIONS = {
    "one": one_row(session_id="one"),
    "two": session_of_two_rows(session_id="two", reward=0.25, lineage_rewards={1: 0.0}),
    "sliced": sliced(session_id="sliced", reward=0.5),
    "zero": one_row(session_id="zero", reward=0.0),
    "late": evolve(one_row(session_id="late"), outcome=Outcome(status="timeout", clock="run")),
    "looped": evolve(one_row(session_id="looped"), outcome=Outcome(status="timeout", clock="repeats")),
    "taught": taught(one_row(session_id="taught")),
    "unscored": session_without_rows(session_id="unscored", status="failed"),
}


class StandIn:
    """A node for `shared_rollouts`."""

    tasks: list[Any] = []  # noqa: RUF012

    def __init__(self, settings: Any) -> None:
        self.client = SimpleNamespace(trajectory=self.trajectory)

    async def session(self, spec: Any) -> Trajectory:
        self.tasks.append(spec)
        if spec.instruction == "lost":
            raise SessionLost("session lost-0 was lost: the container ended")
        return SESSIONS[spec.instruction]

    async def trajectory(self, session_id: str, *, turns: str) -> Trajectory:
        assert turns == "full"
        return SESSIONS[session_id]


async def episodes(config: Any) -> dict[str, Any]:
    """The episode of each task, as prime-rl's orchestrator gets it."""
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.serve import EnvClient
    from verifiers.v1.serve.server import EnvServer
    from verifiers.v1.types import SamplingConfig
    from verifiers.v1.utils.loaders import load_taskset

    server = EnvServer(config, address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(address=server.address)
    await client.wait_for_server_startup(timeout=30)
    found = {}
    sampling = SamplingConfig(temperature=0.5, top_p=1.0, logprobs=True, max_completion_tokens=64, extra_body={"top_k": -1})  # fmt: skip
    try:
        for task in load_taskset(config.taskset):
            found[task.data.polarnode["instruction"]] = await client.run(
                task_data=task.data.model_dump(mode="json"),
                client=EvalClientConfig(base_url="http://127.0.0.1:1/v1"),
                model="m",
                sampling=sampling,
            )
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return found


def told(episode: Any) -> dict[str, Any]:
    [trace] = episode.traces
    return {
        "ok": episode.ok,
        "errors": [f"{error.type}: {error.message}" for error in trace.errors],
        "reward": trace.reward,
        "truncated": [trace.stop_condition, trace.is_truncated],
        "turns": trace.num_turns,
        "output_tokens": trace.num_output_tokens,
        "branches": [
            {
                "ids": one.token_ids,
                "mask": one.sampled_mask,
                "logprobs": one.logprobs,
                "reference": one.reference_logprobs,
            }
            | {"experts": None if one.routed_experts is None else list(one.routed_experts.shape)}
            for one in trace.branches
        ],
        "info": trace.info,
    }


def behind(source: str, found: dict[str, Any]) -> dict[str, Any]:
    """What prime-rl makes of these episodes as one group."""
    sys.path.insert(0, source)
    taken = importlib.import_module
    grpo, routing = taken("prime_rl.orchestrator.algo.grpo"), taken("prime_rl.orchestrator.algo.routing")
    sink, batch = taken("prime_rl.orchestrator.train_sink"), taken("prime_rl.trainer.batch")
    samples_of = taken("prime_rl.orchestrator.trajectories").trace_to_samples
    algorithm = grpo.GRPOAlgorithm(SimpleNamespace(length_penalty=None), None)
    group = list(found.values())
    asyncio.run(algorithm.finalize_group(group))
    samples = []
    for episode in group:
        for trace in episode.traces:
            if trace.has_error:
                continue
            for sample in samples_of(trace, env_name="polarnode"):
                sample.temperatures = [0.5] * len(sample.token_ids)
                routing.stamp_loss_routing(sample, algorithm.action_loss_type)
                if sink._prune_zero_advantages(sample):
                    samples.append(sample)
    cost = batch.build_bin_cost(None)
    [grid] = batch.prepare_batch(samples, seq_len=32, num_train_workers=1, bin_cost=cost)
    import msgspec

    types = taken("prime_rl.transports.rollouts.types")
    sent = msgspec.msgpack.Encoder().encode(grid)
    grid = msgspec.msgpack.Decoder(type=list[types.MicroBatch]).decode(sent)
    return {
        "samples": [[len(each.token_ids), sum(each.mask)] for each in samples],
        "trained": [
            [token, advantage, logprob]
            for micro in grid
            for token, on, advantage, logprob in zip(
                micro.input_ids, micro.loss_mask, micro.advantages, micro.inference_logprobs, strict=True
            )
            if on
        ],
    }


class NodeOfWeights:
    """The client of a node for the relay."""

    served: list[Any] = []  # noqa: RUF012

    def weights(self) -> Any:
        return SimpleNamespace(version="0")

    def update_weights(self, version: str, *, path: Path, mode: str) -> None:
        if "step_9" in version:
            raise ClientError("a tensor is missing", status=400, type="invalid")
        self.served.append([version, mode, sorted(each.name for each in path.iterdir())])

    def push_adapter(self, name: str, version: str, named: Any, *, config: Any) -> None:
        self.served.append([version, name, sorted(named), config["r"]])


def relayed(plugin: Any) -> list[Any]:
    """What prime-rl's orchestrator gets: its start, an update, and updates that a node cannot follow."""
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text("{}")
        for step, marked in ((3, True), (4, False), (9, True)):
            broadcast = Path(folder, f"broadcasts/step_{step}")
            broadcast.mkdir(parents=True)
            if step == 3:  # as a broadcast of LoRA, too
                names = ("model.layers.0.self_attn.q_proj.lora_A.weight", PEFT_NAME)
                save_file({name: torch.zeros(1) for name in names}, broadcast / "adapter_model.safetensors")
                (broadcast / "adapter_config.json").write_text('{"r": 8}')
            if marked:
                (broadcast / "STABLE").touch()
                os.utime(broadcast / "STABLE", (1700000000, 1700000000))
        plugin.push_adapter = NodeOfWeights.push_adapter
        relay = plugin.WeightRelay(NodeOfWeights(), model, "r")
        with plugin.serve(relay, "127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            ask = http.client.HTTPConnection("127.0.0.1", server.server_port)
            requests: list[tuple[str, str, Any]] = [("GET", "/health", None), ("GET", "/v1/models", None), ("POST", "/pause?mode=keep&clear_cache=false", None)]  # fmt: skip
            requests += [
                ("POST", "/update_weights", {"weight_dir": f"{folder}/broadcasts/step_{step}"})
                for step in (3, 4, 9)
            ]
            requests += [
                ("POST", "/update_weights", {"weight_dir": None}),
                ("POST", "/resume", None),
                ("POST", "/init_broadcaster", {"host": "h"}),
                *(
                    (
                        "POST",
                        "/load_lora_adapter",
                        {"lora_name": "a", "lora_path": f"{folder}/broadcasts/step_{step}"},
                    )
                    for step in (3, 4)
                ),
            ]
            for method, path, body in requests:
                ask.request(method, path, None if body is None else json.dumps(body))
                answer = ask.getresponse()
                answers.append([answer.status, answer.read().decode().replace(folder, "")])
            server.shutdown()
    return answers


def main() -> None:
    output, sys.stdout = sys.stdout, sys.stderr
    if "verifiers" not in sys.modules and importlib.util.find_spec("verifiers") is None:
        sys.path.append(str(Path(sys.prefix) / "oracles"))
    absent = [name for name in UNUSED if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Absent(absent))
    from verifiers.v1.utils.loaders import resolve_env_config

    import polarnode.integrations.prime_rl as plugin

    plugin.shared_rollouts = StandIn  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder, "tasks.jsonl")
        lines = [{"instruction": name} | ({"budgets": {"run_s": -1}} if name == "wrong" else {}) for name in TASKS]  # fmt: skip
        tasks.write_text("\n".join(map(json.dumps, lines)))
        given = {
            "taskset": {"id": "polarnode", "tasks": str(tasks)},
            "agent": {
                "harness": {"id": "polarnode", "task": {"harness": {"name": "pi"}}, "run": "r"},
                "runtime": {"type": "subprocess"},
            },
        }
        found = asyncio.run(episodes(resolve_env_config(given)))
    answer: dict[str, Any] = {
        "episodes": {name: told(episode) for name, episode in found.items()},
        "tasks": [
            [
                each.instruction,
                each.num_samples,
                each.sampling.temperature,
                each.sampling.max_tokens,
                each.sampling.frequency_penalty,
            ]
            for each in StandIn.tasks
        ],
        "relayed": relayed(plugin),
        "served": NodeOfWeights.served,
    }
    if "--prime-rl" in sys.argv:
        answer["prime_rl"] = behind(sys.argv[sys.argv.index("--prime-rl") + 1], found)
    json.dump(answer, output)


if __name__ == "__main__":
    main()
