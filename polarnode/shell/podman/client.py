"""Calls to the node's Podman service through podman-py, in threads, few at a time.

podman-py is synchronous and its sessions are not for sharing, so each call borrows one client. Rule for whoever edits it: only calls that are
short and that end by themselves (the socket has a deadline) may come here, because a thread can not be cancelled; what may take long is in
`exec.py`. A call is never abandoned: a create whose answer nobody reads would leave a container nobody knows.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import podman
import trio
from attrs import define, field, frozen
from podman.errors import APIError

from polarnode.conversation import Json
from polarnode.errors import RuntimeFault, boundary

Answer = TypeVar("Answer")
CALL_S = 90.0  # seconds without a byte before a call fails: 3 s were seen with 32 calls on two cores, ten times that is no hang yet

# Seconds before a removal is tried again, as conmon's own cleanup of a container that ended may be under way and a mount busy; and a listing,
# which fails when any node of the store removes one of those listed meanwhile.
PAUSES = (0.1, 0.5, 2.0)


@frozen(kw_only=True)
class Listed:
    """A container as the service lists it."""

    id: str
    names: tuple[str, ...]
    labels: Mapping[str, str]


@frozen(kw_only=True)
class Initialised:
    """A container whose first process waits to be started: its id on this machine, and the folder its layer is written to."""

    pid: int
    upper: Path | None  # None where the storage driver has none, as vfs


@define(eq=False)
class Client:
    """At most `calls` calls at a time, each on a client of its own."""

    socket: Path
    calls: int
    limiter: trio.CapacityLimiter = field(init=False)
    _idle: "SimpleQueue[Any]" = field(factory=SimpleQueue, init=False)

    def __attrs_post_init__(self) -> None:
        self.limiter = trio.CapacityLimiter(self.calls)
        for _ in range(self.calls):
            self._idle.put(podman.PodmanClient(base_url=f"http+unix://{self.socket}", timeout=CALL_S))

    def close(self) -> None:
        """Close the connections; no call is in flight any more."""
        while not self._idle.empty():
            self._idle.get().close()

    async def create(self, spec: Mapping[str, Json]) -> str:
        """Create a container from a libpod spec; its id. A raw call: podman-py has no word for `timeout`."""
        return await self._call("create", lambda client: str(_checked(client.api.post("/containers/create", data=json.dumps(spec))).json()["Id"]))

    async def init(self, container: str) -> Initialised:
        """Make the container's namespaces, with its first process waiting in them."""

        def work(client: Any) -> Initialised:
            _checked(client.api.post(f"/containers/{container}/init"))
            told = _checked(client.api.get(f"/containers/{container}/json")).json()
            upper = ((told.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
            return Initialised(pid=int(told["State"]["Pid"]), upper=Path(upper) if upper else None)

        return await self._call("init", work)

    async def start(self, container: str) -> None:
        """Let the first process run."""
        await self._call("start", lambda client: _checked(client.api.post(f"/containers/{container}/start")))

    async def remove(self, container: str) -> None:
        """Kill and remove a container with its anonymous volumes; one that is already gone is fine."""

        def work(client: Any) -> None:
            answer = client.api.delete(f"/containers/{container}", params={"force": True, "v": True, "timeout": 0})
            if answer.status_code != 404:
                _checked(answer)

        await self._persistent("remove", work)

    async def labelled(self, label: str) -> Sequence[Listed]:
        """Every container that has the label, running or not."""

        def work(client: Any) -> list[Listed]:
            found = _checked(client.api.get("/containers/json", params={"all": True, "filters": json.dumps({"label": [label]})})).json()
            return [Listed(id=each["Id"], names=tuple(each.get("Names") or ()), labels=each.get("Labels") or {}) for each in found]

        return await self._persistent("list", work)

    async def known(self) -> frozenset[str]:
        """The ids of every container of the store, whoever made it."""

        def work(client: Any) -> frozenset[str]:
            return frozenset(each["Id"] for each in _checked(client.api.get("/containers/json", params={"all": True})).json())

        return await self._persistent("list", work)

    async def _persistent(self, what: str, work: "Callable[[Any], Answer]") -> Answer:
        """A call that may be made again."""
        for pause in PAUSES:
            try:
                return await self._call(what, work)
            except RuntimeFault:
                await trio.sleep(pause)
        return await self._call(what, work)

    async def _call(self, what: str, work: "Callable[[Any], Answer]") -> Answer:
        with boundary(RuntimeFault, f"podman {what}"):
            return await trio.to_thread.run_sync(self._borrowed, work, limiter=self.limiter)

    def _borrowed(self, work: "Callable[[Any], Answer]") -> Answer:
        client = self._idle.get_nowait()  # as many as the limiter lets in
        try:
            return work(client)
        finally:
            self._idle.put(client)


def _checked(answer: Any) -> Any:
    if not answer.ok:
        raise APIError(_explanation(answer))
    return answer


def _explanation(answer: Any) -> str:
    try:
        told = answer.json()
        return str(told.get("message") or told.get("cause") or told)
    except ValueError:
        return f"status {answer.status_code}"
