"""Captures with their routes and their door on real sockets, over a real journal; the model's answers are a
script.

The node itself, its simulated engine and its deaths are in test_captures_node.py; this is for what needs a
whole program only to be slow.
"""

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import trio
from attrs import define, frozen
from control_plane_parts import Caller, TaskTaker
from fakes_runtime import MemoryRuntimes
from plane_kit import ANYWHERE, CONTEXT
from session_kit import make_evaluations
from tokens_kit import model

from polarnode.api.app import Extension, control_plane
from polarnode.api.routes import CaptureRoutes, ControlRoutes, EvaluationRoutes, ScoreRoutes
from polarnode.core.ports import Engine
from polarnode.engine.scoring import ScoringEngines
from polarnode.gateway.call import Model
from polarnode.gateway.endpoint import CaptureEndpoint, ModelPlane
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.gateway.recordings import Recordings
from polarnode.http.connections import DirectApp
from polarnode.http.server import Certificate, open_server
from polarnode.integrations.polar.extension import polar_extension
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.rollouts.admission import TaskAdmission
from polarnode.rollouts.captures import Captures
from polarnode.rollouts.forks import NoParents
from polarnode.rollouts.freezer import ContainerFreezer
from polarnode.rollouts.lifecycle import LiveSessionFactory
from polarnode.rollouts.scheduler import Scheduler, make_scheduler
from polarnode.rollouts.services import NoCachePlaces, NodeIdentity, StageSlots
from polarnode.rollouts.session import SessionServices
from polarnode.rollouts.session_containers import NodeContainers
from polarnode.rollouts.snapshots import NodeSnapshots
from polarnode.support.concurrency import PrioritySemaphore
from polarnode.support.metrics import NodeCounters

HI: Any = {"role": "user", "content": "hi"}


@define(eq=False)
class Desk:
    """One that serves."""

    caller: Caller
    captures: Captures
    scheduler: Scheduler
    journal: Journal
    tally: NodeCounters

    async def open(self, **spec: Any) -> "dict[str, Any]":
        answer = await self.caller.post("/v1/capture", spec)
        assert answer.status == 201, answer.text
        return dict(answer.json())

    async def end(self, session_id: str, **said: Any) -> "dict[str, Any]":
        answer = await self.caller.call("DELETE", f"/v1/capture/{session_id}", json_body=said)
        assert answer.status == 200, answer.text
        return dict(answer.json())

    async def events(self) -> "list[str]":
        await self.journal.writer.flush()
        return [event.key for event in (await self.journal.reader.events(0)).events]


