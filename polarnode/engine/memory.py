"""GPU memory lent to a trainer on the same GPUs, and process groups that receive weights.

Requests that SGLang would reject by an assertion, which ends its scheduler process, are refused here first,
with a remedy.
"""

import trio
from attrs import define, field

from polarnode.core.errors import Conflict, EngineError
from polarnode.core.weights import WeightsState
from polarnode.engine.protocol import ChangeMemory, JoinGroup, LeaveGroup
from polarnode.engine.update import STEP_S, MessageMaker
from polarnode.engine.weight_values import (
    BroadcastBucket,
    DistributedSource,
    GroupOrder,
    MemoryOrder,
    TensorBucket,
    broadcast,
    check_group,
    tensors,
)
from polarnode.engine.weights import Weights


@define(eq=False)
class EngineControl:
    """Changes of memory and of groups, which exclude updates by `Weights`. If `keeps` is set, released
    weights are kept in main memory and restored from there.
    """

    weights: Weights
    keeps: bool = False
    _groups: dict[str, tuple[int, ...]] = field(factory=dict)  # the restarts of all hosts when they joined

    # ── memory ────────────────────────────────────────────────────────────────

    async def release(self, order: MemoryOrder) -> WeightsState:
        """Give memory back to others. This is possible only while generation is held by retract or abort, so
        that no request holds any memory.
        """
        self.weights.engines.require_own()
        async with self.weights.alone():
            self.weights.require_closed()
            if self.weights.engines.statistics().paused not in ("retract", "abort"):
                raise Conflict(
                    "memory is released while generation is held: POST /v1/engine/pause with mode retract or"
                    " abort first"
                )
            await self._memory(order, release=True)
            self.weights.released |= set(order.tags)
            self.weights.discarded |= "weights" in order.tags and not self.keeps
            return self.weights.status()

    async def take(self, order: MemoryOrder) -> WeightsState:
        """Take released memory again. Generation stays held."""
        self.weights.engines.require_own()
        async with self.weights.alone():
            await self._memory(order, release=False)
            self.weights.released -= set(order.tags)
            return self.weights.status()

    async def _memory(self, order: MemoryOrder, *, release: bool) -> None:
        """Change the memory of all hosts or, as far as they still answer, of none."""
        tags = list(order.tags)
        failed = await self._failed(lambda call, _: ChangeMemory(call=call, release=release, tags=tags))
        if failed is not None:
            await self._failed(lambda call, _: ChangeMemory(call=call, release=not release, tags=tags))
            raise Conflict(str(failed)) from failed

    # ── groups and what comes over them ───────────────────────────────────────

    async def join(self, order: GroupOrder) -> None:
        """Every GPU of the node joins. This returns when the trainer has joined too."""
        engines = self.weights.engines
        engines.require_own()
        check_group(order, len(engines.restarts) * engines.ranks)
        async with self.weights.alone():
            self.weights.require_closed()
            if order.name in self._groups:
                raise Conflict(
                    f"group {order.name!r} is joined already: leave it first, by DELETE"
                    f" /v1/weights/groups/{order.name}"
                )
            failed = await self._failed(lambda call, host: _join(order, call, host, ranks=engines.ranks))
            if failed is not None:
                # The hosts that joined are in a group that was never complete.
                await self._failed(lambda call, _: LeaveGroup(call=call, name=order.name))
                raise failed
            self._groups[order.name] = engines.restarts

    async def leave(self, name: str) -> bool:
        """Leave a group. Returns whether there was such a group. Hosts that were restarted since are in
        none.
        """
        async with self.weights.alone():
            self.weights.require_closed()
            if self._groups.pop(name, None) is None:
                return False
            failed = await self._failed(lambda call, _: LeaveGroup(call=call, name=name))
            if failed is not None and "does not exist" not in str(failed):
                raise failed
            return True

    def require_joined(self, name: str) -> None:
        """Raise Conflict unless every host is in the group: the hosts that are in it would wait for a
        broadcast that the others cannot receive.
        """
        if name not in self._groups:
            raise Conflict(f"no group {name!r} is joined: POST /v1/weights/groups first")
        if self._groups[name] != self.weights.engines.restarts:
            raise Conflict(
                f"an engine host was restarted since group {name!r} was joined: leave the group and join"
                " it again"
            )

    def received(self, update_id: str, bucket: BroadcastBucket) -> MessageMaker:
        """Load a bucket of an open update over its group."""
        source = self.weights.opened(update_id).order.source
        if not isinstance(source, DistributedSource):
            raise Conflict(
                f"update {update_id!r} was begun with {source.kind} as its source: send its kind of buckets"
            )
        self.require_joined(source.group)
        return broadcast(bucket, source.group)

    def mapped(self, bucket: TensorBucket) -> MessageMaker:
        """Load a bucket of an open update from memory handles."""
        return tensors(bucket, hosts=len(self.weights.engines.restarts), ranks=self.weights.engines.ranks)

    async def _failed(self, make: MessageMaker) -> EngineError | None:
        """Send an order to every host, and return the error if one failed."""
        with trio.move_on_after(STEP_S, shield=True):
            try:
                await self.weights.engines.order(make)
            except EngineError as error:
                return error
            return None
        return EngineError(f"the engine hosts did not answer within {STEP_S:.0f} s", retryable=False)


def _join(order: GroupOrder, call: int, host: int, *, ranks: int) -> JoinGroup:
    return JoinGroup(
        call=call,
        name=order.name,
        address=order.address,
        port=order.port,
        rank=order.rank_offset + host * ranks,
        world_size=order.world_size,
        backend=order.backend,
    )
