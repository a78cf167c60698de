"""A node that shares a log: where it listens, its certificate, and the address it gives to other nodes."""

import socket
from pathlib import Path
from typing import Final

from attrs import evolve, fields
from psycopg.conninfo import conninfo_to_dict

from polarnode.core.codec.limits import is_loopback
from polarnode.core.errors import ConfigError
from polarnode.http.self_signed import self_signed
from polarnode.node.config import NodeConfig

USUAL_NAME: Final = fields(NodeConfig).node_id.default
EVERYWHERE: Final = ("0.0.0.0", "::")


def joining_config(config: NodeConfig) -> NodeConfig:
    """The settings of a node that is about to serve: one that shares a log is named as its host, and has a
    certificate of its own off loopback, unless the settings name others. Raises ConfigError.
    """
    if config.log is None:
        return config
    if config.node_id == USUAL_NAME:  # else all nodes of the log had it, and each would replace the last
        config = evolve(config, node_id=socket.gethostname())
    if config.tls_cert is None and not is_loopback(config.host):
        chain, key = self_signed(Path(config.state_dir), config.host)
        config = evolve(config, tls_cert=chain, tls_key=key)
    return config


def url_of(config: NodeConfig, listener: socket.socket) -> str:
    """The address at which other nodes reach a control plane that listens. Raises ConfigError where this
    machine has no way to the server of the log.
    """
    host, port = listener.getsockname()[:2]
    if host in EVERYWHERE and config.log is not None:
        host = _reached_from(str(conninfo_to_dict(config.log).get("host") or "localhost"))
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _reached_from(name: str) -> str:
    """This machine's address on its way to a host; nothing is sent."""
    try:
        family, kind, _, _, to = socket.getaddrinfo(name, 5432, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(to)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"url: this machine has no way to the log's server {name} ({error.strerror}): give url, the"
            " address at which other nodes reach this one"
        ) from error
