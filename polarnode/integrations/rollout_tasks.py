"""What the plug-ins share: where the node is, the task of a dataset's row, and its finished group.

A plug-in runs in the trainer's process, usually in an asyncio loop that is not its own. It submits one task
for each group of samples and waits for the group's end. Which sessions count is decided by the node
(`polarnode.groups`): a session that the machine lost has no reward, and `SessionLost` is not a reward of 0.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import anyio
import anyio.from_thread
from attrs import evolve, field, frozen

from polarnode.client import AsyncPolarnodeClient
from polarnode.core.codec.json import kind_of, read_json
from polarnode.core.codec.tasks import read_task
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.groups import Group, lost_to_the_machine
from polarnode.sources.reading import read_json as read_json_file
from polarnode.sources.reading import task_value
from polarnode.sources.values import merged_over

ENVIRONMENT: Final = {
    "url": "POLARNODE_URL",
    "token": "POLARNODE_TOKEN",
    "task": "POLARNODE_TASK",
    "run": "POLARNODE_RUN",
    "patience_s": "POLARNODE_PATIENCE_S",
}
# The key of a row that holds its task, and the columns in which trainers keep what is not the prompt.
TASK_KEY: Final = "polarnode"
EXTRA_COLUMNS: Final = ("extra_info", "metadata", "env_extras", "extra_env_info", "info")
PROMPT_COLUMNS: Final = ("instruction", "prompt", "raw_prompt", "messages", "question", "problem")
# Sampling with temperature alone, whatever a harness requests: recorded logprobs are those before a cut, and
# a trainer computes its own so.
UNCUT: Final[Mapping[str, Json]] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
# seconds for the request that ends a task whose caller was cancelled: a trainer that stops should not hang
CANCEL_S: Final = 10.0
# tasks that `rollout_groups` has in progress at once: each holds one connection of the node's for its stream
AT_ONCE: Final = 128


class SessionLost(PolarnodeError):
    """A session ended through no fault of its agent: the machine lost it, or somebody cancelled it. It has no
    reward.
    """

    boundary = "node"


# ── settings ──────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class PluginSettings:
    """Where the node is, and what every task has in common.

    `template`: a partial TaskSpec as JSON, to which a row adds its own. `run`: the prefix of task ids, so
    that `polarnode watch` shows which run a task belongs to. `patience_s`: how long to retry while the node
    does not answer.
    """

    url: str = "http://127.0.0.1:8080"
    token: str | None = field(default=None, repr=False)
    template: Mapping[str, Json] = field(factory=dict)
    run: str = "trainer"
    patience_s: float = 600.0

    def client(self) -> AsyncPolarnodeClient:
        return AsyncPolarnodeClient(self.url, token=self.token, patience_s=self.patience_s)


def plugin_settings(
    given: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> PluginSettings:
    """Settings from a trainer's own configuration, and from ENVIRONMENT for what that leaves out.

    `given` has the keys url, token, task (the path of a TOML or JSON task file, or a mapping), run and
    patience_s; None means not given. Raises Refused naming the key.
    """
    found: dict[str, Any] = {}
    variables = os.environ if environment is None else environment
    for key, variable in ENVIRONMENT.items():
        if variables.get(variable):
            found[key] = variables[variable]
    for key, value in (given or {}).items():
        if key not in ENVIRONMENT:
            raise Refused(
                f"polarnode has no setting {key!r} for a plug-in: it takes {', '.join(ENVIRONMENT)}",
                path=f"$.{key}",
            )
        if value is not None:
            found[key] = value
    task = found.pop("task", None)
    if "patience_s" in found:
        found["patience_s"] = _seconds(found["patience_s"])
    return PluginSettings(**found, template={} if task is None else _template(task))


def _seconds(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Refused(f"patience_s must be a number of seconds, not {value!r}", path="$.patience_s") from None


def _template(task: Any) -> dict[str, Json]:
    if isinstance(task, Mapping):
        return _json(task)  # type: ignore[no-any-return]
    file = Path(task)
    if not file.is_file():
        raise Refused(
            f"there is no task file {file}: give the path of a TOML or JSON file with a harness and an"
            " evaluator, as for `polarnode submit`",
            path="$.task",
        )
    value = read_json_file(file) if file.suffix == ".json" else task_value(file)
    if not isinstance(value, dict):
        raise Refused(f"{file}: a task is a JSON object, not {kind_of(value)}", path="$.task")
    return value


# ── a row's task ──────────────────────────────────────────────────────────────


def task_of(
    settings: PluginSettings,
    row: Mapping[str, Any],
    *,
    samples: int = 1,
    task_id: str | None = None,
    group_id: str | None = None,
    sampling: Mapping[str, Json] | None = None,
) -> TaskSpec:
    """The task of a dataset's row.

    A mapping or JSON text under `polarnode`, in the row or in one of EXTRA_COLUMNS, is merged over the
    template. Without an instruction in either, it is the row's prompt (PROMPT_COLUMNS): a text, or the last
    user message of a chat. `sampling` is the trainer's and overrides both. Without a `task_id` the task is
    new each time. Raises Refused naming the column or the field.
    """
    value = merged_over(settings.template, own_task(row))
    if not value.get("instruction"):
        value["instruction"] = _prompt(row)
    given: dict[str, Json] = {name: each for name, each in (sampling or {}).items() if each is not None}
    if given:
        value = merged_over(value, {"sampling": given})
    value["num_samples"] = samples
    value["task_id"] = task_id or f"{settings.run}-{token_hex(8)}"
    if group_id is not None:
        value["group_id"] = group_id
    if "harness" not in value:
        raise Refused(
            "the task names no harness: set it in the task file (`task` of the plug-in, or POLARNODE_TASK),"
            ' such as harness = { name = "pi" }',
            path="$.harness",
        )
    return read_task(value)


def own_task(row: Mapping[str, Any]) -> dict[str, Json]:
    """The partial task that a row holds under `polarnode`, itself or in one of EXTRA_COLUMNS; {} if none."""
    places = [row, *(row[name] for name in EXTRA_COLUMNS if isinstance(row.get(name), Mapping))]
    own: Any = next((place[TASK_KEY] for place in places if place.get(TASK_KEY) is not None), {})
    value = read_json(own.encode()) if isinstance(own, str) else _json(own)
    if not isinstance(value, dict):
        raise Refused(
            f"the column {TASK_KEY} must hold a task, as an object or as JSON text, not {kind_of(value)}",
            path=f"$.{TASK_KEY}",
        )
    return value


def _json(value: Any) -> Any:
    """A value of a data frame as JSON. A table stores absent fields of an object as null, so nulls are
    dropped; its arrays are numpy's.
    """
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items() if each is not None}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_json(each) for each in value] if isinstance(value, list | tuple) else value


def _prompt(row: Mapping[str, Any]) -> str:
    for name in PROMPT_COLUMNS:
        prompt = _json(row.get(name))
        if isinstance(prompt, str) and prompt:
            return prompt
        if isinstance(prompt, list):
            for message in reversed(prompt):
                if isinstance(message, dict) and message.get("role") == "user":
                    return _text(message.get("content"))
    raise Refused(
        f"the row has no prompt: give it one of {', '.join(PROMPT_COLUMNS)}, or a task under {TASK_KEY}",
        path="$.instruction",
    )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not texts or len(texts) < len(parts):
        raise Refused(
            "a prompt's message must be text: polarnode passes no images to a harness", path="$.instruction"
        )
    return "\n".join(texts)


# ── rollouts ──────────────────────────────────────────────────────────────────


@frozen
class NodeRollouts:
    """Runs tasks on a node, from asyncio or Trio. Use one in each event loop; it holds connections.

    Use `async with` or `aclose` to close them.
    """

    settings: PluginSettings
    client: AsyncPolarnodeClient = field(init=False)

    @client.default
    def _make_client(self) -> AsyncPolarnodeClient:
        return self.settings.client()

    async def group(self, spec: TaskSpec) -> Group:
        """Run a task and return its finished group, with the trajectories of all members that have one.

        If the caller is cancelled, so is the task. Raises ClientError for a task that the node refuses,
        Unreachable when it does not answer for `patience_s`, and SessionLost when the node no longer has the
        group.
        """
        named = spec if spec.task_id is not None else _named(spec, self.settings.run)
        try:
            submitted = await self.client.submit(named, idempotency_key=named.task_id)
            async with self.client.groups(task_id=submitted.task_id) as groups:
                async for group in groups:
                    return group
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(CANCEL_S, shield=True), suppress(PolarnodeError):
                await self.client.cancel(str(named.task_id))
            raise
        raise SessionLost(f"the node has no result of task {named.task_id} any more: submit it again")

    async def session(self, spec: TaskSpec) -> Trajectory:
        """Run a task of one sample and return its trajectory. Raises SessionLost for a session without
        fault of its agent (after the node's own retries), and as `group`.
        """
        if spec.num_samples != 1:
            raise Refused(f"a session is one sample, not {spec.num_samples}: use group", path="$.num_samples")
        return only(await self.group(spec))

    async def aclose(self) -> None:
        await self.client.aclose()

    async def __aenter__(self) -> "NodeRollouts":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def only(group: Group) -> Trajectory:
    """The trajectory of a group of one. Raises SessionLost if it was lost."""
    trajectory = next(iter(group.trajectories), None)
    if trajectory is None:
        raise SessionLost(f"the node cannot give the trajectory of task {group.task_id}: submit it again")
    outcome = trajectory.outcome
    if lost_to_the_machine(outcome) or outcome.status == "cancelled":
        raise SessionLost(f"session {trajectory.session_id} was lost: {outcome.reason or outcome.status}")
    return trajectory


def rollout_groups(settings: PluginSettings, specs: Sequence[TaskSpec]) -> list[Group]:
    """Run tasks side by side and return their groups in order, for a trainer without an event loop. If one
    fails or the caller is interrupted, the others are cancelled and the error is raised.
    """
    # in a thread of its own: the caller may be inside an event loop, as in a notebook
    with anyio.from_thread.start_blocking_portal() as portal:
        return portal.call(_groups, settings, specs)


async def _groups(settings: PluginSettings, specs: Sequence[TaskSpec]) -> list[Group]:
    groups: dict[int, Group] = {}
    failed: list[PolarnodeError] = []
    places = anyio.CapacityLimiter(AT_ONCE)

    async def run(index: int, spec: TaskSpec) -> None:
        try:
            async with places:
                groups[index] = await rollouts.group(spec)
        except PolarnodeError as error:
            failed.append(error)
            tasks.cancel_scope.cancel()

    async with NodeRollouts(settings) as rollouts, anyio.create_task_group() as tasks:
        for index, spec in enumerate(specs):
            tasks.start_soon(run, index, spec)
    if failed:
        raise failed[0]
    return [groups[index] for index in range(len(specs))]


def _named(spec: TaskSpec, run: str) -> TaskSpec:
    return evolve(spec, task_id=f"{run}-{token_hex(8)}")
