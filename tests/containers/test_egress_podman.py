"""The way out of a real container: by the proxy, to the names of its list, and no other way."""

import http.server
import threading
from collections.abc import Iterator, Sequence

import pytest
import trio
from attrs import evolve
from podman_parts import LIFETIME_S, SMALL

from polarnode.containers.egress.proxy import EgressProxy, NodeEgress, open_egress
from polarnode.containers.egress.requests import Resolver, World
from polarnode.containers.egress.rules import check_egress, egress_rules
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes
from polarnode.core.errors import Refused

pytestmark = pytest.mark.podman


class Packages(http.server.BaseHTTPRequestHandler):
    """A server of packages, on the machine's own loopback."""

    def do_GET(self) -> None:
        body = f"package of {self.headers['Host']}{self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def packages() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Packages) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


async def resolve(host: str, port: int) -> Sequence[str]:
    """This machine's resolver, but for names that lead where they should not."""
    await trio.lowlevel.checkpoint()
    made_up = {
        "private.example": ["10.0.0.1"],
        "metadata.example": ["169.254.169.254"],
        "rebound.example": ["0.0.0.0"],
    }
    return made_up[host] if host in made_up else await Resolver(trio.CapacityLimiter(1))(host, port)


async def curl(runtime: PodmanRuntime, egress: EgressProxy, *arguments: str) -> tuple[int, str]:
    """Its exit code, and all it said."""
    ended = await runtime.run(["curl", "-sS", "-m", "60", *arguments], env=egress.env)
    return ended.exit_code, (ended.stdout + ended.stderr).decode()


async def test_only_listed_names_are_reached(runtimes: NodeRuntimes, packages: int) -> None:
    names = ["localhost", "private.example", "metadata.example", "rebound.example"]
    rules = evolve(egress_rules(names, ["127.0.0.0/8", "::1/128"]), ports=frozenset({packages, 80}))
    site = f"localhost:{packages}"
    async with (
        runtimes.open(SMALL, session_id="egress", lifetime_s=LIFETIME_S) as runtime,
        open_egress(runtime.network, rules, World(resolve=resolve)) as egress,
    ):
        through = ("--noproxy", "")  # localhost is what no client asks a proxy for
        assert await curl(runtime, egress, *through, f"http://{site}/a") == (0, f"package of {site}/a")
        assert await curl(runtime, egress, *through, "--proxytunnel", f"http://{site}/b") == (
            0,
            f"package of {site}/b",
        )
        refused = {
            f"http://other.example:{packages}/": "other.example is not on this task's list",
            f"http://127.0.0.1:{packages}/": "'127.0.0.1' is no host's name",
            f"http://[::1]:{packages}/": "by name and not by address",
            "http://2130706433/": "is no host's name",
            "http://169.254.169.254/latest/meta-data/": "'169.254.169.254' is no host's name",
            "http://localhost:22/": "port 22 of localhost is not reached from here",
            "http://private.example/": (
                "private.example is not connected to: 10.0.0.1 is not a public address"
            ),
            "http://metadata.example/": "169.254.169.254 is not a public address",
            "http://rebound.example/": "0.0.0.0 is not a public address",
        }
        for url, words in refused.items():
            exit_code, said = await curl(runtime, egress, *through, url)
            assert (exit_code, said[:11]) == (0, "polarnode: "), (url, said)
            assert words in said, url
            exit_code, said = await curl(runtime, egress, *through, "--proxytunnel", url)
            assert exit_code != 0, (url, said)
        for direct in (
            f"http://127.0.0.1:{packages}/",
            f"http://{site}/",
            "http://10.0.0.1/",
            "http://169.254.169.254/",
        ):
            assert (await curl(runtime, egress, "--noproxy", "*", direct))[0] in (6, 7), direct
        figures = egress.figures()
        assert figures["allowed"] == {"localhost": 2}
        assert isinstance(figures["refused"], dict)
        assert figures["refused"]["other.example"] == 2
        assert figures["failed"] == {}


async def test_harness_installs_package_by_environment(runtimes: NodeRuntimes, packages: int) -> None:
    """As pip does it: Python's own library, and nothing told but the variables. The model's door is not asked
    for through the proxy.
    """

    async def connect(address: str, port: int) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", packages)

    async def resolve_all(host: str, port: int) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        return ["10.7.0.1"]

    node = NodeEgress(
        names=("*.packages.example",),
        networks=("10.7.0.0/16",),
        world=World(resolve=resolve_all, connect=connect),
    )
    with pytest.raises(Refused, match=r"does not let tasks reach packages\.example"):
        check_egress(("packages.example",), node.names)
    check_egress(("pypi.packages.example",), node.names)
    script = (
        "import urllib.request as u; print(u.urlopen('http://pypi.packages.example/simple',"
        " timeout=60).read().decode(), u.proxy_bypass('127.0.0.1:8080'))"
    )
    async with (
        runtimes.open(SMALL, session_id="egress-env", lifetime_s=LIFETIME_S) as runtime,
        node.open(runtime.network, ("pypi.packages.example",)) as egress,
    ):
        ended = await runtime.run(["python3", "-c", script], env=egress.env)
        assert ended.stdout.decode().split("\n")[0] == "package of pypi.packages.example/simple True", (
            ended.stderr
        )
        assert egress.figures()["allowed"] == {"pypi.packages.example": 1}


async def test_containers_have_separate_lists(runtimes: NodeRuntimes, packages: int) -> None:
    async with (
        runtimes.open(SMALL, session_id="egress-one", lifetime_s=LIFETIME_S) as one,
        runtimes.open(SMALL, session_id="egress-two", lifetime_s=LIFETIME_S) as two,
        open_egress(one.network, egress_rules(["one.example"], []), World(resolve=resolve)) as first,
        open_egress(two.network, egress_rules(["two.example"], []), World(resolve=resolve)) as second,
    ):
        assert first.env == second.env
        assert "not on this task's list (two.example)" in (await curl(two, second, "http://one.example/"))[1]
        assert "not on this task's list (one.example)" in (await curl(one, first, "http://two.example/"))[1]
    assert first.figures()["refused"] == {"two.example": 1}
