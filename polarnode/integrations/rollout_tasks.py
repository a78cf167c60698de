"""The code that the plug-ins share: the settings of the node, the task of a dataset's row, and its finished
group.

A plug-in runs in the trainer's process, usually in an asyncio loop that is not its own. It submits one task
for each group of samples and waits for the group's end. The node decides which sessions count
(`polarnode.groups`): a session that the machine lost has no reward, and `SessionLost` is not a reward of 0.
"""

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TypeVar

import anyio
import anyio.from_thread
from anyio.lowlevel import RunVar
from attrs import define, evolve, field, frozen

from polarnode.client import AsyncPolarnodeClient, ClientError, Event, Unreachable
from polarnode.client.awaiting_http import AsyncEvents
from polarnode.client.scripts import RetryPatience
from polarnode.client.streams import ABSENT
from polarnode.core.codec.json import kind_of, read_json
from polarnode.core.codec.tasks import read_task
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.groups import STALE_REASON, Group, judged_again, lost_to_the_machine
from polarnode.integrations.trainer_sampling import UNCUT as UNCUT  # for users' own training loops
from polarnode.integrations.trainer_sampling import trained_sampling
from polarnode.sources.reading import read_json as read_json_file
from polarnode.sources.reading import read_task_toml
from polarnode.sources.values import merge_over

T = TypeVar("T")

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
# Settings of a task's group that say something of several sessions together.
WHOLE_GROUP_FIELDS: Final = ("drop_uniform_reward", "early_stop_min", "min_usable")
# What to do without these settings if a prompt has one sample.
NOTHING_TO_COMPARE: Final = dict.fromkeys(
    WHOLE_GROUP_FIELDS, "let the trainer request several samples of a prompt"
)
# Seconds for the request that ends a task whose caller was cancelled. A trainer that stops should not hang.
CANCEL_TIMEOUT_S: Final = 10.0
# The requests that one NodeRollouts sends at once. A node has places for some hundred connections, and a
# trainer has tens of processes.
REQUESTS: Final = 8


class SessionLost(PolarnodeError):
    """A session ended through no fault of its agent: the machine lost it, or somebody cancelled it. It has no
    reward.
    """

    boundary = "node"


# ── settings ──────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class PluginSettings:
    """The address of the node, and the part that all tasks have in common.

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
    """Read settings from a trainer's own configuration, and missing ones from ENVIRONMENT.

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
    value = read_json_file(file) if file.suffix == ".json" else read_task_toml(file)
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
    instead: Mapping[str, str] | None = None,
    evaluation: bool = False,
) -> TaskSpec:
    """The task of a dataset's row.

    A mapping or JSON text under `polarnode`, in the row or in one of EXTRA_COLUMNS, is merged over the
    template. Without an instruction in either, it is the row's prompt (PROMPT_COLUMNS): a text, or the last
    user message of a chat. `sampling` is the trainer's and overrides both, and whatever a harness requests
    (`trained_sampling`). Without a `task_id` the task is new each time. Raises Refused naming the column or
    the field.

    `instead` is for trainers that make several tasks of the samples that they compare: it says what to use in
    place of settings of whole groups, which are refused then. An `evaluation` wants every result and has no
    such settings.
    """
    value = merge_over(settings.template, own_task(row))
    _check_group_settings(
        value, NOTHING_TO_COMPARE if instead is None and samples == 1 else instead, evaluation
    )
    if not value.get("instruction"):
        value["instruction"] = _row_prompt(row)
    value["sampling"] = trained_sampling(value.get("sampling"), sampling or {})
    value["num_samples"] = samples
    value["task_id"] = task_id or new_task_id(settings)
    if group_id is not None:
        value["group_id"] = group_id
    if "harness" not in value:
        raise Refused(
            "the task names no harness: set it in the task file (`task` of the plug-in, or POLARNODE_TASK),"
            ' such as harness = { name = "pi" }',
            path="$.harness",
        )
    spec = read_task(value)
    if spec.group.fork is not None:
        raise Refused(
            "group.fork makes a tree, and this trainer compares each session with the mean of its group:"
            " leave it out, or train with polarnode.groups.tree_rows_of",
            path="$.group.fork",
        )
    return spec


