"""The running node: what the control plane asks of it, and the model endpoint of its captures.

Invariants: the keys of captures are in a table of their own, apart from those of sessions in containers. The
captures' socket is not the node's own, and is on loopback unless the operator names an address and a
certificate.
"""

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from socket import socket

import trio
from attrs import define, evolve, field

from polarnode import harnesses
from polarnode.api.callbacks import CallbackService
from polarnode.api.metrics import Figures
from polarnode.api.service import Submitted
from polarnode.containers.images import Images
from polarnode.containers.runtimes import NO_CONTAINERS, AbsentRuntimes, NodeRuntimes
from polarnode.core.codec.json import plain
from polarnode.core.conversation import Json
from polarnode.core.errors import Busy, ConfigError, Conflict, Refused
from polarnode.core.status import LiveSessionStatus
from polarnode.core.task import ForkSpec, TaskSpec
from polarnode.engine.adapter_store import AdapterStore
from polarnode.engine.engines import Engines
from polarnode.engine.memory import EngineControl
from polarnode.engine.weights import Weights
from polarnode.gateway.call import Model
from polarnode.gateway.endpoint import CaptureEndpoint, ModelPlane
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.gateway.recordings import Recordings
from polarnode.http.connections import DirectApp
from polarnode.http.server import (
    MAX_CAPTURE_CONNECTIONS,
    Address,
    Certificate,
    listening_socket,
    open_server,
)
from polarnode.journal.journal import Journal
from polarnode.journal.log.port import Log
from polarnode.journal.log.rules import with_log_status
from polarnode.node.config import NodeConfig
from polarnode.rollouts.admission import TaskSubmission, check_task, full_disk
from polarnode.rollouts.captures import Captures
from polarnode.rollouts.evaluations import Evaluations
from polarnode.rollouts.forks import ForkNodes, check_fork, check_freezing, find_frozen, find_snapshot
from polarnode.rollouts.judges import NodeJudges
from polarnode.rollouts.membership import LogMembership
from polarnode.rollouts.scheduler import Scheduler
from polarnode.support.metrics import LoopLag
from polarnode.tokens.template import LoadedModel

logger = logging.getLogger(__name__)

DRAIN_RETRY_S = 10.0  # a client offers a task again after this; a drain lasts as long as its longest session


