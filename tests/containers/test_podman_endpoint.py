"""A session's container cannot reach anything but its own door."""

import http.server
import threading
from collections.abc import Iterator

import pytest
import trio
from podman_parts import LIFETIME_S, SMALL

from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes

pytestmark = pytest.mark.podman

GET = """
import http.client, sys
for _ in range(3):
    asking = http.client.HTTPConnection("127.0.0.1", 8080, timeout=60)
    asking.request("POST", "/v1/chat/completions", body=b"{}")
    answer = asking.getresponse()
    print(answer.status, answer.read().decode())
"""

# Each of these must fail, and the reason is printed. The addresses are the machine's, a name server's, a
# cloud's metadata, and the world's.
REACH = """
import socket, sys
def tried(what, work):
    try:
        work()
    except OSError as error:
        print(what, type(error).__name__)
    else:
        print(what, "REACHED")
port = int(sys.argv[1])
for name, address in [("loopback", ("127.0.0.1", port)), ("host", ("host.containers.internal", port)), ("metadata", ("169.254.169.254", 80)),
                      ("world", ("192.0.2.1", 443)), ("dns", ("192.0.2.53", 53)), ("v6", ("2001:db8::1", 443))]:
    tried(name, lambda: socket.create_connection(address, 5))
tried("name", lambda: socket.getaddrinfo("example.com", 443))
tried("broadcast", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("10.255.255.53", 53)))
tried("raw", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
tried("netlink", lambda: socket.if_nametoindex("eth0"))
tried("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0polarnode-test"))
print("interfaces", sorted(name for _, name in socket.if_nameindex()))
print("routes", len(open("/proc/net/route").read().splitlines()) - 1)
"""


@pytest.fixture
def service_of_the_machine() -> Iterator[int]:
    """Something that listens on the machine's own loopback."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


async def serve(runtime: PodmanRuntime, seen: list[bytes]) -> None:
    """Answer what comes through the door with the runtime's own name."""
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(runtime.endpoint.dup()))

    async def answer(stream: trio.SocketStream) -> None:
        seen.append(bytes(await stream.receive_some(65536)))
        body = runtime.id.encode()
        await stream.send_all(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
        )
        await stream.aclose()

    await trio.serve_listeners(answer, [listener])


async def test_each_container_has_own_endpoint(runtimes: NodeRuntimes) -> None:
    async with (
        runtimes.open(SMALL, session_id="one", lifetime_s=LIFETIME_S) as one,
        runtimes.open(SMALL, session_id="two", lifetime_s=LIFETIME_S) as two,
    ):
        assert one.base_url == two.base_url == "http://127.0.0.1:8080"
        async with trio.open_nursery() as nursery:
            for runtime in (one, two):
                seen: list[bytes] = []
                nursery.start_soon(serve, runtime, seen)
                ended = await runtime.run(["python3", "-c", GET])
                assert ended.stdout.decode().split() == ["200", runtime.id] * 3, ended.stderr
                assert len(seen) == 3
                assert all(sent.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n") for sent in seen)
            nursery.cancel_scope.cancel()


async def test_nothing_else_can_be_reached(runtimes: NodeRuntimes, service_of_the_machine: int) -> None:
    async with runtimes.open(SMALL, session_id="alone", lifetime_s=LIFETIME_S) as runtime:
        for user in (None, "root"):
            ended = await runtime.run(["python3", "-c", REACH, str(service_of_the_machine)], user=user)
            printed = dict(line.split(" ", 1) for line in ended.stdout.decode().splitlines())
            assert ended.exit_code == 0, ended.stderr
            assert printed.pop("interfaces") == "['lo']"
            assert printed.pop("routes") == "0"
            assert "REACHED" not in printed.values(), printed
            assert len(printed) == 11


async def test_host_is_not_described_inside(runtimes: NodeRuntimes) -> None:
    import socket

    async with runtimes.open(SMALL, session_id="names", lifetime_s=LIFETIME_S) as runtime:
        printed = (
            await runtime.run(["sh", "-c", "cat /etc/hosts /etc/resolv.conf /etc/hostname"])
        ).stdout.decode()
        assert "host.containers.internal" not in printed
        assert "nameserver" not in printed
        assert socket.gethostname() not in printed.replace("polarnode-", "").split()
        assert (await runtime.run(["getent", "hosts", "localhost"])).exit_code == 0


async def test_closed_endpoint_refuses_connections(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="closed", lifetime_s=LIFETIME_S) as runtime:
        runtime.endpoint.close()
        ended = await runtime.run(["python3", "-c", GET])
        assert b"ConnectionRefusedError" in ended.stderr