def _check_group_settings(
    value: dict[str, Json], instead: Mapping[str, str] | None, evaluation: bool
) -> None:
    """Leave settings of whole groups out of an evaluation's task; refuse them if `instead` is given."""
    group = value.get("group")
    if not isinstance(group, dict):
        return
    if evaluation:
        value["group"] = {name: each for name, each in group.items() if name not in WHOLE_GROUP_FIELDS}
    elif instead is not None:
        check_whole_groups(group, instead)


def check_whole_groups(group: Mapping[str, Json], instead: Mapping[str, str]) -> None:
    """Raise Refused for a setting of whole groups if each sample is a task of its own."""
    for name, what in instead.items():
        value = group.get(name)
        # A value of 1 is met by every group.
        asked = value not in (None, False) and (value != 1 or value is True or name == "max_staleness")
        if asked:
            raise Refused(
                f"group.{name} cannot do what it says: the trainer compares samples that are tasks of their"
                f" own, and the node sees no group of them. Leave it out, and {what}",
                path=f"$.group.{name}",
            )


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


def _row_prompt(row: Mapping[str, Any]) -> str:
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


@define(eq=False)
class _TaskWaiter:
    """A task in progress, and the caller who waits for it."""

    group: Group | None = None
    failed: PolarnodeError | None = None
    missed: bool = False  # its group may be among events that are not read here
    idle: bool = False  # the caller waits for `woken`
    woken: anyio.Event = field(factory=anyio.Event)

    @property
    def over(self) -> bool:
        return self.group is not None or self.failed is not None or self.missed

    def wake(self) -> None:
        self.woken.set()


