"""Settings of a node that shares a log: its name, its certificate, and the address at which other nodes reach
it.
"""

import re
import socket
from pathlib import Path
from typing import Final

from attrs import evolve, fields

from polarnode.core.codec.limits import is_loopback
from polarnode.core.errors import ConfigError
from polarnode.http.self_signed import self_signed
from polarnode.journal.log.postgres.connection import read_dsn
from polarnode.node.config import NodeConfig

DEFAULT_NODE_ID: Final = fields(NodeConfig).node_id.default
# The other nodes write a node's name in a header, and before the names of its log files.
NODE_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
WILDCARD_HOSTS: Final = ("0.0.0.0", "::")


def shared_config(config: NodeConfig) -> NodeConfig:
    """Complete the settings of a node that is about to serve. A node that shares a log is named as its host,
    and off loopback it has a certificate that it signs itself, unless the settings say otherwise. Raises
    ConfigError where the other nodes could not reach it.
    """
    if config.log is None:
        return config
    servers = log_servers(config.log)
    if config.node_id == DEFAULT_NODE_ID:  # nodes of one name would replace each other in the log
        config = evolve(config, node_id=socket.gethostname())
    if not NODE_NAME_PATTERN.fullmatch(config.node_id):
        raise ConfigError(
            f"node_id {config.node_id!r} names a node of a log: it must be letters, digits, '.', '_' or '-',"
            " and begin with a letter or digit"
        )
    if is_loopback(config.host):
        if config.node_url is None and not all(is_loopback(each) for each in servers):
            raise ConfigError(
                f"--host {config.host} is not reached by the other nodes of the log at {servers[0]}: give"
                " --host, an address of this machine, or --node-url"
            )
    elif config.tls_cert is None:
        chain, key = self_signed(Path(config.state_dir), config.host)
        config = evolve(config, tls_cert=chain, tls_key=key)
    return config


def log_servers(dsn: str) -> list[str]:
    """The hosts in a DSN, which may name several. A Unix socket of this machine counts as localhost."""
    found = (read_dsn(dsn).get("host") or "localhost").split(",")
    return ["localhost" if each.startswith(("/", "@")) or not each else each for each in found]


def control_plane_url(config: NodeConfig, listener: socket.socket) -> str:
    """The URL at which other nodes reach a control plane that listens. Raises ConfigError where this machine
    has no way to the server of the log.
    """
    if config.node_url is not None:
        return config.node_url.rstrip("/")
    host, port = listener.getsockname()[:2]
    if host in WILDCARD_HOSTS and config.log is not None:
        host = _outgoing_address(log_servers(config.log)[0])
        if is_loopback(host):
            raise ConfigError(
                f"--host {config.host}: the log's server is on this machine, which does not show the address"
                " at which other nodes reach this one: give --node-url, or that address as --host"
            )
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _outgoing_address(name: str) -> str:
    """The address of this machine from which it would reach a host. Nothing is sent."""
    try:
        family, kind, _, _, to = socket.getaddrinfo(name, 5432, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(to)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--host: this machine has no way to the log's server {name} now ({error.strerror}): give"
            " --node-url, the address at which other nodes reach this one"
        ) from error
