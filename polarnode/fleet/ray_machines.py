"""Which machines of a Ray cluster have a node, and what runs there.

This module is pure and shared by the launcher, the Ray driver and the actors, so that none of them imports
the waiting code of another.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final

from attrs import asdict, field, frozen

from polarnode.core.codec.json import dump_json
from polarnode.core.codec.limits import is_loopback

ACTOR_NAMESPACE: Final = "polarnode"  # the actors are in it, one for each machine
# A custom resource of `ray start`. Where any machine has it, only machines with it get a node.
HOST_RESOURCE: Final = "polarnode_host"
NAME_LABEL: Final = "polarnode-host"  # a label of `ray start`: the machine's name in place of its host name
NODE_COMMAND: Final = (
    *("-m", "polarnode.cli", "--host", "{host}"),
    *("--port", "{port}", "--state-dir", "{state}"),
)


@frozen(kw_only=True)
class RayOrder:
    """What the driver is to keep. `command` holds the arguments of Python for a node, in which {host}, {port}
    and {state} are replaced; `options` are appended. A node that nobody holds and nobody needs ends after
    `orphan_s` seconds. `log` is the DSN that the nodes share, which reaches them in their environment.
    """

    address: str
    gpus_per_node: int
    folder: str  # on each machine; the node's state is in a folder below it with the machine's name
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = NODE_COMMAND
    token: str | None = field(default=None, repr=False)
    log: str = field(default="", repr=False)
    orphan_s: float = 300.0
    marked: bool = False  # some machine had the custom resource before, so only such machines count
    stop: bool = False  # end the nodes and their actors instead

    @property
    def digest(self) -> str:
        """A hash of the order, by which a node that was started with another order is recognised."""
        value = {**asdict(self), "address": "", "marked": False, "stop": False}
        return sha256(dump_json(value)).hexdigest()[:16]


@frozen(kw_only=True)
class RayMachine:
    """A machine that is to have a node. `ray_id` is Ray's id of it, which changes with each `ray start`."""

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
    """The report of an actor. `url` is None until its node has served once. `problem` is "" while it
    lives.
    """

    name: str
    url: str | None
    pid: int | None
    problem: str
    digest: str


@frozen(kw_only=True)
class RayNews:
    """A line of the driver's output. `nodes` has the addresses by machine, and `problems` what keeps a
    machine from having a node. `error` says why the driver ends.
    """

    nodes: Mapping[str, str] = field(factory=dict)
    problems: Mapping[str, str] = field(factory=dict)
    marked: bool = False  # as in RayOrder
    error: str | None = None
    stopped: int | None = None  # the number of actors that were ended, where the order asks for that


def find_machines(listed: Iterable[Mapping[str, Any]], order: RayOrder) -> list[RayMachine]:
    """The machines of `ray.nodes()` that are to have a node, sorted by name. They are those with the custom
    resource where any machine has it or had it, and else those with enough GPUs.
    """
    alive = [each for each in listed if each["Alive"]]
    able = [each for each in alive if each["Resources"].get(HOST_RESOURCE, 0) >= 1]
    marked = order.marked or bool(able)
    if not marked:
        able = [each for each in alive if each["Resources"].get("GPU", 0) >= order.gpus_per_node]
    found = [
        RayMachine(
            ray_id=each["NodeID"],
            name=(each.get("Labels") or {}).get(NAME_LABEL) or each["NodeManagerHostname"],
            host=each["NodeManagerAddress"],
            marked=marked,
        )
        for each in able
    ]
    return sorted(found, key=lambda each: (each.name, each.ray_id))


def machine_refusal(machine: RayMachine, token: str | None) -> str | None:
    """Why a machine cannot have a node, or None."""
    if token is None and not is_loopback(machine.host):
        return f"its node would listen on {machine.host}, which is not loopback: set POLARNODE_TOKEN"
    if not machine.name or machine.name.startswith(".") or "/" in machine.name:
        return f"{machine.name!r} is no name of a folder: give `ray start` the label {NAME_LABEL}=NAME"
    return None


def node_arguments(given: HostOrder, port: int, state: str) -> tuple[str, ...]:
    """The arguments of Python for a machine's node."""
    names = {"host": given.machine.host, "port": str(port), "state": state}
    command = given.order.command
    for name, value in names.items():
        command = tuple(each.replace(f"{{{name}}}", value) for each in command)
    gpus = given.order.gpus_per_node
    # Ray puts the actor's GPUs in CUDA_VISIBLE_DEVICES, and a node counts among those.
    mine = ("--gpus", f"0-{gpus - 1}") if gpus and "--gpus" not in given.order.options else ()
    return (*command, *mine, *given.order.options)
