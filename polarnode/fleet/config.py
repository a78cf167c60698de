"""The settings of a fleet's front.

Pure: a frozen value or a `ConfigError` that names the setting and its remedy. The front keeps nothing on disk
but its vote, in `state_dir`.
"""

import re

from attrs import field, frozen

from polarnode.client.pins import split_pin
from polarnode.core.codec.limits import address, is_loopback, url_fault
from polarnode.core.errors import ConfigError


@frozen(kw_only=True)
class FleetConfig:
    """All settings of a front. `nodes`: addresses of nodes; `@FILE`, a file with one a line; `dns:NAME:PORT`,
    every address of a name. Files and names are asked again, so that nodes join and leave.
    """

    nodes: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = field(default=None, repr=False)  # of trainers
    node_token: str | None = field(default=None, repr=False)  # of the nodes; None: the same
    tls_cert: str | None = None  # PEM files of the front's certificate with its chain, and of the key
    tls_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    state_dir: str = ".polarnode-fleet"
    # nodes announce themselves with the join token that the front prints
    join: bool = False
    # the address that the join token and trainers are given, where it is another than `host` and `port`
    public_url: str | None = None
    # the part of the nodes that must have loaded new weights for an update to stand; the others take no new
    # tasks until they have
    min_nodes: float = 0.9

    def check(self) -> "FleetConfig":
        """Itself. Raises ConfigError for settings that cannot work."""
        if not self.nodes:
            raise ConfigError(
                "name the nodes: --nodes URL,URL, --nodes @FILE, --nodes dns:NAME:PORT, or --local 3; or give"
                " --host ADDRESS, and nodes join"
            )
        for node in self.nodes:
            if node.startswith(("@", "dns:")):
                continue
            if fault := url_fault(split_pin(node)[0]):
                raise ConfigError(f"--nodes: {node!r} {fault}; give addresses such as http://10.0.0.5:8080")
        for name, token in (("token", self.token), ("node_token", self.node_token)):
            # as a node's: an empty one would be what a client sends that has none
            if token is not None and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", token):
                raise ConfigError(
                    f"{name} must be printable ASCII, not empty, without spaces at its ends: set"
                    f" POLARNODE_{name.upper()} to a random one, or unset it"
                )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: give both, or neither")
        if not is_loopback(self.host):
            if self.token is None:
                raise ConfigError(f"--host {self.host} is not loopback: set POLARNODE_TOKEN")
            if self.tls_cert is None:
                raise ConfigError(
                    f"--host {self.host} is not loopback: give --tls-cert and --tls-key, or listen on"
                    " 127.0.0.1 behind a proxy that speaks TLS"
                )
        self._check_public()
        if not 0 < self.min_nodes <= 1:
            raise ConfigError("min_nodes must be more than 0 and at most 1")
        return self

    def _check_public(self) -> None:
        url = self.public_url
        if url is None:
            if self.join and self.host in ("0.0.0.0", "::"):
                raise ConfigError(
                    f"--host {self.host} is no address that nodes can call: give --host with one of this"
                    " machine, or --public-url"
                )
            return
        if fault := url_fault(url):
            raise ConfigError(f"public_url: {url!r} {fault}")
        if address(url).scheme != "https" or address(url).path.strip("/") or "#" in url or "?" in url:
            raise ConfigError(f"public_url: {url!r} must be https:// with a host and a port alone")
