"""A NeMo Gym agent server as a Quart app: each request is a task on a node, submitted, waited for and read.

A collection requests thousands of rollouts at once and a node's socket takes hundreds of connections, so all
of them wait on one stream of events. Polling finds events that the stream misses, so a gap delays a rollout
and never loses it. When a client disconnects its session is cancelled, unless Gym has a name for the rollout
and will request it again. Refusals have the shape of Gym's own servers (`{"detail"}`): 422 for an invalid
request, 409 for a rollout id of another request, 503 while the node gives no answer, which is worth a retry,
and also for a rollout that was lost, because NeMo RL takes a 5xx for the machine's fault and a 200 for a
sample.
"""

import logging
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import Any, Final, Literal, Protocol

import trio
from attrs import define, field, frozen
from quart import Response
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from polarnode.core.codec.json import dump_json, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.http.asgi import BrowserGuard, RouteRow, body_json, guard_browsers
from polarnode.integrations.nemo_gym.answers import (
    aggregated,
    prompt_digest,
    response,
    unusable,
    verify_response,
)
from polarnode.integrations.nemo_gym.requests import (
    GymRequest,
    TaskTemplate,
    read_responses_request,
    read_run_request,
)
from polarnode.support.bounded import remember

# ── rollouts ────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

# Seconds between polls of a task of which the stream has no event. A poll is one request, for minutes of
# work.
LOOK_S: Final = 30.0
# Seconds without an answer of the node after which a rollout fails. A node restarts in one or two minutes.
PATIENCE_S: Final = 600.0
CANCEL_TIMEOUT_S: Final = 10.0  # seconds to cancel a task that nobody waits for


class NodeClient(Protocol):
    """The part of `polarnode.client.asynchronous.AsyncPolarnodeClient` that is used here."""

    async def submit(
        self, spec: TaskSpec | dict[str, Json], *, idempotency_key: str | None = None
    ) -> Any: ...

    async def task_status(self, task_id: str) -> Any: ...

    async def trajectory(self, session_id: str, *, turns: Any = ..., arrays: Any = ...) -> Trajectory: ...

    async def cancel(self, task_id: str) -> bool: ...

    async def status(self) -> dict[str, Any]: ...

    def trajectories(
        self, *, after: int | None = None, follow: bool | None = None, kinds: Any = ...
    ) -> AbstractAsyncContextManager[Any]: ...


