"""A session's proxy on real sockets: what is handed on, what is refused and in which words, and that every
strange client has an end.

The world here is this machine's loopback, by names that exist in these tests only.
"""

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import h11
import pytest
import trio
from attrs import define, field
from trio.abc import HalfCloseableStream

from polarnode.containers.egress import proxy
from polarnode.containers.egress.proxy import EgressProxy, serve_egress
from polarnode.containers.egress.requests import Resolver, World, connect, is_own
from polarnode.containers.egress.rules import PORTS, EgressRules, read_network

LOOPBACK = (read_network("127.0.0.0/8"), read_network("::1/128"))
NAMES = (
    "site.example",
    "*.wild.example",
    "twice.example",
    "private.example",
    "public.example",
    "nowhere.example",
    "dead.example",
)


@define(eq=False)
class Place:
    """A proxy with the world it sees. `told` is what servers of that world were sent."""

    egress: EgressProxy
    port: int
    world: "Names"
    told: list[bytes]

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def ask(self, raw: bytes, *, more: Sequence[bytes] = ()) -> bytes:
        """All that is answered on one connection."""
        async with await self.connect() as stream:
            await stream.send_all(raw)
            for piece in more:
                await stream.send_all(piece)
            return await read_all(stream)


@define(eq=False)
class Names:
    """Look-ups and connections, noted. `addresses` by name, in turn: the last is given again."""

    site: int  # the port of the server that is at every address, at 80 and 443
    addresses: dict[str, list[list[str]]] = field(factory=dict)
    looked_up: list[str] = field(factory=list, init=False)
    connected: list[tuple[str, int]] = field(factory=list, init=False)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        self.looked_up.append(host)
        answers = self.addresses.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect(self, address: str, port: int) -> HalfCloseableStream:
        self.connected.append((address, port))
        return await connect(address, self.site if port in PORTS else port)


async def read_all(stream: trio.SocketStream) -> bytes:
    got = bytearray()
    try:
        while piece := await stream.receive_some(65536):
            got += piece
    except trio.BrokenResourceError:
        pass
    return bytes(got)


async def site(stream: trio.SocketStream, told: list[bytes]) -> None:
    """A server of the world: answers by path, one request a connection, and keeps all it was sent."""
    http = h11.Connection(h11.SERVER)
    raw = bytearray()
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            got = await stream.receive_some(65536)
            raw += got
            http.receive_data(bytes(got))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            break
    told.append(bytes(raw))
    if request is not None:
        await stream.send_all(ANSWERS[request.target.decode()](bytes(body)))
    await stream.aclose()


def plain(body: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Kept: yes\r\nKeep-Alive: 9\r\nConnection: close,"
        b" X-Hop\r\nX-Hop: secret\r\n\r\nhello"
    )


ANSWERS: Mapping[str, Callable[[bytes], bytes]] = {
    "/": plain,
    "/a?b=c": plain,
    "/echo": lambda body: b"HTTP/1.1 201 Made\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body),
    "/chunked": lambda _: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer:"
        b" x\r\n\r\n"
    ),
    "/old": lambda _: b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    "/short": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this",
    "/silent": lambda _: b"",
    "/garbage": lambda _: b"SSH-2.0-OpenSSH\r\n",
    "/twice": lambda _: (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    ),
    "/split": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk",
}


@asynccontextmanager
async def place(
    *, ports: frozenset[int] = PORTS, networks: Sequence[object] = LOOPBACK
) -> AsyncIterator[Place]:
    """A proxy whose `site.example` is a server of this test."""
    told: list[bytes] = []
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, lambda stream: site(stream, told), listeners)
        own = listeners[0].socket.getsockname()[1]
        names = Names(own, {"site.example": [["127.0.0.1"]], "x.wild.example": [["127.0.0.1"]]})

        world = World(resolve=names.resolve, connect=names.connect)
        rules = EgressRules(names=NAMES, networks=tuple(networks), ports=ports)  # type: ignore[arg-type]
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        async with serve_egress(listener, rules, world) as egress:
            yield Place(egress, int(egress.url.rpartition(":")[2]), names, told)
        nursery.cancel_scope.cancel()


