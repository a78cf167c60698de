"""Calls to the Podman service: raw HTTP/1.1 on Trio streams, and podman-py in threads.

The raw part carries calls that may take long or must be cancelled, above all the hijacked stream of an exec
(`exec.py`), because podman-py cannot feed, bound or cancel an exec. Everything else goes through podman-py.
It is synchronous and its sessions cannot be shared, so each call borrows one client, and a few calls run at a
time. Invariant: only calls that are short and end by themselves (the socket has a deadline) go through a
thread, because a thread cannot be cancelled. No such call is abandoned, because a create whose answer nobody
reads would leave an unrecorded container.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import h11
import podman
import trio
from attrs import define, field, frozen
from podman.errors import APIError

from polarnode.core.backoff import Backoff
from polarnode.core.conversation import Json
from polarnode.core.errors import RuntimeFault, boundary

# ── raw HTTP ──────────────────────────────────────────────────────────────────

READ = 64 * 1024  # bytes at a time: conmon writes frames of at most 8 KiB, several fit
BODY_LIMIT = 4 << 20  # bytes of an answer: an inspect is 10 KB
# This label of a copy of a prepared container has the time of files that are placed in it. The copy itself is
# newer.
LABEL_FILES_TIME = "polarnode.files_time"
# The year 1990. Images that are built reproducibly say 1970, and times in zip archives (wheels, for example)
# begin in 1980.
EARLIEST_TIME_S = 631_152_000
API = "/v4.0.0/libpod"  # the service takes any version in the path, 4 and 5 alike


@frozen(kw_only=True)
class PodmanReply:
    """A whole response."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises RuntimeFault with the service's own message for a status of 400
        or more.
        """
        try:
            parsed = json.loads(self.body or b"{}")
        except ValueError:
            parsed = {"message": self.body.decode(errors="replace")}
        if self.status >= 400:
            raise RuntimeFault(f"podman: {parsed.get('message') or parsed.get('cause') or self.status}")
        return parsed


@define(eq=False)
class HijackedStream:
    """A stream after the protocol switch: raw bytes in both directions. The first bytes received are those
    that came together with the response.
    """

    stream: trio.SocketStream
    _early: bytes = field(default=b"")

    async def receive(self) -> bytes:
        """Receive some bytes; none means the end. A broken connection counts as an end too, because neither
        proves that the program ended.
        """
        if self._early:
            early, self._early = self._early, b""
            return early
        try:
            return bytes(await self.stream.receive_some(READ))
        except trio.BrokenResourceError:
            return b""


async def call(socket: Path, method: str, path: str, body: Mapping[str, Json] | None = None) -> PodmanReply:
    """Make one request on its own connection. Raises RuntimeFault when the service is unreachable or its
    answer is invalid.
    """
    with boundary(RuntimeFault, "the podman service does not answer"):
        async with await trio.open_unix_socket(str(socket)) as stream:
            connection = h11.Connection(h11.CLIENT)
            await _send(stream, connection, method, path, body, {"Connection": "close"})
            head = await _event(stream, connection)
            return await _rest(stream, connection, head.status_code)


@asynccontextmanager
async def hijack_stream(socket: Path, path: str, body: Mapping[str, Json]) -> AsyncIterator[HijackedStream]:
    """POST and take the connection over. Raises RuntimeFault with the service's message when it refuses."""
    with boundary(RuntimeFault, "the podman service does not answer"):
        stream = await trio.open_unix_socket(str(socket))
    try:
        with boundary(RuntimeFault, "the podman service broke off"):
            connection = h11.Connection(h11.CLIENT)
            await _send(stream, connection, "POST", path, body, {"Connection": "Upgrade", "Upgrade": "tcp"})
            hijacked = await _taken_over(stream, connection)
        yield hijacked
    finally:
        await trio.aclose_forcefully(stream)


async def _send(
    stream: trio.SocketStream,
    connection: h11.Connection,
    method: str,
    path: str,
    body: Mapping[str, Json] | None,
    extra: Mapping[str, str],
) -> None:
    content = json.dumps(body).encode() if body is not None else b""
    headers = {
        "Host": "podman",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **extra,
    }
    data = (
        connection.send(h11.Request(method=method, target=API + path, headers=list(headers.items()))) or b""
    )
    data += connection.send(h11.Data(data=content)) or b""
    await stream.send_all(data + (connection.send(h11.EndOfMessage()) or b""))


async def _event(stream: trio.SocketStream, connection: h11.Connection) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(bytes(await stream.receive_some(READ)))
    return event