@define(eq=False)
class Rollouts:
    """The rollouts of one node. Run `follow` as a service; call `run` for each rollout."""

    node: NodeClient
    _over: dict[str, trio.Event] = field(factory=dict, init=False)  # the tasks that callers wait for

    async def follow(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wake `run` when its task is over. Runs forever."""
        last = (await self.node.status())["journal"]["last_seq"]
        task_status.started()
        async with self.node.trajectories(after=last, follow=True, kinds=("task",)) as events:
            async for event in events:
                if event.kind == "task":
                    self._wake(event.data["task_id"])

    async def run(self, spec: TaskSpec, *, key: str | None) -> Trajectory:
        """Run one rollout, and return its trajectory with all its turns."""
        task_id = (await self.node.submit(spec, idempotency_key=key)).task_id
        over = False
        try:
            session_id = await self._wait_over(task_id)
            over = True
        finally:
            if not over and key is None:
                with trio.move_on_after(CANCEL_TIMEOUT_S, shield=True):
                    await self._give_up(task_id)
        return await self.node.trajectory(session_id, turns="full")

    async def _wait_over(self, task_id: str) -> str:
        """Wait until the task is over, and return the id of the session that held its one place at the
        end.
        """
        answered = trio.current_time()
        while True:
            # The event is made before the poll, so that an end between the two is not missed.
            event = self._over.setdefault(task_id, trio.Event())
            try:
                status = await self.node.task_status(task_id)
                answered = trio.current_time()
                if status.finished:
                    self._wake(task_id)
                    return str(status.sessions[0].session_id)
            except PolarnodeError as error:
                if trio.current_time() - answered > PATIENCE_S:
                    raise
                logger.warning(
                    "the status of task %s could not be read, which is tried again: %s", task_id, error
                )
                await trio.sleep(1)
            with trio.move_on_after(LOOK_S):
                await event.wait()

    def _wake(self, task_id: str) -> None:
        event = self._over.pop(task_id, None)
        if event is not None:
            event.set()

    async def _give_up(self, task_id: str) -> None:
        self._wake(task_id)
        try:
            await self.node.cancel(task_id)
        except PolarnodeError as error:
            logger.warning("task %s could not be cancelled, and ends with its budgets: %s", task_id, error)


# ── prompts of a group ────────────────────────────────────────────────────────

# The rows of the dataset whose last prompt is kept: 200 bytes each, more than a step of any trainer has.
ROWS = 4096


@define(eq=False)
class PromptWatch:
    """Checks whether the rollouts of one row of the dataset have the same prompt.

    NeMo RL's GRPO makes its groups by equal prompts (`calculate_baseline_and_std_per_prompt` of
    nemo_rl/algorithms/utils.py at 7ea279a): a rollout whose prompt no other rollout has gets the advantage 0.
    """

    _digests: dict[str, str] = field(factory=dict, init=False)

    def same(self, request: GymRequest, found: Trajectory) -> bool:
        """Whether the rollout is the row's first, or has the same prompt as the row's last rollout."""
        digest = prompt_digest(found)
        if request.row is None or digest is None:
            return True
        row = {name: value for name, value in request.row.items() if not name.startswith("_")}
        key = sha256(dump_json(row)).hexdigest()
        last = self._digests.get(key, digest)
        remember(self._digests, key, digest, most=ROWS)
        if digest != last:
            logger.warning(
                "session %s has another prompt than the last rollout of the same row: a trainer that groups"
                " by prompts compares it with no other. Its harness writes something of the session into the"
                " prompt, or the templates differ",
                found.session_id,
            )
        return digest == last


# ── app ────────────────────────────────────────────────────────────

# The answers of a whole collection come back in one body, without tokens, for their metrics.
BODY_BYTES: Final = 256 << 20
NAMED_ROLLOUT_PATH: Final = (
    "/ng-rollout/<rollout_id>"  # the prefix of a path that Gym calls for a named rollout
)


LostPolicy = Literal["fail", "mask"]
# The rollouts that one request tries before it is answered 503. The node has already retried each of them
# itself.
ATTEMPTS: Final = 3


class RolloutLost(PolarnodeError):
    """A rollout that cannot be trained, after ATTEMPTS sessions."""

    boundary = "node"


def create_gym_app(
    rollouts: Rollouts,
    template: TaskTemplate,
    *,
    guard: BrowserGuard | None = None,
    lost: LostPolicy = "fail",
) -> QuartTrio:
    """The app. `rollouts.follow` must run while it is served. Without a `guard` only loopback names are
    served. `lost` says what happens to a rollout that cannot be trained: "fail" runs another one, and answers
    503 after ATTEMPTS; "mask" gives a masked sample with the reward 0.
    """
    app = QuartTrio("polarnode.nemo_gym", static_folder=None)
    app.url_map.merge_slashes = False  # otherwise a path with // is answered by a redirect, in HTML
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None, MAX_CONTENT_LENGTH=BODY_BYTES)
    guard_browsers(app, guard or BrowserGuard(), open_to_all=True)
    agent = _GymAgent(rollouts=rollouts, template=template, lost=lost)
    rows: tuple[RouteRow, ...] = (
        ("GET", "/", agent.alive),
        ("POST", "/run", agent.run),
        ("POST", "/v1/responses", agent.responses),
        ("POST", f"{NAMED_ROLLOUT_PATH}/v1/responses", agent.responses),
        ("POST", f"{NAMED_ROLLOUT_PATH}/training-token-capture/v1/responses", agent.responses),
        ("POST", "/aggregate_metrics", agent.aggregate),
    )
    for method, path, handler in rows:
        app.add_url_rule(path, f"{method} {path}", handler, methods=[method])
    app.register_error_handler(PolarnodeError, _answer_error)
    app.register_error_handler(HTTPException, _answer_error)
    return app


@frozen(kw_only=True)
class AggregateRequest:
    """The body of `/aggregate_metrics`."""

    verify_responses: tuple[dict[str, Json], ...]


@frozen(kw_only=True)
class _GymAgent:
    """The handlers."""

    rollouts: Rollouts
    template: TaskTemplate
    lost: LostPolicy
    prompts: PromptWatch = field(factory=PromptWatch)

    async def alive(self) -> Response:
        """Gym's probe before its first request."""
        await trio.lowlevel.checkpoint()
        return _json({"server": "polarnode gym-agent"})

    async def run(self) -> Response:
        """One rollout of a dataset's row, scored."""
        request = read_run_request(await body_json())
        found = await self._rollout(request)
        self.prompts.same(request, found)
        return _json(await trio.to_thread.run_sync(verify_response, request, found))

    async def responses(self, rollout_id: str | None = None) -> Response:
        """One rollout of an instruction without a row."""
        request = read_responses_request(await body_json(), rollout_id=rollout_id)
        found = await self._rollout(request)
        return _json(await trio.to_thread.run_sync(response, request.params, found))

    async def _rollout(self, request: GymRequest) -> Trajectory:
        """Run until a rollout can be trained, or only once for `mask`, and return it. Raises RolloutLost."""
        spec, key, reason = self.template.task(request), request.key, None
        for attempt in range(ATTEMPTS):
            again = f"{key}-r{attempt}" if key is not None and attempt else key
            found = await self.rollouts.run(spec, key=again)
            reason = unusable(found)
            if reason is None or self.lost == "mask":
                return found
            logger.warning("session %s %s", found.session_id, reason)
        raise RolloutLost(f"{ATTEMPTS} sessions of this rollout cannot be trained: the last one {reason}")

    async def aggregate(self) -> Response:
        """The metrics of a collection."""
        body = structure(await body_json(), AggregateRequest)
        return _json(aggregated(list(body.verify_responses)))


def _json(value: Json, status: int = 200) -> Response:
    return Response(dump_json(value), status, content_type="application/json")


async def _answer_error(error: Exception) -> Response:
    # This function is async although it waits for nothing, because Quart would run a plain function in a
    # thread.
    await trio.lowlevel.checkpoint()
    match error:
        case Refused():
            where = "" if error.path is None else f" (at {error.path})"
            return _json({"detail": f"{error}{where}"}, 422)
        case PolarnodeError():
            status = getattr(error, "status", None)  # the node's own status, if it answered
            return _json({"detail": str(error)}, status if status in (400, 401, 404, 409, 422, 429) else 503)
        case HTTPException():
            return _json({"detail": error.description or error.name}, error.code or 500)
    raise error