def get(target: str, *headers: str, host: str = "site.example", method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


LAST = "Connection: close"

# ── plain requests ────────────────────────────────────────────────────────────


async def test_plain_request_is_rewritten() -> None:
    async with place() as here:
        hop = (
            "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic x",
            "Connection: close, X-Mine",
            "X-Mine: 1",
            "Keep-Alive: 5",
            "Upgrade: h2c",
            "TE: gzip",
        )
        answer = await here.ask(get("http://Site.Example:80/a?b=c", "Accept: */*", *hop, host="SITE.example"))
        assert here.told == [
            b"GET /a?b=c HTTP/1.1\r\nHost: site.example\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        ]
        head, _, body = answer.partition(b"\r\n\r\n")
        assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"hello")
        assert b"x-kept: yes" in head.lower()
        assert b"hop" not in head.lower()
        assert b"keep-alive" not in head.lower()
        assert here.egress.figures() == {
            "allowed": {"site.example": 1},
            "refused": {},
            "failed": {},
            "sent_bytes": 0,
            "received_bytes": 5,
        }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chunked", b"5\r\nabcde\r\n0\r\n\r\n"),
        ("/old", b"d\r\nuntil the end\r\n0\r\n\r\n"),
        ("/twice", b"ok"),
    ],
    ids=lambda each: str(each),
)
async def test_answer_length_is_rewritten(path: str, body: bytes) -> None:
    async with place() as here:
        answer = await here.ask(get(f"http://site.example{path}", LAST))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        pieces = answer.partition(b"\r\n\r\n")[2]
        assert pieces.replace(b"3\r\nabc\r\n2\r\nde\r\n", b"5\r\nabcde\r\n") == body


async def test_body_follows_its_request() -> None:
    async with place() as here:
        for framing in ("Content-Length: 9", "Transfer-Encoding: chunked"):
            body = (
                b"the  body" if "Length" in framing else b"4\r\nthe \r\n5;x=y\r\n body\r\n0\r\nT: x\r\n\r\n"
            )
            answer = await here.ask(
                get("http://site.example/echo", framing, LAST, method="POST"), more=[body]
            )
            assert answer.startswith(b"HTTP/1.1 201 Made\r\n")
            assert answer.endswith(b"\r\n\r\nthe  body"), answer
        assert b"content-length: 9" in here.told[0].lower()
        assert here.told[1].endswith(b"\r\n\r\n4\r\nthe \r\n5\r\n body\r\n0\r\n\r\n"), (
            "extensions and trailers stay here"
        )
        assert here.egress.figures()["sent_bytes"] == 18


async def test_expect_continue_is_answered() -> None:
    async with place() as here, await here.connect() as stream:
        await stream.send_all(
            get("http://site.example/echo", "Content-Length: 2", "Expect: 100-continue", LAST, method="POST")
        )
        assert (await stream.receive_some(100)).startswith(b"HTTP/1.1 100 ")
        await stream.send_all(b"ok")
        assert (await read_all(stream)).endswith(b"\r\n\r\nok")
        assert b"expect" not in here.told[0].lower()


async def test_each_request_on_connection_is_judged() -> None:
    async with place() as here:
        answer = await here.ask(
            get("http://site.example/")
            + get("http://x.wild.example/", host="x.wild.example")
            + get("http://other.example/", host="other.example")
        )
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.count(b"HTTP/1.1 403 ") == 1
        assert here.egress.figures()["allowed"] == {"site.example": 1, "x.wild.example": 1}
        assert here.egress.figures()["refused"] == {"other.example": 1}
        assert len(here.world.connected) == 2


@pytest.mark.parametrize(
    ("path", "begins"),
    [("/silent", b"HTTP/1.1 502 "), ("/garbage", b"HTTP/1.1 502 "), ("/split", b"HTTP/1.1 502 ")],
)
async def test_server_without_http_is_reported(path: str, begins: bytes) -> None:
    async with place() as here:
        answer = await here.ask(get(f"http://site.example{path}"))
        assert answer.startswith(begins)
        assert answer.endswith(b"polarnode: site.example port 80 gave no answer of HTTP\n")