async def _rest(stream: trio.SocketStream, connection: h11.Connection, status: int) -> PodmanReply:
    body = bytearray()
    while isinstance(event := await _event(stream, connection), h11.Data):
        body += event.data
        if len(body) > BODY_LIMIT:
            raise RuntimeFault(f"podman: an answer of more than {BODY_LIMIT} bytes")
    return PodmanReply(status=status, body=bytes(body))


async def _taken_over(stream: trio.SocketStream, connection: h11.Connection) -> HijackedStream:
    head = await _event(stream, connection)
    if isinstance(head, h11.InformationalResponse) and head.status_code == 101:
        return HijackedStream(stream, connection.trailing_data[0])
    (await _rest(stream, connection, head.status_code)).json()
    raise RuntimeFault(f"podman: an exec was answered with {head.status_code} and no stream")


# ── podman-py in threads ──────────────────────────────────────────────────────

Answer = TypeVar("Answer")
# A call fails after this many seconds without a byte. The longest seen was 3 s, with 32 calls on two cores.
CALL_S = 90.0

# Seconds before a removal or a listing is tried again. conmon's own cleanup of an ended container may keep a
# mount busy, and a listing fails when any node of the store removes a listed container meanwhile.
PAUSES = Backoff(first_s=0.1, longest_s=2.0, factor=5.0)
RETRIES = 3


@frozen(kw_only=True)
class ListedContainer:
    """A container as the service lists it."""

    id: str
    names: tuple[str, ...]
    labels: Mapping[str, str]


@frozen(kw_only=True)
class InitialisedContainer:
    """A container whose first process waits to be started: its process id on this machine, and its layer's
    folder.
    """

    pid: int
    layer: Path | None  # None where the storage driver has none, as vfs
    image: str  # its image's id


@frozen(kw_only=True)
class PlacedContainer:
    """Where a container is on this machine: its id, the folders of its root, of its layer and of its bundle,
    its configuration's file, and its image's id.
    """

    id: str
    root: str
    layer: Path
    bundle: Path
    image: str

    @property
    def config(self) -> Path:
        return self.bundle / "config.json"


