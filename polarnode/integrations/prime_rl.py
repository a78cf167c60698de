"""prime-rl: a verifiers harness that runs a task on a polarnode, a taskset of polarnode's tasks, and a
stand-in for prime-rl's inference server that brings its weights to the node.

    [[orchestrator.train.source]]
    env.taskset = { id = "polarnode", tasks = "tasks.jsonl" }
    env.agent.runtime = { type = "subprocess" }
    env.agent.harness = { id = "polarnode", task = "task.toml" }

    python -m polarnode.integrations.prime_rl --model /models/Qwen3-1.7B --port 8100

Contract: PrimeIntellect-ai/prime-rl 559b44772 (0.8.0) and PrimeIntellect-ai/verifiers a60a606ec, its
submodule; also verifiers 0.4.0. verifiers finds a plug-in by the name of an installed package and its
`__all__`, so `polarnode` itself names the two classes.

The harness makes no model call of verifiers': it fills the trace's message graph with the ids, masks and
logprobs that the node recorded, a branch for each row (`polarnode.trainers.prime_rl.trace_nodes`). prime-rl
makes one sample of each branch and compares rewards by trace, so by session.
"""

import logging
import shutil
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import orjson
from attrs import frozen
from verifiers.v1 import Harness, HarnessConfig, Task, TaskData, Taskset, TasksetConfig
from verifiers.v1.errors import HarnessError, SandboxError
from verifiers.v1.graph import MessageNode
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.trace import ModelCall, Trace
from verifiers.v1.types import Usage

from polarnode.client import ClientError, PolarnodeClient, Unreachable
from polarnode.client.tensors import push_adapter
from polarnode.core.codec.json import plain
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.integrations.rollout_tasks import (
    WHOLE_GROUP_FIELDS,
    SessionLost,
    plugin_settings,
    shared_rollouts,
    task_of,
)
from polarnode.trainers.prime_rl import trace_nodes
from polarnode.trainers.rows import rows_of as trained_rows
from polarnode.trainers.rows import versions_of

__all__ = ["PolarnodeHarness", "PolarnodeTaskset"]

log = logging.getLogger(__name__)

REWARD: Final = "polarnode"  # the name of the node's reward among a trace's rewards
KNOWN_FINISHES: Final = frozenset({"stop", "length", "tool_calls"})  # verifiers knows no other reasons
# What verifiers calls a run that a budget ended. Its `is_truncated` knows these names alone, and it has none
# for time or for turns that repeat.
TRUNCATED: Final = {
    "turns": "max_turns",
    "repeats": "max_turns",
    "run": "max_turns",
    "tokens": "max_total_tokens",
}
# The fields of a sampling configuration in verifiers that a node takes; its extras are vLLM's.
SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)

# What to use in prime-rl in place of a task's settings of whole groups, because here each rollout is a task
# of its own.
OWN_GROUPS: Final = dict.fromkeys(
    WHOLE_GROUP_FIELDS, "use the filters and the group_size of prime-rl's orchestrator, which has the groups"
)
PEFT_PREFIX: Final = "base_model.model."  # the prefix of PEFT's tensor names

# ── tasks ─────────────────────────────────────────────────────────────────────


class PolarnodeTaskData(TaskData):  # type: ignore[misc]
    """A whole polarnode task, in the form in which it travels to the environment's server."""

    polarnode: dict[str, Any] = {}  # noqa: RUF012


class PolarnodeTask(Task[PolarnodeTaskData]):  # type: ignore[misc]
    """A task whose reward is the node's."""


class PolarnodeTasksetConfig(TasksetConfig):  # type: ignore[misc]
    """`tasks`: a JSONL file. Each line has a task, or the part of a task that the harness's `task` leaves
    out.
    """

    tasks: Path


class PolarnodeTaskset(Taskset[PolarnodeTask, PolarnodeTasksetConfig]):  # type: ignore[misc]
    """The tasks of a file, in its order."""

    def load(self) -> Iterable[PolarnodeTask]:
        for index, line in enumerate(self.config.tasks.read_bytes().splitlines()):
            task = orjson.loads(line)
            if not isinstance(task, dict) or not isinstance(task.get("instruction"), str):
                raise Refused(f"{self.config.tasks}: line {index + 1} is no task with an instruction")
            data = PolarnodeTaskData(idx=index, prompt=task["instruction"], polarnode=task)
            yield PolarnodeTask(data, self.config.task)