async def test_truncated_answer_is_visible() -> None:
    async with place() as here:
        answer = await here.ask(get("http://site.example/short"))
        assert answer.endswith(b"only this"), "a hundred bytes were promised, and the connection is over"


# ── tunnels ───────────────────────────────────────────────────────────────────


async def test_tunnel_carries_bytes_untouched() -> None:
    async with place() as here, await here.connect() as stream:
        await stream.send_all(
            b"CONNECT site.example:443 HTTP/1.1\r\nHost: site.example:443\r\n\r\n"
            + get("/echo", "Content-Length: 4", method="POST")
        )
        assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 200 Connection established\r\n")
        await stream.send_all(b"body")
        assert (await read_all(stream)) == b"HTTP/1.1 201 Made\r\nContent-Length: 4\r\n\r\nbody"
        assert here.world.connected == [("127.0.0.1", 443)]
    figures = here.egress.figures()
    assert (figures["allowed"], figures["sent_bytes"], figures["received_bytes"]) == (
        {"site.example": 1},
        len(here.told[0]),
        44,
    )


async def test_tunnel_end_may_half_close() -> None:
    """One end of a tunnel may stop sending first."""
    async with place() as here, await here.connect() as stream:
        await stream.send_all(b"CONNECT site.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        await stream.receive_some(1000)
        await stream.send_all(get("/", LAST))
        await stream.send_eof()
        assert (await read_all(stream)).endswith(b"hello")


# ── refusals ──────────────────────────────────────────────────────────────────

BY_NAME = "ask for NAME:PORT, by name and not by address"


@pytest.mark.parametrize(
    ("raw", "status", "words"),
    [
        (
            b"CONNECT other.example:443 HTTP/1.1\r\nHost: site.example\r\n\r\n",
            403,
            "other.example is not on this task's list",
        ),
        (
            b"CONNECT site.example:22 HTTP/1.1\r\nHost: site.example\r\n\r\n",
            403,
            "port 22 of site.example is not reached from here",
        ),
        (
            b"CONNECT 127.0.0.1:443 HTTP/1.1\r\nHost: site.example\r\n\r\n",
            403,
            "'127.0.0.1' is no host's name: ask by name",
        ),
        (b"CONNECT [::1]:443 HTTP/1.1\r\nHost: site.example\r\n\r\n", 403, BY_NAME),
        (b"CONNECT site.example HTTP/1.1\r\nHost: site.example\r\n\r\n", 403, BY_NAME),
        (b"CONNECT a@site.example:443 HTTP/1.1\r\nHost: site.example\r\n\r\n", 403, BY_NAME),
        (
            b"CONNECT site.example:443 HTTP/1.1\r\nHost: site.example\r\nContent-Length: 3\r\n\r\nabc",
            400,
            "a CONNECT has no body",
        ),
        (
            get("http://other.example/", host="other.example"),
            403,
            "other.example is not on this task's list (site.example",
        ),
        (get("http://site.example:8080/", host="site.example:8080"), 403, "port 8080 of site.example"),
        (
            get("http://169.254.169.254/latest/meta-data/", host="169.254.169.254"),
            403,
            "'169.254.169.254' is no host's name",
        ),
        (get("http://[::1]/", host="[::1]"), 403, "by name and not by address"),
        (get("http://user:word@site.example/"), 403, "by name and not by address"),
        (get("http://site.example@other.example/"), 403, "by name and not by address"),
        (
            get("http://site.example/", host="other.example"),
            400,
            "the header Host, 'other.example', is not the host of the request's target",
        ),
        (
            get("http://site.example/", host="site.example:8080"),
            400,
            "is not the host of the request's target",
        ),
        (get("http://site.example/#part"), 400, "this is a proxy"),
        (get("http:/site.example/"), 400, "this is a proxy: ask it for http://NAME/PATH"),
        (get("/"), 400, "this is a proxy"),
        (get("*", method="OPTIONS"), 400, "this is a proxy"),
        (get("https://site.example/"), 400, "or to CONNECT for anything else"),
        (get("ftp://site.example/"), 400, "or to CONNECT for anything else"),
        (
            get("http://site.example/", "Content-Length: 3", "Transfer-Encoding: chunked", method="POST"),
            400,
            "not both",
        ),
        (
            get("http://site.example/", "Content-Length: 3", "Content-Length: 4", method="POST"),
            400,
            "this is no request of HTTP",
        ),
        (
            get("http://site.example/", "Transfer-Encoding: gzip", method="POST"),
            501,
            "this is no request of HTTP",
        ),
        (get("http://site.example/", "Host: other.example"), 400, "this is no request of HTTP"),
        (get("http://site.example/", "A: b\rc"), 400, "this is no request of HTTP"),
        (b"GET http://site.example/ HTTP/1.1\r\n\r\n", 400, "this is no request of HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS\r\n\r\n", 400, "this is no request of HTTP"),
        (b"GET http://site.example/ HTTP/1.1\r\nA: " + b"a" * 70_000, 431, "this is no request of HTTP"),
    ],
    ids=lambda each: each[:60].decode("latin1") if isinstance(each, bytes) else None,
)
async def test_refusal_gives_its_reason(raw: bytes, status: int, words: str) -> None:
    async with place() as here:
        answer = await here.ask(raw)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), answer
        assert body.startswith(b"polarnode: ")
        assert words in body.decode()
        assert (here.world.connected, here.told, here.egress.figures()["allowed"]) == ([], [], {})


