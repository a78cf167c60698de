"""What the node orders of a whole engine: hold generation, change the weights, give memory back. One order at a time.

Rule for whoever edits it: an order gets exactly one `Done` and is never cancelled, because SGLang has one answer slot a kind and a late answer
would go to the next caller. `version` changes in one place, when an update is committed.
"""

import asyncio
from typing import Any, assert_never, get_args

from attrs import define, field

from polarnode.engine_host.protocol import Continue, Done, Pause, PauseMode
from polarnode.engine_host.updates import (
    BeginUpdate,
    CheckUpdate,
    CommitUpdate,
    JoinGroup,
    LeaveGroup,
    LoadBroadcast,
    LoadDisk,
    LoadTensors,
    Memory,
    RollBack,
    Update,
)
from polarnode.engine_host.words import OURS

Order = Pause | Continue | Update
ORDERS = get_args(Order)
Said = tuple[bool, str]


@define(eq=False)
class Control:
    """Of one started engine. `resumed` is set while generation may begin."""

    _engine: Any
    version: str
    resumed: asyncio.Event = field(factory=asyncio.Event)
    _paused: PauseMode | None = None
    _released: set[str] = field(factory=set)
    _lock: asyncio.Lock = field(factory=asyncio.Lock)

    async def answer(self, order: Order) -> Done:
        async with self._lock:
            try:
                ok, text = await self._obey(order)
            except Exception as error:  # an isolation edge: the node must get its answer
                ok, text = False, f"{type(error).__name__}: {error}"
        return Done(call=order.call, ok=ok, message=text)

    async def _obey(self, order: Order) -> Said:
        match order:
            case Pause(mode=mode):
                return await self._pause(mode)
            case Continue():
                return await self._continue()
            case BeginUpdate(ranks=ranks):
                return await self._say(f"keep {ranks}")
            case LoadDisk() | LoadTensors() | LoadBroadcast():
                return await self._load(order)
            case CheckUpdate(flush=flush):
                return await self._check(flush=flush)
            case CommitUpdate(version=version):
                return await self._commit(version)
            case RollBack():
                return await self._say("restore")
            case JoinGroup() | LeaveGroup():
                return await self._group(order)
            case Memory():
                return await self._memory(order)
            case _:
                assert_never(order)

    # ── generation ────────────────────────────────────────────────────────────

    async def _pause(self, mode: PauseMode) -> Said:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.resumed.clear()
        if mode == "abort" and self._paused in ("in_place", "retract"):
            await self._go_on()  # frozen requests do not hear that they are aborted, and SGLang would wait for them
        self._paused = mode
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))
        return True, ""

    async def _continue(self) -> Said:
        if self._released:
            return False, f"{', '.join(sorted(self._released))} are released: take that memory again first"
        await self._go_on()
        self._paused = None
        self.resumed.set()
        return True, ""

    async def _go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())

    # ── weights ───────────────────────────────────────────────────────────────

    async def _load(self, order: LoadDisk | LoadTensors | LoadBroadcast) -> Said:
        """Nothing is flushed and no version said here: `CheckUpdate` and `CommitUpdate` do, once for the whole update."""
        from sglang.srt.managers.io_struct import (
            UpdateWeightFromDiskReqInput,
            UpdateWeightsFromDistributedReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        match order:
            case LoadDisk(path=path):
                ok, text, _ = await self._manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=path, flush_cache=False))
            case LoadTensors(payloads=payloads, layout=layout):
                tensors = UpdateWeightsFromTensorReqInput(serialized_named_tensors=list(payloads), load_format=layout, flush_cache=False)
                ok, text = await self._manager.update_weights_from_tensor(tensors)
            case LoadBroadcast():
                shapes = [list(each) for each in order.shapes]
                received = UpdateWeightsFromDistributedReqInput(
                    names=list(order.names),
                    dtypes=list(order.dtypes),
                    shapes=shapes,
                    group_name=order.group,
                    load_format=order.layout,
                    flush_cache=False,
                )
                ok, text = await self._manager.update_weights_from_distributed(received)
            case _:
                assert_never(order)
        return bool(ok), str(text)

    async def _check(self, *, flush: bool) -> Said:
        ok, text = await self._say("check")
        if ok and flush and not (await self._manager.flush_cache()).success:
            return False, "the cache of the old weights could not be flushed: some request still runs"
        return ok, text

    async def _commit(self, version: str) -> Said:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False))
        self.version = version
        return await self._say("drop")

    async def _say(self, action: str) -> Said:
        """Tell the keeper in every scheduler (`weights.py`)."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        ok, text, *_ = await self._manager.check_weights(CheckWeightsReqInput(action=f"{OURS}{action}"))
        return bool(ok), str(text)

    async def _group(self, order: JoinGroup | LeaveGroup) -> Said:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput, InitWeightsUpdateGroupReqInput

        if isinstance(order, LeaveGroup):
            ok, text = await self._manager.destroy_weights_update_group(DestroyWeightsUpdateGroupReqInput(group_name=order.name))
            return bool(ok), str(text)
        joined = InitWeightsUpdateGroupReqInput(
            master_address=order.address,
            master_port=order.port,
            rank_offset=order.rank,
            world_size=order.world_size,
            group_name=order.name,
            backend=order.backend,
        )
        ok, text = await self._manager.init_weights_update_group(joined)
        return bool(ok), str(text)

    # ── memory ────────────────────────────────────────────────────────────────

    async def _memory(self, order: Memory) -> Said:
        """SGLang asserts much of this in its schedulers, which an assertion ends: what can not be is said here."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

        if not self._engine.server_args.enable_memory_saver:
            return False, 'this engine can not give memory back: start the node with the setting memory_saver = "discard" or "backup"'
        if self._paused not in ("retract", "abort"):
            return False, "generation must be paused by retract or abort first: requests frozen in place hold their cache"
        if order.release:
            tags = sorted(set(order.tags) - self._released)
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags)) if tags else None
            self._released |= set(tags)
        else:
            tags = sorted(set(order.tags) & self._released)
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags)) if tags else None
            self._released -= set(tags)
        return True, ", ".join(tags)

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager
