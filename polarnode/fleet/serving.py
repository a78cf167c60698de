"""A front that serves: where its nodes come from, its routes on one socket, and its end.

A launcher only lists addresses. What is listed and does not answer is `joining`, then `gone`; what is no
longer listed is forgotten once it is gone or was drained. A file and a DNS name are asked again, so that
SLURM, Kubernetes and systemd need no other interface.
"""

import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final

import trio

from polarnode.api.app import Extension, control_plane
from polarnode.api.page import PageFiles
from polarnode.client.pins import split_pin
from polarnode.core.errors import ConfigError
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.engine_routes import FleetWeightsRoutes
from polarnode.fleet.front import Front, open_front
from polarnode.fleet.joining import JOINED, OPERATION, JoinedNodes
from polarnode.fleet.live import FleetLiveRoutes
from polarnode.fleet.openapi import fleet_operations
from polarnode.fleet.pools import WeightPools
from polarnode.fleet.routes import FrontRoutes, answer_nodes_errors
from polarnode.fleet.service import polar_routes
from polarnode.fleet.sglang import FleetSglang
from polarnode.fleet.streams import StreamRoutes
from polarnode.http.asgi import BrowserGuard
from polarnode.http.server import CONTROL_CONNECTIONS, Address, Certificate, open_server
from polarnode.support.locks import take_lock

logger = logging.getLogger(__name__)

ASKED_S: Final = 5.0  # between looks at a file or a name: a node that joins is there within seconds

# ── the list of nodes ────────────────────────────────────────────────────────────


async def listed(config: FleetConfig) -> dict[str, str]:
    """The addresses of nodes now, each with the digest of its pinned certificate or "". Raises ConfigError
    for a file that cannot be read; a name that has no address now has no nodes.
    """
    found: dict[str, str] = {}
    for each in config.nodes:
        if each.startswith("@"):
            try:
                text = await trio.Path(each[1:]).read_text()
            except OSError as error:
                raise ConfigError(f"nodes: {each[1:]} cannot be read ({error.strerror})") from error
            found |= _addresses(line for line in text.splitlines() if line.strip() and line[0] != "#")
        elif each.startswith("dns:"):
            found |= dict.fromkeys(await _resolved(each), "")
        else:
            found |= _addresses([each])
    return found


def _addresses(lines: Iterable[str]) -> dict[str, str]:
    return {url.rstrip("/"): pin for url, pin in map(split_pin, lines)}


async def _resolved(entry: str) -> list[str]:
    """The addresses of `dns:NAME:PORT`, or `dns:https://NAME:PORT`."""
    scheme, _, rest = entry.removeprefix("dns:").rpartition("//")
    name, _, port = rest.rpartition(":")
    if not name or not port.isdigit():
        raise ConfigError(f"nodes: {entry!r} is no name: write it as dns:NAME:PORT")
    try:
        answers = await trio.socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        logger.warning("the name %s has no address now: %s", name, error)
        return []
    hosts = sorted({str(answer[4][0]) for answer in answers})
    return [f"{scheme or 'http:'}//{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]


async def ask_again(front: Front) -> None:
    """Keep a front's list of nodes, until cancelled."""
    while True:
        try:
            found = await listed(front.config)
        except ConfigError as error:
            logger.warning("the list of nodes stays as it was: %s", error)
        else:
            front.listed(found)
        await trio.sleep(ASKED_S)


# ── nodes on this machine ────────────────────────────────────────────────────────


@asynccontextmanager
async def local_nodes(
    count: int, folder: Path, options: tuple[str, ...], environment: Mapping[str, str]
) -> AsyncIterator[tuple[str, ...]]:
    """So many nodes on free ports of loopback, for as long as the block, or LOCAL_ORPHAN_S longer if this
    process is killed; gives their addresses. Each has a folder of its own below `folder`.
    """
    urls: list[str] = []
    async with AsyncExitStack() as stack:
        await trio.Path(folder).mkdir(parents=True, exist_ok=True)
        lifeline = await trio.Path(folder / "lifeline").absolute()
        held = take_lock(Path(lifeline))
        if held is None:
            raise ConfigError(f"another front has nodes in {folder}: end it, or give --state-dir")
        stack.enter_context(held)
        kept = {"POLARNODE_LIFELINE": str(lifeline), "POLARNODE_ORPHAN_S": str(LOCAL_ORPHAN_S)}
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        for number in range(count):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            name = f"node-{number}"
            argv = (
                sys.executable,
                "-m",
                "polarnode.cli",
                "--port",
                str(port),
                "--state-dir",
                str(folder / name),
            )
            log = stack.enter_context((folder / f"{name}.log").open("ab"))
            nursery.start_soon(
                _kept, (*argv, *options), {**environment, **kept, "POLARNODE_NODE_ID": name}, log
            )
            urls.append(f"http://127.0.0.1:{port}")
        yield tuple(urls)


LOCAL_ORPHAN_S: Final = 5.0  # that a node of this machine lives without the process that started it
RESTART_S: Final = 1.0  # between an end of a node of this machine and its next start


async def _kept(argv: tuple[str, ...], environment: Mapping[str, str], log: BinaryIO) -> None:
    """Run a node, and run it again when it ends."""
    while True:
        process = await trio.lowlevel.open_process(
            argv, stdout=log, stderr=log, env=dict(environment), start_new_session=True
        )
        try:
            code = await process.wait()
            logger.warning("a node of this machine ended with code %s and is started again", code)
        finally:
            process.terminate()
            with trio.move_on_after(30, shield=True):
                await process.wait()
        await trio.sleep(RESTART_S)


# ── serving ────────────────────────────────────────────────────────────


@asynccontextmanager
async def serve_front(config: FleetConfig) -> AsyncIterator[tuple[Front, Address]]:
    """A front and its socket, for as long as the block."""
    certificate = None
    if config.tls_cert is not None and config.tls_key is not None:
        certificate = Certificate(config.tls_cert, config.tls_key, settings="tls")
    async with open_front(config, ask_again) as front:
        streams = StreamRoutes(roster=front.roster, nursery=front.nursery)
        live = FleetLiveRoutes(roster=front.roster, nursery=front.nursery)
        pools = WeightPools(front=front)
        front.joined.append(pools.bring)
        front.nursery.start_soon(pools.keep)
        engines = pools.rows(lambda weights: FleetWeightsRoutes(weights=weights).rows())
        rows = (
            *PageFiles().rows(),
            *FrontRoutes(front=front).rows(),
            *streams.rows(),
            *live.rows(),
            *engines,
        )
        guard = BrowserGuard(
            bound=config.host.lower(), allowed=config.allowed_hosts, any_host=config.token is not None
        )
        sglang = Extension(
            rows=(*pools.rows(lambda weights: FleetSglang(weights=weights).extension().rows),), basic=True
        )
        joined = Extension(rows=())
        if config.join:
            joining = JoinedNodes(front=front, file=Path(config.state_dir) / JOINED)
            joined = Extension(rows=(*joining.rows(),), operations=dict([OPERATION]))
            front.nursery.start_soon(joining.keep)
        served = Extension(rows=rows, operations=fleet_operations())
        extensions = (served, sglang, polar_routes(front, pools.hold), joined)
        app = control_plane((), token=config.token, guard=guard, extensions=extensions)
        answer_nodes_errors(app)
        listener = Address(host=config.host, port=config.port)
        async with open_server(
            app, listener, connections=CONTROL_CONNECTIONS, certificate=certificate
        ) as address:
            yield front, address