# ── names and the addresses they lead to ──────────────────────────────────────


async def test_name_of_private_address_is_refused() -> None:
    async with place(networks=()) as here:
        for addresses in (
            ["127.0.0.1"],
            ["169.254.169.254"],
            ["::ffff:10.0.0.1", "fd00:ec2::254"],
            ["0.0.0.0"],
        ):
            here.world.addresses["private.example"] = [addresses]
            answer = await here.ask(b"CONNECT private.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 403 ")
            assert (
                f"private.example is not connected to: {addresses[0]} is not a public address".encode()
                in answer
            )
        assert here.world.connected == []
        assert here.egress.figures()["refused"] == {"private.example": 4}


async def test_changing_name_gains_nothing() -> None:
    """It is looked up once for each connection, and what was checked is what is connected to."""
    async with place(networks=[read_network("127.0.0.1/32")]) as here:
        here.world.addresses["twice.example"] = [["127.0.0.1"], ["127.0.0.2"]]
        first = await here.ask(get("http://twice.example/", LAST, host="twice.example"))
        second = await here.ask(get("http://twice.example/", LAST, host="twice.example"))
        assert first.startswith(b"HTTP/1.1 200 ")
        assert second.startswith(b"HTTP/1.1 403 ")
        assert (here.world.connected, here.world.looked_up) == ([("127.0.0.1", 80)], ["twice.example"] * 2)


async def test_only_allowed_addresses_are_tried() -> None:
    async with place(networks=[read_network("127.0.0.1/32")]) as here:
        here.world.addresses["twice.example"] = [["10.0.0.1", "169.254.169.254", "127.0.0.1"]]
        assert (await here.ask(get("http://twice.example/", LAST, host="twice.example"))).startswith(
            b"HTTP/1.1 200 "
        )
        assert here.world.connected == [("127.0.0.1", 80)]


async def test_unreachable_names_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    async with place(ports=frozenset({80, free})) as here:
        answer = await here.ask(get("http://nowhere.example/", host="nowhere.example"))
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert b"nowhere.example could not be looked up: Name or service not known" in answer
        here.world.addresses["dead.example"] = [["127.0.0.1", "127.0.0.2"]]
        answer = await here.ask(get(f"http://dead.example:{free}/", host=f"dead.example:{free}"))
        assert answer.startswith(b"HTTP/1.1 504 ")
        assert f"dead.example port {free} does not answer; 2 of its addresses were tried".encode() in answer
        here.world.addresses["dead.example"] = [[]]
        assert b"dead.example is not connected to: it has no address" in await here.ask(
            get("http://dead.example/", host="dead.example")
        )
        assert here.egress.figures()["failed"] == {"nowhere.example": 1, "dead.example": 1}


