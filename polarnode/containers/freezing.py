"""Stop and continue all programs of one container together, by the kernel's freezer.

A frozen container keeps its files, memory and connections, and data that is sent to it waits in the kernel.
It receives no signal and starts nothing until it is thawed, so code that ends, starts or removes its programs
thaws it first. Podman does the freezing, and not the node itself, so that a node which finds the container
after a kill can remove it.
"""

from contextlib import suppress
from pathlib import Path

import trio
from attrs import define, field

from polarnode.containers import control_groups
from polarnode.containers.client import ContainerClient
from polarnode.core.errors import RuntimeFault, boundary


@define(eq=False, kw_only=True)
class ContainerFreeze:
    """Freezes and thaws one container. `frozen`: the names of the node's frozen containers. `possible`:
    whether this machine can freeze containers. `freezer`: the kernel's freezer file of the container, if
    there is one.
    """

    container: str
    client: ContainerClient
    frozen: set[str]
    possible: bool = True
    freezer: Path | None = None
    _lock: trio.Lock = field(factory=trio.Lock, init=False)  # Podman refuses to pause a paused container
    _ended: bool = field(default=False, init=False)

    @property
    def on(self) -> bool:
        """Whether it is frozen."""
        return self.container in self.frozen

    async def freeze(self) -> None:
        """Stop all its programs. Do nothing if it is frozen, cannot be frozen, or was thawed for good. Raises
        RuntimeFault.
        """
        async with self._lock:
            if self.possible and not self.on and not self._ended:
                await self.client.pause(self.container)
                self.frozen.add(self.container)

    async def thaw(self) -> None:
        """Let them go on. Raises RuntimeFault; the container is then still frozen."""
        async with self._lock:
            if self.on:
                await self.client.unpause(self.container)
                self.frozen.discard(self.container)

    async def thaw_certainly(self) -> None:
        """Thaw it even if Podman cannot, or believes that it is thawed, as after a failed dump. Raises
        RuntimeFault.
        """
        if self.freezer is None:
            await self.thaw()
            return
        async with self._lock:
            with boundary(RuntimeFault, "a container could not be thawed"):
                if self.on:
                    with suppress(RuntimeFault):
                        await self.client.unpause(self.container)
                await trio.to_thread.run_sync(control_groups.thaw, self.freezer)
            self.frozen.discard(self.container)

    async def thaw_for_good(self) -> None:
        """Thaw it and never freeze it again, because its programs are about to be ended. Raises
        RuntimeFault.
        """
        self._ended = True
        await self.thaw_certainly()
