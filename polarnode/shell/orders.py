"""What a session is given: who it is, what it is to do, and what its node offers it."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from socket import socket

from attrs import frozen

from polarnode.evaluators.evaluator import Evaluator
from polarnode.harnesses.harness import Harness
from polarnode.merge.trajectory import Identity
from polarnode.records import Trajectory
from polarnode.shell.gates import Gate
from polarnode.shell.podman import Runtimes
from polarnode.tasks import TaskSpec


@frozen(kw_only=True)
class SessionOrder:
    """One session of a task: who it is and what it is to do."""

    identity: Identity
    spec: TaskSpec
    harness: Harness
    evaluator: Evaluator


@frozen(kw_only=True)
class Stages:
    """The stage limits every session passes."""

    live: Gate
    init: Gate
    run: Gate
    post: Gate


@frozen(kw_only=True)
class House:
    """What a session needs of its node."""

    runtimes: Runtimes
    stages: Stages
    serve_door: Callable[[str, socket], AbstractAsyncContextManager[object]]
    publish: Callable[[Trajectory], None]
    context_length: int
    log_dir: Path
    ensure_image: Callable[[str], Awaitable[None]]
    allowed_imports: tuple[str, ...] = ()
