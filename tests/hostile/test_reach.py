"""Ways out of a container: there is the door, where a task has names the proxy, and no other."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from attrs import frozen
from hostile_kit import Arena, reported
from live_kit import free_port

from polarnode.client import ClientError

pytestmark = pytest.mark.podman

SCAN = """
    import errno, json, os, socket, stat
    from inside import outcome, turn, tell
    given = json.loads(os.environ["GIVEN"])
    def opened(family, host, ports):
        found = []
        for port in ports:
            with socket.socket(family, socket.SOCK_STREAM) as trying:
                trying.settimeout(3)
                if trying.connect_ex((host, port)) == 0 and trying.getsockname() != trying.getpeername():  # a port may meet itself
                    found.append(port)
        return found
    def unix(name):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
            trying.connect(name)
    def listening(name):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mine:
            mine.bind(name)
    sockets = [os.path.join(folder, name) for folder, _, names in os.walk("/") if not folder.startswith("/proc") for name in names
               if stat.S_ISSOCK(os.lstat(os.path.join(folder, name)).st_mode)]
    tell(
        turn=turn(),
        loopback=opened(socket.AF_INET, "127.0.0.1", range(1, 65536)),
        other_loopback=opened(socket.AF_INET, "127.0.0.2", given["ports"]) + opened(socket.AF_INET, "0.0.0.0", given["ports"]),
        loopback_6=opened(socket.AF_INET6, "::1", [*given["ports"], 80, 443, 8080]),
        outside={host: opened(socket.AF_INET, host, [*given["ports"], 80, 443]) for host in given["hosts"]},
        outside_6={host: opened(socket.AF_INET6, host, [80, 443]) for host in ("fd00:ec2::254", "fe80::1", "2001:db8::1")},
        unix={name: outcome(lambda: unix(chr(0) + name)) for name in given["abstract"]},
        own=outcome(lambda: listening(chr(0) + given["abstract"][0])),
        sockets=sockets,
        resolved=[name for name in ("localhost.localdomain", "example.com", "metadata.google.internal", "host.containers.internal")
                  if outcome(lambda: socket.getaddrinfo(name, 80)) == "DONE"],
        netlink=outcome(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).sendto(b"x" * 32, (0, 0))),
        interfaces=sorted(name for _, name in socket.if_nameindex()),
    )
"""
METADATA = ("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192")


@frozen
class Machine:
    """What listens on this machine while a session looks for it."""

    port: int
    abstract: str


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A web server on every address of this machine, and a socket without a file."""
    with ExitStack() as stack:
        server = stack.enter_context(
            http.server.ThreadingHTTPServer(("0.0.0.0", 0), http.server.BaseHTTPRequestHandler)
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        abstract = f"polarnode-hostile-{server.server_port}"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"\0{abstract}")
        listener.listen()
        yield Machine(server.server_port, abstract)


def given(arena: Arena, machine: Machine) -> dict[str, str]:
    """What a session is told to look for."""
    own = socket.gethostbyname(socket.gethostname())
    ports = [arena.node.port, machine.port, 22, free_port()]
    hosts = [own, "10.0.0.1", "172.17.0.1", "192.168.0.1", "10.88.0.1", "192.0.2.1", *METADATA]
    return {
        "GIVEN": json.dumps(
            {
                "ports": ports,
                "hosts": hosts,
                "abstract": [machine.abstract, "/tmp/.X11-unix/X0", "dbus-session"],
            }
        )
    }


def test_only_the_endpoint_is_reachable(arena: Arena, machine: Machine) -> None:
    found = reported(arena.attack(SCAN, env=given(arena, machine)))
    assert found["loopback"] == [8080]
    nothing_else(found)


def nothing_else(found: dict[str, Any]) -> None:
    assert found["other_loopback"] == []
    assert found["loopback_6"] == []
    assert [host for host, ports in found["outside"].items() if ports] == []
    assert [host for host, ports in found["outside_6"].items() if ports] == []
    assert "DONE" not in found["unix"].values()
    assert found["own"] == "DONE", "the name is free in there: it is another namespace's"
    assert found["sockets"] == []
    assert found["resolved"] == []
    assert found["interfaces"] == ["lo"]
    assert found["turn"] == 200


PROXY = """
    import os
    from urllib.parse import urlsplit
    from inside import tell
    import socket
    proxy = urlsplit(os.environ["HTTP_PROXY"])
    def asked(request):
        with socket.create_connection((proxy.hostname, proxy.port), timeout=60) as asking:
            asking.sendall(request)
            got = b""
            while piece := asking.recv(65536):
                got += piece
        return got.decode("latin1").splitlines()
    def get(host):
        return asked(f"GET http://{host}/ HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n".encode())
    def connect(target):
        return asked(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode())
    given = json.loads(os.environ["GIVEN"])
    hosts = ["localhost", "other.example", "metadata.google.internal", "host.containers.internal", *given["hosts"], "[::1]", "0x7f000001", "2852039166"]
    said = {host: get(host) for host in hosts}
    said |= {host + ":443": connect(host + ":443") for host in hosts}
    said |= {f"localhost:{port}": connect(f"localhost:{port}") for port in given["ports"]}
    tell(proxy={host: [int(lines[0].split()[1]), lines[-1]] for host, lines in said.items()}, bypassed=os.environ["NO_PROXY"])
"""


def test_allowed_names_add_only_proxy(arena: Arena, machine: Machine) -> None:
    """`localhost` is a name this node allows, and where it leads no setting allows: the machine's own servers
    stay out of reach.
    """
    trajectory = arena.attack(
        SCAN + PROXY, env=given(arena, machine), runtime={"egress": ["localhost", "allowed.example"]}
    )
    found = reported(trajectory)
    assert found["loopback"] == [3128, 8080]
    nothing_else(found)
    answers = found["proxy"]
    assert {host: said for host, said in answers.items() if said[0] != 403} == {}
    assert (
        "is not a public address: the node's setting egress_networks may allow its network"
        in answers["localhost"][1]
    )
    assert "is not on this task's list (localhost, allowed.example)" in answers["other.example"][1]
    assert "ask by name" in answers["169.254.169.254:443"][1]
    figures = trajectory.metrics["egress"]
    assert isinstance(figures, dict)
    assert figures["allowed"] == {}
    assert figures["sent_bytes"] == figures["received_bytes"] == 0


def test_task_with_other_names_is_refused(arena: Arena) -> None:
    with pytest.raises(
        ClientError, match=r"this node does not let tasks reach other\.example.*setting egress"
    ):
        arena.start("", runtime={"egress": ["localhost", "other.example"]})