@define(eq=False)
class ContainerClient:
    """Runs at most `calls` calls at a time, each on its own podman-py client."""

    socket: Path
    calls: int
    limiter: trio.CapacityLimiter = field(init=False)
    _idle: "SimpleQueue[Any]" = field(factory=SimpleQueue, init=False)

    def __attrs_post_init__(self) -> None:
        self.limiter = trio.CapacityLimiter(self.calls)
        for _ in range(self.calls):
            self._idle.put(podman.PodmanClient(base_url=f"http+unix://{self.socket}", timeout=CALL_S))

    def close(self) -> None:
        """Close the connections. No call may be in flight any more."""
        while not self._idle.empty():
            self._idle.get().close()

    async def create(self, spec: Mapping[str, Json]) -> str:
        """Create a container from a libpod spec and return its id. The spec is posted as it is, because
        podman-py has no field for `timeout`.
        """
        return await self._call(
            "create",
            lambda client: str(
                _checked(client.api.post("/containers/create", data=json.dumps(spec))).json()["Id"]
            ),
        )

    async def init(self, container: str) -> InitialisedContainer:
        """Make the container's namespaces, with its first process waiting in them."""

        def work(client: Any) -> InitialisedContainer:
            _checked(client.api.post(f"/containers/{container}/init"))
            inspected = _checked(client.api.get(f"/containers/{container}/json")).json()
            layer = ((inspected.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
            return InitialisedContainer(
                pid=int(inspected["State"]["Pid"]),
                layer=Path(layer) if layer else None,
                image=str(inspected["Image"]),
            )

        return await self._call("init", work)

    async def placed(self, container: str) -> PlacedContainer:
        """Find where a container is, whether it was started or not. Raises RuntimeFault if it has no
        layer.
        """

        def work(client: Any) -> PlacedContainer:
            found = _checked(client.api.get(f"/containers/{container}/json")).json()
            layer = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir")
            if not layer:
                raise APIError("the container has no layer of its own")
            return PlacedContainer(
                id=str(found["Id"]),
                root=str(Path(layer).parent / "merged"),
                layer=Path(layer),
                bundle=Path(found["StaticDir"]),
                image=str(found["Image"]),
            )

        return await self._call("inspect", work)

    async def restore(self, container: str) -> None:
        """Restore the processes of a container from the checkpoint in its bundle."""
        await self._call(
            "restore",
            lambda client: _checked(
                client.api.post(
                    f"/containers/{container}/restore",
                    params={"keep": True, "ignoreRootFS": True, "ignoreVolumes": True},
                )
            ),
        )

    async def first_process(self, container: str) -> int:
        """The process id, on this machine, of the first process of a running container."""
        found = await self._call(
            "inspect", lambda client: _checked(client.api.get(f"/containers/{container}/json")).json()
        )
        return int(found["State"]["Pid"])

    async def files_time(self, image: str) -> int:
        """The modification time of files that are placed in containers of an image, in seconds since 1970. It
        is just after the image was made, so that it is later than all times in the image and the same in each
        container.
        """
        inspected = await self._call(
            "inspect", lambda client: _checked(client.api.get(f"/images/{image}/json")).json()
        )
        kept = (inspected.get("Labels") or {}).get(LABEL_FILES_TIME)
        if kept is not None and str(kept).isdigit():
            return int(kept)
        made = datetime.fromisoformat(str(inspected["Created"])).timestamp()
        return max(int(made) + 1, EARLIEST_TIME_S)

    async def image_id(self, image: str) -> str:
        """The id of an image that is in the store."""
        found = await self._call(
            "inspect", lambda client: _checked(client.api.get(f"/images/{image}/json")).json()
        )
        return str(found["Id"])

    async def has_image(self, image: str) -> bool:
        """Whether an image is in the store."""
        try:
            return bool(await self.image_id(image))
        except RuntimeFault:
            return False

    async def start(self, container: str) -> None:
        """Let the first process run."""
        await self._call("start", lambda client: _checked(client.api.post(f"/containers/{container}/start")))

    async def pause(self, container: str) -> None:
        """Stop everything in it by the kernel's freezer."""
        await self._call("pause", lambda client: _checked(client.api.post(f"/containers/{container}/pause")))

    async def unpause(self, container: str) -> None:
        """Let everything in it go on."""
        await self._call(
            "unpause", lambda client: _checked(client.api.post(f"/containers/{container}/unpause"))
        )

    async def remove(self, container: str) -> None:
        """Kill and remove a container with its anonymous volumes; one that is already gone is fine."""

        def work(client: Any) -> None:
            answer = client.api.delete(
                f"/containers/{container}", params={"force": True, "v": True, "timeout": 0}
            )
            if answer.status_code != 404:
                _checked(answer)

        await self._call_retrying("remove", work)

    async def list_labelled(self, label: str) -> Sequence[ListedContainer]:
        """List every container that has the label, running or not."""

        def work(client: Any) -> list[ListedContainer]:
            found = _checked(
                client.api.get(
                    "/containers/json", params={"all": True, "filters": json.dumps({"label": [label]})}
                )
            ).json()
            return [
                ListedContainer(
                    id=each["Id"], names=tuple(each.get("Names") or ()), labels=each.get("Labels") or {}
                )
                for each in found
            ]

        return await self._call_retrying("list", work)

    async def all_ids(self) -> frozenset[str]:
        """The ids of all containers of the store, whichever node made them."""

        def work(client: Any) -> frozenset[str]:
            return frozenset(
                each["Id"]
                for each in _checked(client.api.get("/containers/json", params={"all": True})).json()
            )

        return await self._call_retrying("list", work)

    async def _call_retrying(self, what: str, work: "Callable[[Any], Answer]") -> Answer:
        """Make a call that is safe to repeat, with retries."""
        for attempt in range(RETRIES):
            try:
                return await self._call(what, work)
            except RuntimeFault:
                await trio.sleep(PAUSES.delay(attempt))
        return await self._call(what, work)

    async def _call(self, what: str, work: "Callable[[Any], Answer]") -> Answer:
        with boundary(RuntimeFault, f"podman {what}"):
            return await trio.to_thread.run_sync(self._with_client, work, limiter=self.limiter)

    def _with_client(self, work: "Callable[[Any], Answer]") -> Answer:
        client = self._idle.get_nowait()  # at most as many as the limiter allows
        try:
            return work(client)
        finally:
            self._idle.put(client)


def _checked(answer: Any) -> Any:
    """Return the response. Raises APIError, with the service's own message, if the service refused."""
    if answer.ok:
        return answer
    try:
        parsed = answer.json()
    except ValueError:
        raise APIError(f"status {answer.status_code}") from None
    raise APIError(str(parsed.get("message") or parsed.get("cause") or parsed))