@asynccontextmanager
async def open_capture_node(
    folder: Path,
    engine: Engine,
    *,
    limit: int = 8,
    certificate: Certificate | None = None,
    scoring: ScoringEngines | None = None,
) -> AsyncIterator[Desk]:
    """Captures of a node that has nothing else. What is open at the end is left so, as by a node that
    dies. With a certificate they are for other machines too.
    """
    served, tally, sessions_by_key = model(), NodeCounters(), LiveSessions()
    plane = ModelPlane(
        sessions=sessions_by_key,
        recordings=Recordings(folder / "requests"),
        model=Model(
            engine=engine,
            template=served.template,
            tokenizer=served.tokenizer,
            family=served.family,
            context_length=CONTEXT,
            id="tiny",
            now=lambda: 1_700_000_000.0,
        ),
    )
    async with (
        open_journal(folder / "journal.sqlite", now=lambda: 1.0) as journal,
        open_server(
            DirectApp(CaptureEndpoint(plane, public=certificate is not None).serve),
            ANYWHERE,
            certificate=certificate,
        ) as door,
    ):
        runtimes: Any = MemoryRuntimes()  # held to the same contract as the real ones
        drops_thinking = served.template.drops_thinking_before
        services = SessionServices(
            journal=journal.writer,
            stages=StageSlots(
                live=PrioritySemaphore(limit=0),
                init=PrioritySemaphore(limit=0),
                run=PrioritySemaphore(limit=0),
                post=PrioritySemaphore(limit=1),  # of evaluations again
            ),
            parents=NoParents(),
            snapshots=NodeSnapshots(folder=folder, runtimes=runtimes, tally=tally),
            drops_thinking=drops_thinking,
            containers=NodeContainers(runtimes=runtimes, ensure_image=no_container, folder=folder),
            serve_endpoint=no_container,
            context_length=CONTEXT,
            places=NoCachePlaces(),
            freezer=ContainerFreezer(),
            judge=no_container,
        )
        async with trio.open_nursery() as nursery:
            scheduler = make_scheduler(
                SqliteLog(journal),
                nursery,
                admission=TaskAdmission(
                    identity=NodeIdentity(node="node-0", model="tiny"),
                    context_length=CONTEXT,
                    scoring=scoring or ScoringEngines(),
                ),
                services=services,
                session_factory=LiveSessionFactory(
                    journal=journal.writer, tally=tally, drops_thinking=drops_thinking
                ),
                sessions_by_key=sessions_by_key,
                now=journal.now,
                most_claimed=0,
                warm=0,
            )
            await scheduler.claims.membership.join(NodeFacts(name="node-0"))
            await nursery.start(started, scheduler.registry.results.run)
            await nursery.start(started, partial(scheduler.claims.run, scheduler))
            captures = Captures(
                nursery=nursery,
                admission=scheduler.admission,
                registry=scheduler.registry,
                session_factory=scheduler.session_factory,
                sessions_by_key=sessions_by_key,
                places=services.places,
                journal=journal,
                log=scheduler.log,
                base_url=f"http{'' if certificate is None else 's'}://{door.host}:{door.port}",
                port=door.port,
                limit=limit,
            )
            service = TaskTaker(journal=journal, captures=captures)
            evaluations = make_evaluations(scheduler, journal, workers=1)
            nursery.start_soon(evaluations.run, trio.Event())
            rows = (
                *CaptureRoutes(captures=captures).rows(),
                *EvaluationRoutes(evaluations=evaluations).rows(),
                *ScoreRoutes(scoring=scheduler.admission.scoring).rows(),
            )
            app = control_plane(
                ControlRoutes(service=service).rows(),
                token="secret",
                extensions=[Extension(rows=rows), polar_extension(service)],
            )
            async with open_server(app, ANYWHERE) as address:
                yield Desk(
                    Caller(url=f"http://{address.host}:{address.port}"), captures, scheduler, journal, tally
                )
            nursery.cancel_scope.cancel()


async def started(
    run: Callable[[trio.Event], Awaitable[None]],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    task_status.started()
    await run(trio.Event())


def no_container(*_: Any) -> Any:
    raise AssertionError("a capture takes nothing that only a container needs")


# ── harnesses: the official SDKs, told by environment alone ───────────────────


# A client is made at a time: another thread's would be made with this one's key, or with the public address.
_client_lock = threading.Lock()


@frozen
class Told:
    """The environment of one harness. The SDKs read the process's own, so it is laid there for as long as a
    client is made.
    """

    env: Mapping[str, str]

    def chat(self, text: str = "hi", system: str = "", **more: Any) -> str:
        head: list[Any] = [{"role": "system", "content": system}] if system else []
        with self._made(openai.OpenAI) as client:
            return (
                client.chat.completions.create(
                    model="m", messages=[*head, {"role": "user", "content": text}], **more
                )
                .choices[0]
                .message.content
                or ""
            )

    def messages(self, text: str = "hi") -> str:
        with self._made(anthropic.Anthropic) as client:
            answer = client.messages.create(
                model="m", max_tokens=64, messages=[{"role": "user", "content": text}]
            )
        return "".join(block.text for block in answer.content if block.type == "text")

    def _made(self, sdk: Any) -> Any:
        with _client_lock:
            before = dict(os.environ)
            os.environ.update(self.env)
            try:
                return sdk(max_retries=0)
            finally:
                os.environ.clear()
                os.environ.update(before)


async def in_thread(ask: Any, *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(ask, *arguments, abandon_on_cancel=True)


def asked(url: str, key: str | None) -> httpx.Response:
    """A chat request by hand."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{url}/chat/completions", headers=headers, json={"model": "m", "messages": [HI]}, timeout=60
    )