# ── sessions ──────────────────────────────────────────────────────────────────


class PolarnodeHarnessConfig(HarnessConfig):  # type: ignore[misc]
    """`url`, `task`, `run` and `patience_s`: see `plugin_settings`. The token is POLARNODE_TOKEN, because
    prime-rl writes its configuration into logs. `reward`: whether the node's reward is one of the trace's
    rewards; if false, only the taskset's own rewards count.
    """

    url: str | None = None
    task: str | dict[str, Any] | None = None
    run: str | None = None
    patience_s: float | None = None
    reward: bool = True


class PolarnodeHarness(Harness[PolarnodeHarnessConfig]):  # type: ignore[misc]
    """Runs a task as one session of a node and fills the trace with the node's record."""

    EXECUTES_CODE = False  # no code runs in verifiers' runtime, because the node has containers
    NEEDS_CONTAINER = False

    def __init__(self, config: PolarnodeHarnessConfig) -> None:
        super().__init__(config)
        given = {name: getattr(config, name) for name in ("url", "task", "run", "patience_s")}
        self.settings = plugin_settings(given)

    async def launch(
        self,
        ctx: Any,
        trace: Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run the task. Raises SandboxError for a session that the machine lost and HarnessError for one
        without a reward: prime-rl leaves both out of the group, so neither is a reward of 0.
        """
        _, prompt = self.resolve_text_prompt(data)
        row = {"instruction": prompt, "polarnode": getattr(data, "polarnode", None)}
        spec = task_of(self.settings, row, sampling=sampling_of(ctx.sampling), instead=OWN_GROUPS)
        rollouts = shared_rollouts(self.settings)
        try:
            session = await rollouts.session(spec)
            whole = await rollouts.client.trajectory(session.session_id, turns="full")
        except (SessionLost, Unreachable) as error:
            raise SandboxError(str(error)) from error
        if self.config.reward and whole.reward is None:
            raise HarnessError(
                f"session {whole.session_id} has no reward: {whole.outcome.reason or whole.outcome.status}"
            )
        fill(trace, whole, reward=self.config.reward)
        return ProgramResult(exit_code=0, stdout="", stderr="")


def sampling_of(config: Any) -> dict[str, Json]:
    """The node's sampling parameters from those of verifiers, as far as the node has them."""
    given = config.model_dump(exclude_none=True)
    given = (given.get("extra_body") or {}) | given
    found = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    if found.get("top_k") == 0:  # in vLLM 0 also means all
        found["top_k"] = -1
    return found


def fill(trace: Trace, trajectory: Trajectory, *, reward: bool) -> None:
    """Put a session into a trace: its nodes, a call for each of its turns, its reward and its metrics.

    `trace.info["polarnode"]` has the values for which verifiers has no field: the session's id and status,
    its staleness, and the weight versions of each row.
    """
    turns = {turn.index: turn for turn in trajectory.turns}
    nodes = trace_nodes(trajectory)
    spans = [span for row in trained_rows(trajectory) for span in row.trained_spans]
    sampled = [place for place, node in enumerate(nodes) if node["sampled"]]
    trace.nodes.extend(MessageNode(**node) for node in nodes)
    for place, span in zip(sampled, spans, strict=True):
        turn = turns[span.turn]
        usage = Usage(prompt_tokens=turn.prompt_length, completion_tokens=len(turn.sampled))
        finish = turn.finish_reason if turn.finish_reason in KNOWN_FINISHES else None
        trace.calls.append(ModelCall(node=place, model=trajectory.model, finish_reason=finish, usage=usage))
    if reward and trajectory.reward is not None:
        trace.record_reward(REWARD, trajectory.reward)
    for name, value in trajectory.metrics.items():
        if isinstance(value, int | float):
            trace.record_metric(f"{REWARD}/{name}", value)
    outcome = trajectory.outcome
    if outcome.status == "timeout" and outcome.clock in TRUNCATED:
        trace.stop(TRUNCATED[outcome.clock])
    trace.info[REWARD] = {
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "status": outcome.status,
        "reason": outcome.reason,
        "clock": outcome.clock,
        "staleness": trajectory.staleness,
        "forked_from": plain(trajectory.forked_from),
        "versions": [list(versions_of(row)) for row in trained_rows(trajectory)],
    }


# ── weights ───────────────────────────────────────────────────────────────────


class BadBroadcast(Exception):
    """A request of prime-rl that a node cannot carry out."""


@frozen
class WeightRelay:
    """Answers for a node as prime-rl's inference server does: prime-rl/src/prime_rl/utils/client.py.

    prime-rl writes each broadcast as OUTPUT/broadcasts/step_N with a marker STABLE, without the model's
    config.json; `model` is the checkpoint that the node serves, whose config.json is put there.
    """

    client: PolarnodeClient
    model: Path
    run: str

    def update(self, body: Mapping[str, Any]) -> str:
        """Serve a broadcast of whole weights."""
        folder, version = self._broadcast_folder(body.get("weight_dir"))
        if not (folder / "config.json").exists():
            shutil.copyfile(self.model / "config.json", folder / "config.json")
        self.client.update_weights(version, path=folder, mode="in_place")
        return version

    def load(self, body: Mapping[str, Any]) -> str:
        """Serve a broadcast of LoRA as a version of the adapter of its name. prime-rl names tensors by the
        model's modules; PEFT's names also contain its own wrappers.
        """
        from safetensors.torch import load_file

        folder, version = self._broadcast_folder(body.get("lora_path"))
        found = load_file(folder / "adapter_model.safetensors").items()
        tensors = {f"{PEFT_PREFIX}{name.removeprefix(PEFT_PREFIX)}": tensor for name, tensor in found}
        config = orjson.loads((folder / "adapter_config.json").read_bytes())
        push_adapter(self.client, str(body.get("lora_name")), version, tensors, config=config)
        return version

    def _broadcast_folder(self, named: Any) -> tuple[Path, str]:
        """A broadcast's folder and its version. The version consists of the run, the step and the time of the
        marker, because a run that starts again writes the same step anew.
        """
        if not named:
            raise BadBroadcast(
                'the broadcast has no folder: set weight_broadcast.type = "filesystem" in prime-rl'
            )
        folder = Path(named)
        marker = folder / "STABLE"
        if not marker.is_file():
            raise BadBroadcast(f"{marker} is not there: the folder is no broadcast of prime-rl that is whole")
        return folder, f"{self.run}-{folder.name}-{int(marker.stat().st_mtime)}"

    def answer(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, Json]:
        """The answer to one request as (status, JSON)."""
        route = f"{method} {path.partition('?')[0]}"
        try:
            match route:
                case "GET /health":
                    return 200, {"version": self.client.weights().version}
                case "GET /v1/models":
                    return 200, {"object": "list", "data": [{"id": self.model.name, "object": "model"}]}
                case "POST /pause" | "POST /resume":  # an update pauses and resumes generation by itself
                    return 200, {"status": "ok"}
                case "POST /update_weights" | "POST /load_lora_adapter":
                    version = self.update(body) if route.endswith("weights") else self.load(body)
                    log.info("the node serves %s", version)
                    return 200, {"status": "ok", "version": version}
        except BadBroadcast as error:
            return 400, {"error": str(error)}
        except ClientError as error:
            return error.status, {"error": str(error)}
        except (Unreachable, OSError) as error:
            return 503, {"error": str(error)}
        return 404, {"error": f"{route} is not here: a node samples for its sessions alone"}


def serve(relay: WeightRelay, host: str, port: int) -> ThreadingHTTPServer:
    """A server of the relay, not yet running."""

    class RelayHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            try:
                body = orjson.loads(self.rfile.read(size) or b"{}")
            except orjson.JSONDecodeError:
                body = None
            self._reply(body if isinstance(body, dict) else {})

        def _reply(self, body: Mapping[str, Any]) -> None:
            status, value = relay.answer(self.command, self.path, body)
            data = orjson.dumps(value)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    return ThreadingHTTPServer((host, port), RelayHandler)


def main() -> None:
    parser = ArgumentParser(description="Bring prime-rl's weights to a polarnode.")
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint that the node serves")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8100, help="where to listen (8100)")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = plugin_settings()
    client = PolarnodeClient(settings.url, token=settings.token, patience_s=settings.patience_s)
    server = serve(WeightRelay(client, given.model, settings.run), given.host, given.port)
    log.info("prime-rl's base_url is http://%s:%s/v1", given.host, server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    main()
