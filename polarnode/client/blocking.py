"""The synchronous client, of the standard library: for a trainer with its own event loop, or none.

Nothing is decided here: each method runs the script that `asynchronous.py` runs under the same name.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from polarnode.client import api, requests, session_scores
from polarnode.client.api import Api, CaptureSession, Reading, exported, named, specs_of
from polarnode.client.blocking_http import BlockingEvents, BlockingHttp
from polarnode.client.requests import Script, T, ask
from polarnode.client.streams import ACK_INTERVAL_S, KEPT_BYTES
from polarnode.client.values import Event
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.forks import ForkOrder
from polarnode.core.codec.trajectories import Turns
from polarnode.core.conversation import Json, Sampling
from polarnode.core.snapshots import SnapshotStatus
from polarnode.core.status import (
    Consumer,
    EvaluationStatus,
    LogFile,
    LogPiece,
    ScoredRow,
    ScoreRow,
    SessionChanges,
    SessionStatus,
    Submitted,
    TaskStatus,
    TimeSeries,
)
from polarnode.core.task import (
    Budgets,
    CaptureSpec,
    EvaluationSpec,
    EvaluatorSpec,
    ForkWay,
    GroupSpec,
    TaskSpec,
)
from polarnode.core.trajectory import Trace, Trajectory
from polarnode.core.weights import (
    AdapterReport,
    AdaptersState,
    AdapterState,
    Backend,
    MemoryTag,
    PauseMode,
    UpdateMode,
    WeightsReport,
    WeightsStatus,
)
from polarnode.groups.group import Group, GroupState
from polarnode.groups.policy_difference import SessionDifference

# ── the client ────────────────────────────────────────────────────────────

if TYPE_CHECKING:
    from polarnode.sources.values import Kind


@define(eq=False)
class PolarnodeClient:
    """A client of one node's control plane. Threads may share it.

    * `base_url`: the address of the node, or of any that share a log, `https://HOST:PORT#SHA256` with the
      certificate that is trusted. `token`: the bearer token, if the node has one.
    * `patience_s`: seconds to wait for a node that is away or full, since its last sign of life, before the
      error is raised.
    * `ack_every_s`: the least seconds between two acknowledgements of one stream.

    Every method raises ClientError when the node answers with an error, and Unreachable when there is no
    complete answer. Streams, `submit`, `acknowledge`, `trajectory`, `update_weights`, the commit of
    `push_weights` and captures are retried for `patience_s`; other methods are tried once. The table is in
    docs/client.md.
    """

    base_url: str = "http://127.0.0.1:8080"
    token: str | None = field(default=None, repr=False)
    patience_s: float = 600.0
    ack_every_s: float = field(default=ACK_INTERVAL_S, kw_only=True)

    # ── tasks ─────────────────────────────────────────────────────────────────

    def submit(self, spec: TaskSpec | dict[str, Json], *, idempotency_key: str | None = None) -> Submitted:
        """Submit a task: a TaskSpec, or its JSON.

        Each retry carries the same idempotency key, so the task is created once; without `idempotency_key` a
        random one is used. Submitting the same task with the same key again returns the same answer with
        `created` False. Raises ClientError 400 for an invalid task, 409 for a key of another task, and 507
        when the journal's disk is full.
        """
        return self._run(self._api.submit(spec, idempotency_key))

    def fork(
        self,
        session_id: str,
        turn: int,
        *,
        num_samples: int = 1,
        by: ForkWay = "resume",
        task_id: str | None = None,
        sampling: Sampling | None = None,
        budgets: Budgets | None = None,
        group: GroupSpec | None = None,
        evaluator: EvaluatorSpec | None = None,
        metadata: dict[str, Json] | None = None,
        idempotency_key: str | None = None,
    ) -> Submitted:
        """Submit a task of `num_samples` forks of a session, which go on from its state before turn `turn`.

        What is not given is the parent's task's. Raises ClientError 404 for an unknown session, and 400 for
        one that cannot be forked there.
        """
        order = ForkOrder(
            turn=turn, num_samples=num_samples, by=by, task_id=task_id, sampling=sampling, budgets=budgets,
            group=group, evaluator=evaluator, metadata=metadata,
        )  # fmt: skip
        return self._run(self._api.fork(session_id, order, idempotency_key))

    def submit_source(
        self, path: str | Path, *, kind: "Kind | None" = None, **overrides: Any
    ) -> list[Submitted]:
        """Submit every task of a source: a task file, JSONL, a Harbor directory, a dataset or Polar's files.

        The source is read completely before the first task is submitted. `kind` is detected from the path
        when it is None. `overrides` are the fields of `polarnode.sources.values.Overrides`, such as
        harness="pi", samples=8, over={"budgets": {"run_s": 900}}. An image that is built from a task's folder
        must exist on the node's machine: run `polarnode convert --build` there. Raises Refused for a source
        that cannot be read.
        """
        return [self.submit(spec) for spec in specs_of(path, kind, overrides)]

    def task(self, task_id: str) -> dict[str, Any]:
        """Return a task's status, counts, sessions and spec as JSON. Raises ClientError 404 for an unknown
        task.
        """
        return self._run(ask(requests.task(task_id)))

    def task_status(self, task_id: str) -> TaskStatus:
        """Return a task's status, counts and sessions. Raises ClientError 404 for an unknown task."""
        return self._run(ask(requests.task_status(task_id)))

    def tasks(self, *, limit: int = 100, before: str | None = None) -> list[dict[str, Any]]:
        """Return up to `limit` tasks, newest first. For the next page, set `before` to the last task_id of
        this one.
        """
        return self._run(ask(requests.tasks(limit=limit, before=before)))

    def cancel(self, task_id: str) -> bool:
        """End a task's sessions; each keeps the turns it has. Return False when the task had already
        finished.
        """
        return self._run(ask(requests.cancel(task_id)))

    def evaluate(
        self,
        *sessions: str,
        task_id: str | None = None,
        group_id: str | None = None,
        evaluator: EvaluatorSpec | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        wait: bool = False,
    ) -> EvaluationStatus:
        """Evaluate finished sessions again: those named, or all of a task or a group. Return what was
        accepted, or with `wait` what each session was given.

        `evaluator` stands in place of each task's own; `reason` is returned with each reward. The rewards are
        events of kind `reward`; no trajectory changes (docs/evaluators.md). Raises ClientError 400 where no
        session can be evaluated.
        """
        spec = EvaluationSpec(
            sessions=sessions, task_id=task_id, group_id=group_id, evaluator=evaluator, reason=reason
        )
        return self._run(self._api.evaluate(spec, idempotency_key, wait=wait))

    def evaluation(self, evaluation_id: str, *, wait: bool = False) -> EvaluationStatus:
        """Return what an evaluation gave each session so far, or with `wait` when it has finished. Raises
        ClientError 404 for an unknown one.
        """
        return self._run(self._api.evaluation(evaluation_id, wait=wait))

    # ── trajectories and groups ───────────────────────────────────────────────

    def trajectories(
        self,
        *,
        consumer: str | None = None,
        after: int | str | None = None,
        task_id: str | None = None,
        group_id: str | None = None,
        outcome: str | None = None,
        min_reward: float | None = None,
        arrays: Arrays = "base64",
        turns: Turns = "table",
        follow: bool | None = None,
        ack: bool = False,
        kinds: Sequence[str] = (),
        format: str | None = None,
    ) -> BlockingEvents[Event]:
        """Yield events in order: without end, or, with a `task_id` or follow=False, until there are no more.

        * `after`: begin after this event's `id`, or its number. Otherwise begin after the
          position of `consumer`, or at the oldest event. "newest": a `consumer` that has a position goes on
          from it; any other reader begins after all events there are now.
        * `task_id`, `group_id`, `outcome`, `min_reward`: yield only events that match.
        * `kinds`: yield only these kinds. `attempt` and `reward` events come only when they are named here.
        * `arrays`: how arrays travel: "base64" (compact) or "json" (lists).
        * `turns`: "table" omits the token arrays of each turn; "full" includes them.
        * `format`: a trainer's format (docs/trainers.md). A trajectory's data is then in that format, under
          `value`.
        * `ack`: acknowledge each event for `consumer` when the next one is requested, at most once in
          `ack_every_s` seconds, and what is left at the end of the loop, also of one that ends early. Raises
          Refused without a `consumer`.
        """
        reading = Reading(consumer, after, task_id, group_id, follow, ack, arrays, turns)
        return self._http.iterate(
            self._api.trajectories(reading, kinds, outcome=outcome, min_reward=min_reward, format=format)
        )

    def groups(
        self,
        *,
        consumer: str | None = None,
        after: int | str | None = None,
        task_id: str | None = None,
        group_id: str | None = None,
        arrays: Arrays = "base64",
        turns: Turns = "table",
        follow: bool | None = None,
        ack: bool = False,
        skip: Container[str] = (),
        kept_bytes: int = KEPT_BYTES,
    ) -> BlockingEvents[Group]:
        """Yield each group when it ends, with its trajectories: without end, or as `trajectories` until there
        are no more. They are the groups of every task of the node, unless `task_id` or `group_id` says which.

        `group.ack()` acknowledges a group for `consumer` when its optimizer step is done: once it returns,
        the group does not come again. One that was not acknowledged comes again whole, and so does every
        group that shares the stream with an older one that was not.

        * `consumer`, `after`, `task_id`, `group_id`, `arrays`, `turns`, `follow`: as for `trajectories`.
        * `ack`: acknowledge each group too when the next one is requested, at most once in `ack_every_s`
          seconds, and what is left at the end of the loop, also of one that ends early. The group that the
          loop ended in is not finished until its `ack` is called.
        * `skip`: task ids of groups that are already processed and need not be sent again.
        * `kept_bytes`: bytes of trajectories to keep in memory until their group ends. Trajectories beyond
          this are fetched again by id.
        """
        reading = Reading(consumer, after, task_id, group_id, follow, ack, arrays, turns)
        return self._http.iterate(self._api.groups(reading, skip, kept_bytes, self._http.run))

    def acknowledge(self, consumer: str, position: int | str) -> int | str:
        """Move a consumer's position forward to an event's `id`, or its number. Return the
        position.
        """
        return self._run(self._api.acknowledge(consumer, position))

    def trajectory(self, session_id: str, *, turns: Turns = "table", arrays: Arrays = "base64") -> Trajectory:
        """Return the trajectory of a finished session; with turns="full" it includes its turns. Raises
        ClientError 404 until the session has finished.
        """
        return self._run(self._api.trajectory(session_id, turns, arrays))

    def formatted(self, session_id: str, format: str, *, arrays: Arrays = "base64") -> dict[str, Any]:
        """Return a finished session in a trainer's format, under `value` (docs/trainers.md). Raises
        ClientError 400 when the format cannot represent the session.
        """
        return self._run(ask(requests.formatted(session_id, format=format, arrays=arrays)))

    def session(self, session_id: str) -> dict[str, Any]:
        """Return everything that the node has of a session, finished or not: its record, its full turns, and
        its trajectory or None.
        """
        return self._run(ask(requests.session(session_id)))

    def forks(self, session_id: str) -> tuple[SessionStatus, ...]:
        """Return the forks of a session, running or ended, in the order they began; at most 1,000."""
        return self._run(ask(requests.forks(session_id))).forks

    def snapshots(self, session_id: str) -> tuple[SnapshotStatus, ...]:
        """Return the snapshots of a session, running or ended, by turn: their files, bytes and held seconds,
        and whether its harness can be resumed from each, or why not.
        """
        return self._run(ask(requests.snapshots(session_id))).snapshots

    def log(self, session_id: str, *, offset: int | None = None, tail: int | None = None) -> LogPiece:
        """Return a piece of what a session's harness printed, running or ended: from byte `offset` on, or its
        last `tail` lines. The next piece begins at `next_offset`. Raises ClientError 404 when it has no log.
        """
        return self._run(ask(requests.log(session_id, offset=offset, tail=tail)))

    def artifacts(self, session_id: str, to: str | Path) -> int:
        """Write a session's artifacts to the file `to` as a tar archive. Return the number of bytes.

        Raises ClientError 404 when the task names no artifacts, or the harness has not ended yet.
        """
        pieces = self._http.iterate(self._api.artifacts(session_id))
        next(pieces)  # the node has the archive: create the file only now
        with Path(to).open("wb") as file:
            return sum(map(file.write, pieces))

    def export(
        self,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        outcome: str | None = None,
        min_reward: float | None = None,
        arrays: Arrays = "json",
        turns: Turns = "table",
    ) -> BlockingEvents[dict[str, Any]]:
        """Yield every finished trajectory that matches, oldest first, as JSON."""
        query = exported(task_id, group_id, outcome, min_reward, arrays, turns)
        return self._http.iterate(self._api.export(**query))

    def export_bytes(
        self,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        outcome: str | None = None,
        min_reward: float | None = None,
        arrays: Arrays | None = None,
        turns: Turns | None = None,
        format: str | None = None,
        kind: str | None = None,
    ) -> BlockingEvents[bytes]:
        """Yield an export in pieces, as the node sends it. The first piece is b"", once the node has accepted
        the request.

        `format` is a trainer's format or "parquet". kind="sft" gives conversations (docs/offline-data.md),
        kind="rewards" the rewards of later evaluations.
        """
        query = exported(task_id, group_id, outcome, min_reward, arrays, turns)
        return self._http.iterate(self._api.export_bytes(**query, format=format, kind=kind))

    # ── consumers ─────────────────────────────────────────────────────────────

    def consumers(self) -> tuple[Consumer, ...]:
        """Return the consumers that the node keeps a position for, with their backlogs."""
        return self._run(ask(requests.consumers()))

    def forget_consumer(self, consumer: str) -> None:
        """Delete a consumer's position; the node keeps no more events for it. Raises ClientError 409 while it
        has a stream open.
        """
        self._run(ask(requests.forget_consumer(consumer)))

    # ── weights ───────────────────────────────────────────────────────────────

    def update_weights(
        self,
        version: str,
        *,
        path: str | Path | None = None,
        source: Mapping[str, Json] | None = None,
        mode: UpdateMode = "in_place",
    ) -> WeightsReport:
        """Serve new weights as `version` on every engine. Return when they are served, which can take
        minutes.

        Give either `path`, a checkpoint folder on the node's machine, or another `source` (docs/weights.md).
        `mode` decides what happens to turns in progress: they continue under the new weights ("in_place"),
        recompute their prefix first ("retract"), end under the old weights ("drain") or are cut ("abort").
        Raises Refused unless exactly one of `path` and `source` is given, ClientError 400 for weights that do
        not fit the model, and 409 for a version that named other weights.
        """
        return self._run(self._api.update_weights(version, None if path is None else str(path), source, mode))

    def push_weights(
        self,
        version: str,
        buckets: Iterable[Mapping[str, Json]],
        *,
        kind: Literal["tensor", "distributed"] = "tensor",
        group: str | None = None,
        mode: UpdateMode = "in_place",
    ) -> WeightsReport:
        """Serve new weights as `version`, sent as `buckets` made by `polarnode.client.tensors`.

        kind="tensor" sends handles to tensors on the node's machine; kind="distributed" broadcasts over the
        process `group` that `join_weights_group` named. If anything fails before the commit, the node keeps
        its weights. `mode` and errors are those of `update_weights`.
        """
        return self._run(self._api.push_weights(version, buckets, kind, group, mode))

    def join_weights_group(
        self,
        *,
        address: str,
        port: int,
        world_size: int,
        rank_offset: int = 1,
        backend: Backend = "nccl",
        name: str = "weights",
    ) -> None:
        """Let the node's engines join a trainer's process group as ranks from `rank_offset` on. Return when
        all `world_size` ranks have joined.

        Call it in a thread, at the same time as `polarnode.client.tensors.open_group` in rank 0.
        """
        self._run(ask(api.join_group(name, address, port, world_size, rank_offset, backend)))

    def leave_weights_group(self, name: str = "weights") -> None:
        """Let the node's engines leave a process group."""
        self._run(ask(api.leave_group(name)))

    def weights(self) -> WeightsStatus:
        """Return the version that is served and the last updates."""
        return self._run(ask(requests.weights_status()))

    def pause(self, mode: PauseMode = "in_place") -> WeightsStatus:
        """Hold generation: calls in progress and new calls wait until `resume`. `mode` is one of those of
        `update_weights`, except "drain".
        """
        return self._run(ask(api.pause(mode)))

    def resume(self) -> WeightsStatus:
        """Continue generation after `pause`."""
        return self._run(ask(api.resume()))

    def release_memory(self, tags: Sequence[MemoryTag] | None = None) -> WeightsStatus:
        """Lend the engines' GPU memory to a trainer on the same GPUs: the parts in `tags`, or all of it.

        Raises ClientError 409 unless generation is held by "retract" or "abort", and for a node started
        without `memory_saver`.
        """
        return self._run(ask(api.memory("release", tags)))

    def resume_memory(self, tags: Sequence[MemoryTag] | None = None) -> WeightsStatus:
        """Take the lent GPU memory back: the parts in `tags`, or all of it. The trainer must have
        freed it.
        """
        return self._run(ask(api.memory("resume", tags)))

    # ── adapters ──────────────────────────────────────────────────────────────

    def update_adapter(self, name: str, version: str, *, path: str | Path) -> AdapterReport:
        """Serve the adapter in `path`, a folder of the node's machine as PEFT saves it, as `version` of the
        adapter `name`. The node copies it: the folder may change once this returns.

        Calls that begin later are sampled by it. Raises ClientError 400 for one that the engine does not
        take, and 409 for a version that named other weights. `client.tensors.push_adapter` sends tensors.
        """
        return self._run(self._api.patiently(api.update_adapter(name, version, str(path))))

    def send_adapter(self, name: str, version: str, body: bytes) -> AdapterReport:
        """As `update_adapter`, from the bytes of a safetensors file whose metadata has `adapter_config`."""
        return self._run(self._api.patiently(api.send_adapter(name, version, body)))

    def adapters(self) -> AdaptersState:
        """Return the adapters of the node, and what it takes."""
        return self._run(ask(requests.adapters()))

    def delete_adapter(self, name: str) -> AdapterState:
        """Forget an adapter. Raises ClientError 409 while sessions sample by it, 404 for an unknown one."""
        return self._run(ask(api.delete_adapter(name)))

    # ── captures ──────────────────────────────────────────────────────────────

    @contextmanager
    def capture(
        self,
        spec: CaptureSpec | None = None,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        sample_index: int | None = None,
        num_samples: int | None = None,
        adapter: str | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> Iterator[CaptureSession]:
        """Open a session for an agent that you run yourself, in any process on the node's machine; its model
        calls become a trajectory.

        Use it in a `with` statement and set `reward` on the session before the block ends. The other
        parameters are fields of CaptureSpec and override `spec`. An exception in the block ends the session
        as "failed" (an interruption as "cancelled") and propagates. Raises ClientError 409 for a sample that
        has ended, and 429 when the node has no room.
        """
        requested = named(
            spec,
            task_id=task_id,
            group_id=group_id,
            sample_index=sample_index,
            num_samples=num_samples,
            adapter=adapter,
            metadata=metadata,
        )
        session = CaptureSession(opened=self._run(self._api.begin_capture(requested)))
        try:
            yield session
        except BaseException as error:
            self._run(self._api.leave_capture(session, error))
            raise
        session.result = self._run(self._api.end_capture(session))

    def score(
        self, rows: Iterable[ScoreRow | Trace], *, engine: str = "policy", adapter: str = ""
    ) -> list[ScoredRow]:
        """Return rows' logprobs under the policy, one of its adapters, or a teacher (docs/teachers.md)."""
        return self._run(ask(requests.score(rows, engine, adapter)))

    def score_session(self, session_id: str, *, weights: str = "policy") -> SessionDifference:
        """Return the logprobs that other weights give a finished session's tokens, and how far they are from
        the recorded ones (docs/teachers.md). `weights` is "policy" (those served now), the version that is
        served, an adapter or its version, or a teacher. Raises Refused for weights that the node does not
        hold, and ClientError 404 until the session has finished.
        """
        return self._run(session_scores.score_session(session_id, weights))

    # ── the node ──────────────────────────────────────────────────────────────

    def status(self) -> dict[str, Any]:
        """Return the node's current state as JSON."""
        return self._run(ask(requests.status()))

    def live_sessions(self, *, follow: bool = True) -> BlockingEvents[SessionChanges]:
        """Yield what changes of live sessions, at most twice a second, beginning with all that are live now;
        without end, or with follow=False until all were yielded.

        Each item is of one node. One that is `whole` begins a list that stands in place of all that was
        yielded of that node. A session whose `phase` is "ended" is live no longer.
        """
        return self._http.iterate(self._api.live_sessions(follow=follow))

    def finished_groups(
        self,
        *,
        limit: int = 100,
        until: float | None = None,
        state: GroupState | None = None,
        task_id: str | None = None,
    ) -> list[dict[str, Any]]:
        """Return up to `limit` finished groups as JSON, newest first, with rewards, advantages and reasons.
        It moves no consumer; `groups` reads them in order, with their trajectories.

        For the next page, set `until` to the last one's `ended`, in seconds since the epoch, and leave out
        what comes again. `state` and `task_id`: only groups that match.
        """
        return self._run(
            ask(requests.finished_groups(limit=limit, until=until, state=state, task_id=task_id))
        )

    def timeseries(self, *, since: float | None = None) -> TimeSeries:
        """Return a sample every ten seconds of what the node did in the last six hours: calls, cache, tokens
        and sessions. `since`: only samples after this time, in seconds since the epoch. Of nodes that share
        a log each has its own.
        """
        return self._run(ask(requests.timeseries(since=since)))

    def metrics(self) -> str:
        """Return the node's metrics as Prometheus text."""
        return self._run(ask(requests.metrics()))

    def node_logs(self) -> tuple[LogFile, ...]:
        """Return the names of the node's logs: its own, those of its engines and of images that it built."""
        return self._run(ask(requests.node_logs()))

    def node_log(self, name: str, *, offset: int | None = None, tail: int | None = None) -> LogPiece:
        """Return a piece of a log of the node, as `log` does. `name` is one of `node_logs`."""
        return self._run(ask(requests.node_log(name, offset=offset, tail=tail)))

    # ── running ───────────────────────────────────────────────────────────────────

    @property
    def _api(self) -> Api:
        return Api(patience_s=self.patience_s, ack_every_s=self.ack_every_s)

    @property
    def _http(self) -> BlockingHttp:
        return BlockingHttp(base_url=self.base_url, token=self.token)

    def _run(self, script: Script[T]) -> T:
        return self._http.run(script)
