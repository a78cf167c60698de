"""Which machines of a Ray cluster have a node, and what runs there.

Pure, and shared by the launcher, the Ray driver and the actors: none of them imports another's waiting code.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final

from attrs import asdict, field, frozen

from polarnode.core.codec.json import dump_json
from polarnode.core.codec.limits import is_loopback

NAMESPACE: Final = "polarnode"  # of the actors, one on each machine
# custom resource of `ray start`: where any machine has it, only such machines get a node
RESOURCE: Final = "polarnode_host"
LABEL: Final = "polarnode-host"  # label of `ray start`: the machine's name, if not its host name
COMMAND: Final = (
    *("-m", "polarnode.cli", "--host", "{host}"),
    *("--port", "{port}", "--state-dir", "{state}"),
)


@frozen(kw_only=True)
class RayOrder:
    """What the driver is to keep. `command`: arguments of Python for a node, in which {host}, {port} and
    {state} are replaced; `options` are appended. `orphan_s`: seconds that a node lives on which nobody holds
    and nobody needs. `log`: the DSN that the nodes share, which reaches them in their environment.
    """

    address: str
    gpus_per_node: int
    folder: str  # on each machine: a node's state is in a folder below it that has the machine's name
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = COMMAND
    token: str | None = field(default=None, repr=False)
    log: str = field(default="", repr=False)
    orphan_s: float = 300.0
    marked: bool = False  # machines had the custom resource before: only such machines count
    stop: bool = False  # end the nodes and their actors instead

    @property
    def digest(self) -> str:
        """What a node that was started otherwise is recognised by."""
        value = {**asdict(self), "address": "", "marked": False, "stop": False}
        return sha256(dump_json(value)).hexdigest()[:16]


@frozen(kw_only=True)
class RayMachine:
    """One machine that is to have a node. `ray_id`: Ray's id of it, another one after each `ray start`."""

    ray_id: str
    name: str
    host: str
    marked: bool  # it has the custom resource


@frozen(kw_only=True)
class HostOrder:
    """What one actor is to keep."""

    machine: RayMachine
    order: RayOrder


@frozen(kw_only=True)
class HostedNode:
    """What an actor reports. `url` is None until its node has served once; `problem` is "" while it lives."""

    name: str
    url: str | None
    pid: int | None
    problem: str
    digest: str


@frozen(kw_only=True)
class RayNews:
    """A line of the driver's output. `error`: why it ends; `nodes`: addresses by machine; `problems`: what
    keeps a machine from having a node.
    """

    nodes: Mapping[str, str] = field(factory=dict)
    problems: Mapping[str, str] = field(factory=dict)
    marked: bool = False  # as of RayOrder
    error: str | None = None
    stopped: int | None = None  # so many actors were ended, as the order asked


def machines(listed: Iterable[Mapping[str, Any]], order: RayOrder) -> list[RayMachine]:
    """The machines of `ray.nodes()` that are to have a node, by name: those with the custom resource where
    any has it or had it, else those with enough GPUs.
    """
    alive = [each for each in listed if each["Alive"]]
    able = [each for each in alive if each["Resources"].get(RESOURCE, 0) >= 1]
    marked = order.marked or bool(able)
    if not marked:
        able = [each for each in alive if each["Resources"].get("GPU", 0) >= order.gpus_per_node]
    found = [
        RayMachine(
            ray_id=each["NodeID"],
            name=(each.get("Labels") or {}).get(LABEL) or each["NodeManagerHostname"],
            host=each["NodeManagerAddress"],
            marked=marked,
        )
        for each in able
    ]
    return sorted(found, key=lambda each: (each.name, each.ray_id))


def refusal(machine: RayMachine, token: str | None) -> str | None:
    """Why a machine cannot have a node, or None."""
    if token is None and not is_loopback(machine.host):
        return f"its node would listen on {machine.host}, which is not loopback: set POLARNODE_TOKEN"
    if not machine.name or machine.name.startswith(".") or "/" in machine.name:
        return f"{machine.name!r} is no name of a folder: give `ray start` the label {LABEL}=NAME"
    return None


def node_arguments(given: HostOrder, port: int, state: str) -> tuple[str, ...]:
    """The arguments of Python for a machine's node."""
    names = {"host": given.machine.host, "port": str(port), "state": state}
    command = given.order.command
    for name, value in names.items():
        command = tuple(each.replace(f"{{{name}}}", value) for each in command)
    gpus = given.order.gpus_per_node
    # Ray shows the actor its GPUs in CUDA_VISIBLE_DEVICES; a node counts among those
    mine = ("--gpus", f"0-{gpus - 1}") if gpus and "--gpus" not in given.order.options else ()
    return (*command, *mine, *given.order.options)