@define(eq=False)
class Node:
    """A node that runs. Satisfies the control plane's `NodeService`."""

    config: NodeConfig
    journal: Journal  # it has the turns of the node's own sessions, and is the log of a node alone
    log: Log
    engines: Engines
    runtimes: NodeRuntimes | AbsentRuntimes
    images: Images
    model: LoadedModel
    membership: LogMembership
    submission: TaskSubmission
    scheduler: Scheduler
    judges: NodeJudges
    lag: LoopLag
    captures: Captures
    callbacks: CallbackService
    weights: Weights
    adapters: AdapterStore
    engine_control: EngineControl
    evaluations: Evaluations
    # Two submissions with one key at the same time must become one task.
    _submit_lock: trio.Lock = field(factory=trio.Lock, init=False)

    async def submit(self, spec: TaskSpec, *, idempotency_key: str | None) -> Submitted:
        """Accept a task, or repeat the answer to an earlier submission of the same task. Raises Refused,
        Conflict, Busy or DiskFull.
        """
        self._refuse_unsupported(spec)
        no_image = await self.images.refusal(spec.runtime.image) if self.config.runs_tasks else None
        async with self._submit_lock:
            existing = await self._find_existing(spec, idempotency_key)
            if existing is not None:
                return existing
            _refuse_missing_image(no_image)
            return await self._submit_new(spec, idempotency_key)

    def _refuse_unsupported(self, spec: TaskSpec) -> None:
        if not self.config.containers and self.config.log is None:
            raise Refused(NO_CONTAINERS)
        self.callbacks.check(spec)

    async def _submit_new(self, spec: TaskSpec, idempotency_key: str | None) -> Submitted:
        if self.membership.draining and not self.log.shared:  # other nodes claim the places of a shared log
            raise Busy("this node drains and takes no new tasks: use another", retry_after=DRAIN_RETRY_S)
        check_task(
            with_log_status(self.journal.health.statistics(), self.log.log_status, now=self.journal.now()),
            pending=self.log.open_places,
            more=spec.num_samples,
            limit=self.config.pending_limit,
        )
        if spec.snapshot_at.freeze:
            check_freezing(self.runtimes, "$.snapshot_at.freeze")
        if spec.fork is not None:
            await self._check_fork(spec, spec.fork)
        task_id, session_ids = await self.submission.submit(
            spec, idempotency_key=idempotency_key, callback_kinds=self.callbacks.kinds_for(spec)
        )
        logger.info("task %s is taken: %d sessions of %s", task_id, len(session_ids), spec.harness.name)
        return Submitted(task_id=task_id, session_ids=session_ids)

    async def _check_fork(self, spec: TaskSpec, fork: ForkSpec) -> None:
        """Raise Refused for forks that could not begin. A fork at another node is checked when it begins
        there.
        """
        snapshots = self.scheduler.services.snapshots
        parents = ForkNodes(
            log=self.log,
            journal_writer=self.journal.writer,
            journal_reader=self.journal.reader,
            node=self.node_id,
            snapshots=snapshots.folder,
            copies=snapshots.copies,
            patient=False,
        )
        elsewhere, parent = await parents.elsewhere(fork), await parents.parent(fork)
        if elsewhere is not None and parent is not None and not parent.count:
            return  # the parent still runs at another node, which has its turns
        parent = check_fork(spec, fork, parent)
        if elsewhere is not None:
            return
        if fork.by == "freeze":
            await find_frozen(snapshots, spec, fork, parent)
        elif fork.by == "resume":
            harness = harnesses.find(spec.harness, allowed_imports=self.config.import_paths)
            await find_snapshot(snapshots, spec, fork, harness)

    async def _find_existing(self, spec: TaskSpec, idempotency_key: str | None) -> Submitted | None:
        record = await self.log.task_of_key(idempotency_key) if idempotency_key else None
        record = record or (await self.log.task(spec.task_id) if spec.task_id else None)
        if record is None:
            return None
        if record.damaged is not None:
            raise Conflict(
                f"task {record.task_id} was submitted before, and its row in the journal is damaged: give"
                " this one its own task_id and Idempotency-Key"
            )
        if evolve(record.spec, task_id=spec.task_id) != spec or spec.task_id not in (None, record.task_id):
            raise Conflict(
                f"task {record.task_id} was submitted before with another body: give this one its own task_id"
                " and Idempotency-Key"
            )
        ids = tuple(session.session_id for session in record.sessions)
        return Submitted(task_id=record.task_id, session_ids=ids, created=False)

    async def cancel(self, task_id: str) -> bool:
        """End a task's sessions, which keep their turns. When this returns, no restart tries one of them
        again.
        """
        return await self.scheduler.cancel(task_id)

    @property
    def node_id(self) -> str:
        return self.config.node_id

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def volumes(self) -> tuple[str, ...]:
        return self.config.volumes

    @property
    def generation(self) -> Weights:
        return self.weights

    def sessions(self) -> Iterable[LiveSessionStatus]:
        """The sessions that have a container of their own."""
        return self.scheduler.sessions()

    def end_session(self, session_id: str) -> bool:
        """End one session, which keeps its turns. Returns False when it is not live."""
        return self.scheduler.cancel_session(session_id)

    def cancel_all(self) -> None:
        """End every session. Each keeps its turns."""
        self.scheduler.registry.cancel_all()

    async def stop(self, *, cancel: bool) -> None:
        """Refuse new tasks and wait for the sessions to end. With `cancel` they are ended now and keep their
        turns.
        """
        await self.scheduler.registry.stop(cancel=cancel)

    def status(self) -> dict[str, Json]:
        """The status of the node as JSON, for `GET /v1/status`."""
        return {
            "node": self.config.node_id,
            "model": {
                "name": self.model.name,
                "family": self.model.family.name,
                "context_length": self.engines.context_length,
            },
            "scheduler": plain(self.scheduler.statistics()),
            "sessions": [plain(status) for status in self.scheduler.sessions() if status.outcome is None],
            "captures": {
                "limit": self.captures.limit,
                "open": [plain(status) for status in self.captures.list()],
            },
            "engine": plain(self.engines.statistics()),
            "teachers": self.scheduler.admission.scoring.status(),
            "weights": plain(self.weights.status()),
            "adapters": plain(self.adapters.status()),
            "callbacks": plain(self.callbacks.statistics()),
            "runtimes": plain(self.runtimes.statistics()),
            "ui_actions": self.config.ui_actions,
            "evaluations": {**self.evaluations.statistics()},
            "judges": plain(self.judges.statistics()),
            "loop": plain(self.lag.statistics()),
        }

    def figures(self) -> Figures:
        """The node's numbers, for GET /metrics."""
        scheduler, journal = self.scheduler.statistics(), self.journal.health.statistics()
        return Figures(
            tally=self.scheduler.registry.tally.copied(),
            engine=self.engines.statistics(),
            stages=scheduler.stages,
            runtimes=self.runtimes.statistics(),
            live=scheduler.live,
            captures=len(self.captures.list()),
            callbacks=self.callbacks.statistics(),
            journal_bytes=journal.stored_bytes,
            journal_backlog=journal.backlog_bytes,
            lag=self.lag.statistics(),
            weights=self.weights.status(),
            adapters=self.adapters.status(),
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token of the served model."""
        return self.model.tokenizer.token_bytes(token)

    def ready(self) -> bool:
        """Whether the node takes tasks and some engine host answers."""
        return self.unready() is None

    def unready(self) -> str | None:
        """Why the node is not ready, or None when it is."""
        if self.scheduler.registry.stopping:
            return "the node stops: its sessions are ended and saved"
        journal = self.journal.health.statistics()
        if journal.refuses_tasks:
            return journal.warning
        if (full := full_disk(journal)) is not None:
            return full
        hosts = self.engines.statistics().hosts
        if self.config.engine == "none" or any(host.state == "ready" for host in hosts):
            return None
        why = next((host.last_error for host in hosts if host.last_error), None)
        return "no engine host answers" if why is None else f"no engine host answers: {why}"


def _refuse_missing_image(refusal: str | None) -> None:
    """Raise Refused for a task whose image is not available to its containers."""
    if refusal is not None:
        raise Refused(f"runtime.image: {refusal}", path="$.runtime.image")


def control_certificate(config: NodeConfig) -> Certificate | None:
    """The certificate of the control plane, or None for plain HTTP. Raises ConfigError for unusable files."""
    chain, key = config.tls_cert, config.tls_key
    return None if chain is None or key is None else Certificate(chain, key, settings="tls")


# ── captures ────────────────────────────────────────────────────────────


def captures_certificate(config: NodeConfig) -> Certificate | None:
    """The certificate of the captures' endpoint, or None. Raises ConfigError for unusable files."""
    chain, key = config.capture_tls_cert, config.capture_tls_key
    return None if chain is None or key is None else Certificate(chain, key)


def captures_listener(config: NodeConfig) -> socket:
    """Bind the socket of the captures' endpoint. Raises ConfigError where this fails."""
    try:
        return listening_socket(Address(host=config.capture_listen, port=config.capture_port))
    except ConfigError as error:
        why = getattr(error.__cause__, "strerror", error)
        raise ConfigError(
            f"capture_port {config.capture_port} is not available at capture_listen {config.capture_listen}"
            f" ({why}): choose another, or 0 for any that is free, and an address of this machine"
        ) from error


@asynccontextmanager
async def open_captures(
    config: NodeConfig, journal: Journal, scheduler: Scheduler, model: Model, recordings: Recordings | None
) -> AsyncIterator[Captures]:
    """Serve the captures of a node. A capture is open at the end of the block only if the node is ended by
    force; the node's next start finds it.
    """
    certificate = captures_certificate(config)
    listener = captures_listener(config)
    sessions_by_key = LiveSessions()
    endpoint = CaptureEndpoint(
        ModelPlane(sessions=sessions_by_key, model=model, recordings=recordings),
        public=config.captures_public,
    )
    async with (
        open_server(
            DirectApp(endpoint.serve),
            listener,
            connections=MAX_CAPTURE_CONNECTIONS,
            certificate=certificate,
        ) as address,
        trio.open_nursery() as nursery,
    ):
        host = f"[{address.host}]" if ":" in address.host else address.host
        here = f"{'http' if certificate is None else 'https'}://{host}:{address.port}"
        yield Captures(
            nursery=nursery,
            admission=scheduler.admission,
            registry=scheduler.registry,
            session_factory=scheduler.session_factory,
            sessions_by_key=sessions_by_key,
            places=scheduler.services.places,
            journal=journal,
            log=scheduler.log,
            base_url=(config.capture_url or here).rstrip("/"),
            port=address.port,
            limit=0 if config.engine == "none" else config.capture_limit,
        )
        nursery.cancel_scope.cancel()
