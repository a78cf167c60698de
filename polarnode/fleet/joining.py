"""A fleet that nodes join: they announce themselves to the front, which lists them in a file of its own.

The file is one of `--nodes @FILE`, so that a front that starts again waits for all nodes it had. A front
without one collects announcements first: with half of its nodes it would have the tasks of the others run
again. Who announces itself has the fleet's token.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import trio
from attrs import define, evolve, field, frozen
from quart import Response, request

from polarnode.api.openapi_shapes import Operation, Where
from polarnode.api.query import read_query
from polarnode.api.service import json_response
from polarnode.client.pins import split_pin
from polarnode.core.codec.json import structure
from polarnode.core.codec.limits import address, is_loopback, url_fault
from polarnode.core.errors import Busy, ConfigError, Refused, boundary
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.front import Front
from polarnode.fleet.members import GONE_S
from polarnode.http.asgi import RouteRow, body_json
from polarnode.http.self_signed import self_signed
from polarnode.support.bounded import private_opener

logger = logging.getLogger(__name__)

ANNOUNCED_S: Final = 5.0  # between announcements of a node: a front that lost its file has all again soon
# without an announcement, and a node that is gone is taken off the list: longer than a machine's restart with
# the load of its model, and an autoscaled fleet does not collect the dead of a day
FORGOTTEN_S: Final = 600.0
# announcements of a front without a list are collected: a node that lives makes two in this time, and one
# that makes none in it counts as gone at every other front too
GATHER_S: Final = GONE_S
MOST: Final = 256  # nodes on the list: four times what a fleet has; more is a mistake that announces itself
JOINED: Final = "joined.txt"  # of the front's state folder


@frozen(kw_only=True)
class Announcement:
    """Body of POST /v1/fleet/nodes: the address at which the front reaches a node, with its certificate's
    digest behind #.
    """

    url: str


@frozen(kw_only=True)
class JoinAnswer:
    """Of an announcement: how many nodes are on the list."""

    nodes: int


OPERATION: Final[tuple[Where, Operation]] = (
    ("POST", "/v1/fleet/nodes"),
    Operation(
        summary="A node announces itself to the front of its fleet.",
        tag="fleet",
        body=Announcement,
        answer=JoinAnswer,
        errors=(429,),
    ),
)


def joinable(config: FleetConfig) -> FleetConfig:
    """The settings of a front that nodes join: with a token, a certificate and a list, made in its state
    folder where they are not given. Raises ConfigError.
    """
    state, token, files = Path(config.state_dir), config.token, (config.tls_cert, config.tls_key)
    if config.node_token not in (None, token):
        raise ConfigError("a fleet that nodes join has one token: unset POLARNODE_NODE_TOKEN")
    with boundary(ConfigError, f"--state-dir {state} cannot be written"):
        if token is None:
            token = _kept_token(state / "token")
        with open(state / JOINED, "ab", opener=private_opener):
            pass
    if files == (None, None) and not is_loopback(config.host):
        files = self_signed(state, address(config.public_url or "").hostname or config.host)
    nodes = (*config.nodes, f"@{state / JOINED}")
    return evolve(config, token=token, tls_cert=files[0], tls_key=files[1], nodes=nodes)


def _kept_token(path: Path) -> str:
    if not path.exists():
        with open(path, "w", opener=private_opener) as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    return path.read_text().strip()


@define(eq=False, kw_only=True)
class JoinedNodes:
    """The list of announced nodes, by address: their certificates, and their last announcements."""

    front: Front
    file: Path
    gather_s: float = field(factory=lambda: GATHER_S)
    _seen: dict[str, tuple[str, float]] = field(factory=dict, init=False)
    _news: trio.Event = field(factory=trio.Event, init=False)

    def rows(self) -> Iterator[RouteRow]:
        """The rows of the front's table."""
        yield ("POST", "/v1/fleet/nodes", self.join)

    async def join(self) -> Response:
        read_query(request.args)
        url, certificate = read_announced(structure(await body_json(), Announcement).url)
        known = self._seen.get(url)
        if known is None and len(self._seen) >= MOST:
            raise Busy(f"{MOST} nodes have joined: end some first", retry_after=FORGOTTEN_S)
        self._seen[url] = (certificate, trio.current_time())
        if known is None or known[0] != certificate:
            logger.info("node %s has %s", url, "announced itself" if known is None else "another certificate")
            self._news.set()
        return json_response({"nodes": len(self._seen)})

    async def keep(self) -> None:
        """Keep the file, until cancelled; the front reads it again as any list of nodes."""
        text = await trio.to_thread.run_sync(self.file.read_text)
        for url, certificate in map(split_pin, text.splitlines()):
            self._seen[url] = (certificate, trio.current_time())
        if not self._seen:
            await trio.sleep(self.gather_s)
        while True:
            self._news = trio.Event()
            self._forget(trio.current_time())
            lines = "".join(f"{url}#{pin}\n" if pin else f"{url}\n" for url, (pin, _) in self._seen.items())
            if lines != text:
                await trio.to_thread.run_sync(self._write, lines)
                text = lines
            with trio.move_on_after(ANNOUNCED_S):
                await self._news.wait()

    def _forget(self, now: float) -> None:
        members = self.front.roster.members
        for url, (_, seen) in [*self._seen.items()]:
            gone = url not in members or members[url].state in ("gone", "left")
            if gone and now - seen >= FORGOTTEN_S:
                logger.warning("node %s is off the list: silent for %.0f s, and gone", url, now - seen)
                del self._seen[url]

    def _write(self, text: str) -> None:
        part = self.file.with_suffix(".part")
        with open(part, "w", opener=private_opener) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.file)


def read_announced(text: str) -> tuple[str, str]:
    """The address of an announcement and the digest behind it. Raises Refused for one that the front must not
    send its token to.
    """
    try:
        url, certificate = split_pin(text)
    except ConfigError as error:
        raise Refused(str(error), path="$.url") from error
    where, url = address(url), url.rstrip("/")
    if fault := url_fault(url):
        raise Refused(f"url {fault}", path="$.url")
    if where.path.strip("/") or where.query:
        raise Refused("url must be an address alone, without a path", path="$.url")
    if not certificate and not is_loopback(where.hostname or ""):
        raise Refused(
            "url must be https and name the certificate's SHA-256 behind #: the fleet's token is sent there",
            path="$.url",
        )
    return url, certificate