async def test_own_addresses_are_recognised() -> None:
    assert is_own("127.0.0.1")
    assert is_own("127.0.0.2")
    assert not is_own("192.0.2.1")
    assert not is_own("2001:db8::1")


async def test_own_public_address_is_refused() -> None:
    """Its own doors may trust who comes from it, and need not be open to the world."""
    async with place(networks=()) as here:
        world = World(
            resolve=here.world.resolve,
            connect=here.world.connect,
            is_own=lambda address: address == "8.8.8.8",
        )
        here.world.addresses["public.example"] = [["8.8.8.8"]]
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        async with serve_egress(listener, EgressRules(names=NAMES), world) as egress:
            other = Place(egress, int(egress.url.rpartition(":")[2]), here.world, [])
            answer = await other.ask(b"CONNECT public.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"8.8.8.8 is the node's own machine" in answer
        assert here.world.connected == []


async def test_resolver_finds_own_machine_name() -> None:
    found = await Resolver(trio.CapacityLimiter(1))("localhost", 80)
    assert set(found) <= {"127.0.0.1", "::1"}
    assert found


# ── bounds ────────────────────────────────────────────────────────────────────


async def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more waits until another ends, and then it is answered."""
    async with place() as here:
        held = [await here.connect() for _ in range(proxy.CONNECTIONS)]
        async with await here.connect() as late:
            await late.send_all(get("http://site.example/", LAST))
            with trio.move_on_after(0.5) as waited:
                await late.receive_some(1)
            assert waited.cancelled_caught
            await held.pop().aclose()
            assert (await read_all(late)).endswith(b"hello")
        for stream in held:
            await stream.aclose()


async def trickle(stream: trio.SocketStream, data: bytes) -> None:
    for letter in data:
        await stream.send_all(bytes([letter]))
        await trio.sleep(0.02)


async def test_silent_client_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "HEAD_S", 0.2)
    monkeypatch.setattr(proxy, "IDLE_S", 0.3)
    async with place() as here:
        assert await here.ask(b"GET http://site") == b""
        async with await here.connect() as trickling:
            with pytest.raises(trio.BrokenResourceError):
                await trickle(trickling, b"GET http://site.example/ HTTP/1.1\r\n" * 50)
        tunnel = await here.ask(b"CONNECT site.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert tunnel.startswith(b"HTTP/1.1 200 "), "and then both ends were silent"
        assert (await here.ask(get("http://site.example/", LAST))).endswith(b"hello")


async def test_counts_of_refused_names_are_bounded() -> None:
    async with place() as here:
        for index in range(80):
            await here.ask(get(f"http://n{index}.example/", host=f"n{index}.example"))
        await here.ask(b"CONNECT \x7f:1 HTTP/1.1\r\nHost: x\r\n\r\n")
        await here.ask(b"CONNECT 1.2.3.4:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        refused = here.egress.figures()["refused"]
        assert isinstance(refused, dict)
        assert refused["n0.example"] == 1
        assert (len(refused), refused["(others)"]) == (65, 18)


async def test_nothing_remains_after_close() -> None:
    """With connections in every state, the end takes no time and closes them all."""
    async with place() as here:
        idle, tunnel = await here.connect(), await here.connect()
        await tunnel.send_all(b"CONNECT site.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        await tunnel.receive_some(100)
    for stream in (idle, tunnel):
        assert await read_all(stream) == b""
        await stream.aclose()
    with pytest.raises(OSError, match="all attempts to connect"):
        await here.connect()


async def test_environment_suits_every_client() -> None:
    async with place() as here:
        url = f"http://127.0.0.1:{here.port}"
        env = here.egress.env
        assert {env[name] for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")} == {url}
        assert env["no_proxy"] == env["NO_PROXY"] == "localhost,127.0.0.1,::1"
