"""A node that joins a fleet: where it listens, its own certificate, and its announcements to the front.

Invariant: nothing that fails here ends a session or the node; it is one sentence in the log, repeated seldom,
and in GET /v1/status.
"""

import logging
import socket
from pathlib import Path
from typing import Final

import trio
from attrs import define, evolve, field, fields

from polarnode.client.values import ClientError, Unreachable
from polarnode.core.codec.limits import address, is_loopback
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, PolarnodeError
from polarnode.fleet.join_token import JoinToken, read_join_token
from polarnode.fleet.joining import ANNOUNCED_S
from polarnode.fleet.link import Link
from polarnode.http.self_signed import self_signed
from polarnode.http.server import Address
from polarnode.node.config import NodeConfig
from polarnode.node.node import control_certificate

logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0  # for an announcement: the front only writes a line
REPEATED_S: Final = 600.0  # between log lines of one problem: a front may be off for a night
USUAL_NAME: Final = fields(NodeConfig).node_id.default
EVERYWHERE: Final = ("0.0.0.0", "::")


def joining_config(config: NodeConfig) -> NodeConfig:
    """The settings of a node that is about to serve: with a join token it listens where the front reaches it,
    and has a certificate of its own off loopback and its host's name, unless the settings name others. Raises
    ConfigError.
    """
    if config.join is None:
        return config
    front = read_join_token(config.join).url
    if config.node_id == USUAL_NAME:  # else all nodes of a fleet had it
        config = evolve(config, node_id=socket.gethostname())
    if is_loopback(config.host):
        config = evolve(config, host=reached_from(front))
    if config.tls_cert is None and not is_loopback(config.host):
        chain, key = self_signed(Path(config.state_dir), config.host)
        config = evolve(config, tls_cert=chain, tls_key=key)
    return config


def reached_from(url: str) -> str:
    """This machine's address on its way to `url`; nothing is sent. Raises ConfigError without a way."""
    where = address(url)
    try:
        family, kind, _, _, to = socket.getaddrinfo(
            where.hostname, where.port or 443, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as asking:
            asking.connect(to)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"join: this machine has no way to the front at {url} ({error.strerror}): connect their network,"
            " or start the front with an address that this machine reaches"
        ) from error


@define(eq=False, kw_only=True)
class FleetEntry:
    """A node's place in the list of its front. `joined` is whether the last announcement was taken; `problem`
    is why not.
    """

    config: NodeConfig
    token: JoinToken
    joined: bool = field(default=False, init=False)
    problem: str | None = field(default=None, init=False)
    _logged: float = field(default=float("-inf"), init=False)

    def status(self) -> dict[str, Json]:
        """For GET /v1/status."""
        return {"front": self.token.url, "joined": self.joined, "problem": self.problem}

    async def announce(self, served: Address) -> None:
        """Announce the node, until cancelled. `served` is where its control plane listens."""
        host = served.host
        if host in EVERYWHERE:
            host = await trio.to_thread.run_sync(reached_from, self.token.url)
        where = f"{f'[{host}]' if ':' in host else host}:{served.port}"
        link = Link(url=self.token.url, token=self.token.token, certificate=self.token.certificate)
        try:
            while True:
                await self._tried(link, where)
                await trio.sleep(ANNOUNCED_S)
        finally:
            await link.close()  # noqa: ASYNC102 - bounded and shielded there

    async def _tried(self, link: Link, where: str) -> None:
        problem = None
        try:
            certificate = await trio.to_thread.run_sync(control_certificate, self.config)
            url = f"http://{where}" if certificate is None else f"https://{where}#{certificate.digest}"
            await link.call("POST", "/v1/fleet/nodes", value={"url": url}, timeout_s=ANSWER_S)
        except ClientError as error:
            problem = f"the front at {link.url} refuses this node: {error}"
            if error.status == 401:
                problem = (
                    f"the front at {link.url} does not know this node's token: it has another one now; start"
                    " the node with the join token that the front prints"
                )
        except Unreachable as error:
            problem = f"the front is not reached: {error}"
        except PolarnodeError as error:
            problem = str(error)
        self._note(problem, trio.current_time())

    def _note(self, problem: str | None, now: float) -> None:
        if problem is None and not self.joined:
            logger.info("the front at %s has this node on its list", self.token.url)
        if problem is not None and (problem != self.problem or now >= self._logged + REPEATED_S):
            logger.warning("%s", problem)
            self._logged = now
        self.joined, self.problem = problem is None, problem