@define(eq=False)
class NodeRollouts:
    """Runs tasks on a node, from asyncio or Trio. Use one in each event loop (`shared_rollouts`); it holds
    connections. Use `async with` or `aclose` to close them.

    However many tasks are in progress, one stream of small `group` events is read for all of them, because a
    node has places for some hundred streams: one of the waiting callers reads, and another takes over when
    its own group has come. Trajectories are fetched by id.
    """

    settings: PluginSettings
    client: AsyncPolarnodeClient = field(init=False)
    _waiting: dict[str, _TaskWaiter] = field(factory=dict, init=False)
    # Events after this one are not read yet.
    _seen: int | str | None = field(default=None, init=False)
    _events: AsyncEvents[Event] | None = field(default=None, init=False)
    _reading: bool = field(default=False, init=False)
    _places: anyio.CapacityLimiter = field(init=False)

    @client.default
    def _make_client(self) -> AsyncPolarnodeClient:
        return self.settings.client()

    @_places.default
    def _make_places(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(REQUESTS)

    async def group(self, spec: TaskSpec) -> Group:
        """Run a task and return its finished group, with the trajectories of all members that have one. If
        the task requests a teacher, a session without its logprobs is not usable (`taught`).

        If the caller is cancelled, so is the task. Raises ClientError for a task that the node refuses,
        Unreachable when it does not answer for `patience_s`, and SessionLost when the node no longer has the
        group.
        """
        named = spec if spec.task_id is not None else evolve(spec, task_id=new_task_id(self.settings))
        task_id = str(named.task_id)
        waiter = self._waiting.setdefault(task_id, _TaskWaiter())  # before the task's first event can arrive
        begun = self._seen is not None
        try:
            async with self._places:
                submitted = await self.client.submit(named, idempotency_key=task_id)
                if self._seen is None:
                    status = await self._patiently(self.client.status)
                    self._seen = status["journal"]["last_seq"] if self._seen is None else self._seen
            # The task may have ended already, either in an earlier run or in this moment.
            waiter.missed = not (begun and submitted.created)
            group = await self._finished(task_id, waiter)
            group = group.holding(await self._fetch_trajectories(group))
            return taught(group) if named.carry.teacher else group
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(CANCEL_TIMEOUT_S, shield=True), suppress(PolarnodeError):
                async with self._places:
                    await self.client.cancel(task_id)
            raise
        finally:
            self._waiting.pop(task_id, None)
            if not self._waiting and self._events is not None:  # the event loop may end while nobody waits
                events, self._events = self._events, None
                await events.aclose()  # noqa: ASYNC102 - shielded and bounded in `_closed`

    async def delivered(self, group: Group) -> Group:
        """Judge a group again that was kept since `group` returned it, by the weights that are served now."""
        if group.requires is None or group.requires.max_staleness is None:
            return group
        async with self._places:
            weights = await self._patiently(self.client.weights)
            adapters = await self._patiently(self.client.adapters)
        return judged_again(group, [weights.versions, *(each.versions for each in adapters.adapters)])

    async def session(self, spec: TaskSpec) -> Trajectory:
        """Run a task of one sample and return its trajectory. Raises SessionLost, after the node's own
        retries, for a session that was lost through no fault of its agent, and otherwise the errors of
        `group`.
        """
        if spec.num_samples != 1:
            raise Refused(f"a session is one sample, not {spec.num_samples}: use group", path="$.num_samples")
        return only(await self.group(spec))

    async def groups(self, specs: Sequence[TaskSpec]) -> list[Group]:
        """Run tasks side by side and return their groups in order. If one fails, the others are cancelled and
        its error is raised.
        """
        found: dict[int, Group] = {}
        failed: list[PolarnodeError] = []

        async def run(index: int, spec: TaskSpec) -> None:
            try:
                found[index] = await self.group(spec)
            except PolarnodeError as error:
                failed.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for index, spec in enumerate(specs):
                tasks.start_soon(run, index, spec)
        if failed:
            raise failed[0]
        return [found[index] for index in range(len(specs))]

    async def aclose(self) -> None:
        await self.client.aclose()

    async def __aenter__(self) -> "NodeRollouts":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ── waiting ───────────────────────────────────────────────────────────────

    async def _finished(self, task_id: str, waiter: _TaskWaiter) -> Group:
        """The group of a task, without trajectories."""
        while waiter.group is None:
            if waiter.failed is not None:
                raise waiter.failed
            if waiter.missed:
                waiter.missed = False  # set before the request, because the event may come meanwhile
                waiter.group = await self._look(task_id) or waiter.group
            elif self._reading:
                await self._idle(waiter)
            else:
                self._reading = True
                try:
                    await self._read_until(waiter)
                finally:
                    self._reading = False
                    self._hand_over()
        return waiter.group

    async def _idle(self, waiter: _TaskWaiter) -> None:
        waiter.idle, waiter.woken = True, anyio.Event()
        try:
            await waiter.woken.wait()
        except BaseException:  # cancelled, perhaps just when it was its turn to read
            waiter.idle = False
            self._hand_over()
            raise
        waiter.idle = False

    def _hand_over(self) -> None:
        """Let another caller read, if nobody does."""
        if not self._reading:
            for waiter in self._waiting.values():
                if waiter.idle and not waiter.over:
                    waiter.wake()
                    break

    async def _read_until(self, waiter: _TaskWaiter) -> None:
        """Read events for everybody, until this task is over or may have been missed."""
        while not waiter.over:
            if self._events is None:
                self._events = self.client.trajectories(after=self._seen, kinds=("group",), follow=True)
            try:
                event = await anext(self._events)
            except PolarnodeError as error:
                self._events = None  # the next reader continues where this one ended
                for each in self._waiting.values():
                    each.failed = error
                    each.wake()
            else:
                self._seen = event.id
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        """Give an event to the caller that waits for it."""
        group, unreadable = event.group, event.unreadable
        if event.kind == "gap":
            for waiter in self._waiting.values():
                waiter.missed = True
                waiter.wake()
        elif group is not None and group.task_id in self._waiting:
            waiter = self._waiting[group.task_id]
            waiter.group = group
            waiter.wake()
        elif unreadable is not None and unreadable.task_id in self._waiting:
            waiter = self._waiting[unreadable.task_id]
            waiter.failed = SessionLost(
                f"the node cannot give the group of task {unreadable.task_id}: {unreadable.reason}"
            )
            waiter.wake()

    async def _look(self, task_id: str) -> Group | None:
        """Ask for the group of a task; None if the task is in progress."""
        async with self._places:
            try:
                status = await self._patiently(lambda: self.client.task_status(task_id))
            except ClientError as error:
                if error.status == 404:
                    raise SessionLost(
                        f"the node does not know task {task_id} any more: submit it again"
                    ) from None
                raise
            if not status.finished:
                return None
            async with self.client.groups(task_id=task_id) as groups:
                async for group in groups:
                    return group
        raise SessionLost(f"the node has no result of task {task_id} any more: submit it again")

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to a request, which is repeated while the node is away or full."""
        patience = RetryPatience(self.settings.patience_s, time.monotonic)
        while True:
            try:
                return await ask()
            except (ClientError, Unreachable) as error:
                await anyio.sleep(patience.pause(error))

    async def _fetch_trajectories(self, group: Group) -> list[Trajectory]:
        """The trajectories of a group that the node can give. Damaged and pruned ones are left out, as in
        `client.groups`.
        """
        found: list[Trajectory] = []
        for member in group.members:
            try:
                async with self._places:
                    # This call retries by itself.
                    found.append(await self.client.trajectory(member.session_id))
            except ClientError as error:
                if error.status not in ABSENT:
                    raise
        return found


# There is one for each node and event loop, because trainers make a new agent loop or workflow for each
# sample or step.
_SHARED_ROLLOUTS: Final = RunVar[dict[tuple[Any, ...], NodeRollouts]]("polarnode_rollouts")


def shared_rollouts(settings: PluginSettings) -> NodeRollouts:
    """The NodeRollouts of this event loop for a node, which is made at the first call."""
    shared = _SHARED_ROLLOUTS.get(None)
    if shared is None:
        shared = {}
        _SHARED_ROLLOUTS.set(shared)
    node = (settings.url, settings.token, settings.patience_s, settings.run)
    if node not in shared:
        shared[node] = NodeRollouts(settings)
    return shared[node]


def taught(group: Group) -> Group:
    """The group, in which each session with a row that its teacher did not score is made unusable: the
    machine lost its scores, and trainers need those of every row of a batch.
    """
    lacking = {
        each.session_id
        for each in group.trajectories
        if any(trace.teacher_logprobs is None and 1 in trace.loss_mask for trace in each.traces)
    }
    members = [
        evolve(member, usable=False, why="lost: no logprobs of its teacher")
        if member.usable and member.session_id in lacking
        else member
        for member in group.members
    ]
    return evolve(group, members=tuple(members))


def only(group: Group) -> Trajectory:
    """The trajectory of a group of one. Raises SessionLost if it was lost, or its task forbids it."""
    trajectory = next(iter(group.trajectories), None)
    if trajectory is None:
        raise SessionLost(f"the node cannot give the trajectory of task {group.task_id}: submit it again")
    outcome = trajectory.outcome
    if lost_to_the_machine(outcome) or outcome.status == "cancelled":
        raise SessionLost(f"session {trajectory.session_id} was lost: {outcome.reason or outcome.status}")
    for member in group.members:
        if (member.why or "").startswith(STALE_REASON):
            raise SessionLost(f"session {trajectory.session_id} is not usable: {member.why}")
        if member.usable and group.state == "dropped":
            raise SessionLost(f"the group of session {trajectory.session_id} was dropped: {group.reason}")
    return trajectory


def rollout_groups(settings: PluginSettings, specs: Sequence[TaskSpec]) -> list[Group]:
    """`NodeRollouts.groups` for a trainer without an event loop. If the caller is interrupted, the tasks are
    cancelled.
    """
    # The loop runs in a thread of its own, because the caller may be inside an event loop, as in a notebook.
    with anyio.from_thread.start_blocking_portal() as portal:
        return portal.call(_groups, settings, specs)


async def _groups(settings: PluginSettings, specs: Sequence[TaskSpec]) -> list[Group]:
    async with NodeRollouts(settings) as rollouts:
        return await rollouts.groups(specs)


def new_task_id(settings: PluginSettings) -> str:
    return f"{settings.run}-{token_hex(8)}"
