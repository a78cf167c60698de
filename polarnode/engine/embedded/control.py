"""What the node orders of a whole engine (hold generation, change weights, release memory), and SGLang's
messages as ours.

There is one order at a time. An order gets exactly one `Done` and is never cancelled, because SGLang has one
answer slot for each kind of order and a late answer would go to the next caller. `version` changes in one
place, when an update is committed. If SGLang returns anything in another shape than the one expected here,
that fails the one request, with numbers.
"""

import asyncio
from array import array
from base64 import b64decode
from collections.abc import Mapping
from math import isfinite
from typing import Any, assert_never

import numpy
from attrs import define, evolve, field

from polarnode.core.weights import PauseMode
from polarnode.engine.protocol import (
    BeginUpdate,
    ChangeMemory,
    CheckUpdate,
    CommitUpdate,
    Continue,
    Done,
    ExpertShape,
    Failed,
    Generate,
    HostFinish,
    JoinGroup,
    LeaveGroup,
    LoadAdapter,
    LoadBroadcast,
    LoadDisk,
    LoadTensors,
    Pause,
    Piece,
    RollBack,
    RoutedRows,
    RowLogprobs,
    ScoreTokens,
    UnloadAdapter,
    Update,
)

# A key among a request's custom_params, for `grammars`: the id after which its constraint begins.
AFTER_KEY = "polarnode_constraint_after"
SESSION = "polarnode_session"  # the same, for `compiling`: the session of the constraint
OURS = "polarnode:"  # prefix of our actions among those of SGLang's check_weights
SLAB = 4 << 20  # bytes of routed experts in a message: a quarter of what a frame may hold
# Nats, in place of float32's least value: what OpenAI shows for a token that cannot be sampled.
IMPOSSIBLE_LOGPROB = -9999.0
CONSTRAINTS = frozenset(("json_schema", "regex", "ebnf", "structural_tag"))  # names among sampling parameters
UNUSED_LOOK_S = 0.02  # seconds between looks at whether an adapter's last request is over
NOTHING_TO_SAMPLE = "the constraint leaves nothing to sample: no text can match it from here on"
# What SGLang says, with the status of a bad request, of a request that was aborted while its grammar was
# compiled, and of one whose grammar was not compiled in a minute.
ABORTED = "Aborted by AbortReq."
LATE_GRAMMAR = "Grammar preprocessing timed out"
TOO_COSTLY = (
    "the constraint costs too much to compile or to follow: give it fewer repetitions and optional parts, and"
    " one way to read each text"
)


def request(order: Generate, *, sessions: bool = False) -> dict[str, Any]:
    """The arguments of `Engine.async_generate` that an order decides. With `sessions` the engine evicts the
    prefixes of sessions that call no more before others.
    """
    late = order.constraint_after is not None
    sampling: dict[str, Any] = dict(order.sampling)
    if order.piece_tokens:
        sampling["stream_interval"] = order.piece_tokens
    if not CONSTRAINTS.isdisjoint(sampling):
        sampling["custom_params"] = {
            SESSION: order.session.partition("/")[0],  # the session without its conversation
            **({AFTER_KEY: order.constraint_after} if late else {}),
        }
    return {
        "input_ids": array("i", order.prompt).tolist(),
        "sampling_params": sampling,
        "require_reasoning": late,  # for SGLang this means that the constraint begins when a thought ends
        "rid": order.rid,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": order.top_logprobs,
        "custom_logit_processor": order.processor,
        "return_routed_experts": order.routed_from is not None,
        "routed_experts_start_len": order.routed_from or 0,
        "stream": True,
        # SGLang's word for the name under which the adapter was loaded.
        **({"lora_path": order.adapter} if order.adapter else {}),
        # Without session-aware eviction SGLang takes this for a session that somebody opened before.
        **({"session_id": order.session} if sessions and order.session else {}),
    }


def score_arguments(order: ScoreTokens) -> dict[str, Any]:
    """The arguments of `Engine.async_generate` that score a row: nothing is sampled.

    SGLang takes from its prefix cache only what is before `logprob_start_len`, computes the rest again, and
    has no logprob for the first token that it reports.
    """
    return {
        "input_ids": array("i", order.row).tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "rid": order.rid,
        "return_logprob": True,
        "logprob_start_len": order.start - 1,
        "stream": True,
        **({"lora_path": order.adapter} if order.adapter else {}),
    }


def scored(order: ScoreTokens, meta: Mapping[str, Any], version: str) -> RowLogprobs | Failed:
    """The end of a scored row, from SGLang's last chunk. Its logprobs must be of the row's own ids."""
    if problem := _problem(order.rid, meta.get("finish_reason") or {"type": "length"}):
        return problem
    entries = meta.get("input_token_logprobs") or []
    ids = array("i", order.row)[order.start - 1 :]
    # SGLang reports 0 in place of the last id of the vocabulary.
    exact = len(entries) == len(ids) and all(
        entry[1] in (token, 0) for entry, token in zip(entries, ids, strict=True)
    )
    values = [entry[0] for entry in entries[1:]]
    if not exact or any(value is None or value != value for value in values):
        message = f"the engine gave {len(entries)} logprobs of a row that are not numbers of its tokens"
        return Failed(rid=order.rid, message=message, retryable=False)
    return RowLogprobs(rid=order.rid, logprobs=array("f", values).tobytes(), version=order.adapter or version)


def piece(
    rid: str,
    ids: list[int],
    meta: Mapping[str, Any],
    *,
    top_logprobs: int = 0,
    constrained: bool = False,
    adapter: str = "",
) -> Piece | Failed:
    """One chunk of SGLang's as a message. An unknown finish reason (NaN logits, an aborted wait with a
    status) is a failure.

    If a constraint allows no token, SGLang samples one with the logprob NaN and aborts in its next chunk.
    What an adapter samples has the adapter's version, while SGLang reports that of the base, which does not
    change meanwhile.
    """
    finish = meta.get("finish_reason")
    if finish is not None and (problem := _problem(rid, finish)):
        return problem
    if finish is not None and finish.get("message") == ABORTED:
        return Piece(rid=rid, ids=b"", logprobs=b"", version=adapter, finish="abort")
    logprobs = array("f", [entry[0] for entry in meta.get("output_token_logprobs") or ()])
    if len(logprobs) != len(ids):
        return Failed(
            rid=rid,
            message=f"the engine gave {len(ids)} tokens with {len(logprobs)} logprobs",
            retryable=True,
        )
    if constrained and not isfinite(sum(logprobs)):
        return Failed(rid=rid, message=NOTHING_TO_SAMPLE, retryable=False, refused=True)
    others = (
        [entry for token in meta.get("output_top_logprobs") or () for entry in token or ()]
        if top_logprobs
        else []
    )
    if len(others) != len(ids) * top_logprobs:
        return Failed(
            rid=rid,
            message=(
                f"the engine gave {len(others)} alternatives for {len(ids)} tokens of {top_logprobs} each"
            ),
            retryable=True,
        )
    kind: HostFinish | None = finish["type"] if finish is not None else None
    return Piece(
        rid=rid,
        ids=array("i", ids).tobytes(),
        logprobs=logprobs.tobytes(),
        version=adapter or str(meta.get("weight_version", "")),
        finish=kind,
        spans=tuple(
            (adapter or str(each["version"]), each["start"], each["end"])
            for each in meta.get("weight_versions") or ()
        ),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        alternative_ids=array("i", [entry[1] for entry in others]).tobytes(),
        alternative_logprobs=array("f", [max(entry[0], IMPOSSIBLE_LOGPROB) for entry in others]).tobytes(),
    )


# Counters among what SGLang reports of a request, as totals so far.
DRAFT_COUNTERS = ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct")


@define
class DraftTotals:
    """The drafts of one request that were reported already."""

    _told: tuple[int, int, int] = (0, 0, 0)

    def grown(self, last: Piece, meta: Mapping[str, Any]) -> Piece:
        """The piece with the drafts since the one before."""
        drafted, accepted, verified = (int(meta.get(name) or 0) for name in DRAFT_COUNTERS)
        before, self._told = self._told, (drafted, accepted, verified)
        if self._told <= before:
            return last
        return evolve(
            last,
            drafted=max(0, drafted - before[0]),
            accepted=max(0, accepted - before[1]),
            verified=max(0, verified - before[2]),
        )


def routed(
    order: Generate, experts: ExpertShape, length: int, meta: Mapping[str, Any]
) -> list[RoutedRows] | Failed:
    """The experts of positions [`routed_from`, `length` - 1) of a request of `length` tokens, prompt and
    sample, as its last chunk reports them.

    SGLang sends int32, and the last token has no row. A build that ignores the start position sends all rows,
    which is accepted.
    """
    encoded = meta.get("routed_experts")
    if encoded is None:
        return _routing_failure(order, "the engine returned no routed experts, which were requested")
    start, width = order.routed_from or 0, experts.layers * experts.top_k
    flat = numpy.frombuffer(b64decode(encoded), dtype="<i4")
    wanted = max(0, length - 1 - start)
    if flat.size not in (wanted * width, (length - 1) * width):
        numbers = (
            f"{flat.size} numbers for {wanted} positions of {experts.layers} layers with {experts.top_k}"
            " experts each"
        )
        return _routing_failure(order, f"the engine gave routed experts in another shape: {numbers}")
    rows = flat[flat.size - wanted * width :]
    # One pass suffices: read as unsigned, what is below 0 is above everything.
    if rows.size and not rows.view("<u4").max() < experts.number:
        return _routing_failure(
            order,
            f"the engine named experts from {rows.min()} to {rows.max()}, this model has 0 to"
            f" {experts.number - 1}",
        )
    wide = experts.number > 256
    data = rows.astype("<i2" if wide else "u1").tobytes()
    return _split_rows(
        RoutedRows(
            rid=order.rid, start=start, layers=experts.layers, top_k=experts.top_k, wide=wide, data=data
        )
    )


def _split_rows(whole: RoutedRows) -> list[RoutedRows]:
    """The experts in messages that fit a frame, cut between rows."""
    width = whole.layers * whole.top_k * (2 if whole.wide else 1)
    rows = max(1, SLAB // width)
    places = range(0, max(1, len(whole.data) // width), rows)
    return [
        evolve(whole, start=whole.start + first, data=whole.data[first * width : (first + rows) * width])
        for first in places
    ]


def _routing_failure(order: Generate, message: str) -> Failed:
    return Failed(rid=order.rid, message=message, retryable=True)


def _problem(rid: str, finish: Mapping[str, Any]) -> Failed | None:
    """The failure that a finish reason reports. If SGLang ends a request with a status below 500, what was
    asked for is at fault. Sessions take turns with their constraints (`compiling`), so a constraint that was
    not compiled in a minute waited for those of its own session.
    """
    kind, message, status = finish["type"], str(finish.get("message")), finish.get("status_code")
    if kind == "stop" and not isinstance(finish.get("matched"), int):
        sentence = f"the engine stopped on {finish.get('matched')!r}: the weights gave NaN logits"
        return Failed(rid=rid, message=sentence, retryable=False)
    if kind != "abort" or message == ABORTED:
        return None
    # The rest of the message is the whole grammar.
    if message.startswith(LATE_GRAMMAR) or TOO_COSTLY in message:
        return Failed(rid=rid, message=TOO_COSTLY, retryable=False, refused=True)
    if message.startswith("Grammar accept_token failed"):
        return Failed(rid=rid, message=NOTHING_TO_SAMPLE, retryable=False, refused=True)
    if status is None:
        return None
    refused = int(status) < 500
    return Failed(rid=rid, message=message, retryable=not refused, refused=refused)


Order = Pause | Continue | Update
Outcome = tuple[bool, str]


@define(eq=False)
class Control:
    """Carries out orders on one started engine. `resumed` is set while generation may begin."""

    _engine: Any
    version: str
    resumed: asyncio.Event = field(factory=asyncio.Event)
    _paused: PauseMode | None = None
    _released: set[str] = field(factory=set)
    _lock: asyncio.Lock = field(factory=asyncio.Lock)
    _leaving: set[str] = field(factory=set)  # adapters to unload that nobody asked for again

    async def answer(self, order: Order) -> Done:
        if isinstance(order, UnloadAdapter):
            await self._unused(order.name)
        async with self._lock:
            try:
                ok, text = await self._obey(order)
            except Exception as error:  # an isolation edge: the node must get its answer
                ok, text = False, f"{type(error).__name__}: {error}"
        return Done(call=order.call, ok=ok, message=text)

    async def _obey(self, order: Order) -> Outcome:
        match order:
            case Pause(mode=mode):
                return await self._pause(mode)
            case Continue():
                return await self._continue()
            case BeginUpdate(ranks=ranks):
                return await self._act_on_weights(f"keep {ranks}")
            case LoadDisk() | LoadTensors() | LoadBroadcast():
                return await self._load(order)
            case CheckUpdate(flush=flush):
                return await self._check(flush=flush)
            case CommitUpdate(version=version):
                return await self._commit(version)
            case RollBack():
                return await self._act_on_weights("restore")
            case JoinGroup() | LeaveGroup():
                return await self._group(order)
            case ChangeMemory():
                return await self._memory(order)
            case LoadAdapter() | UnloadAdapter():
                return await self._change_adapter(order)
            case _:
                assert_never(order)

    # ── generation ────────────────────────────────────────────────────────────

    async def _pause(self, mode: PauseMode) -> Outcome:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.resumed.clear()
        if mode == "abort" and self._paused in ("in_place", "retract"):
            # Frozen requests do not notice that they are aborted, and SGLang would wait for them.
            await self._go_on()
        self._paused = mode
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))
        return True, ""

    async def _continue(self) -> Outcome:
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

    async def _load(self, order: LoadDisk | LoadTensors | LoadBroadcast) -> Outcome:
        """Load weights. Nothing is flushed and no version is set here: `CheckUpdate` and `CommitUpdate` do
        that, once for the whole update.
        """
        from sglang.srt.managers.io_struct import (
            UpdateWeightFromDiskReqInput,
            UpdateWeightsFromDistributedReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        match order:
            case LoadDisk(path=path):
                ok, text, _ = await self._manager.update_weights_from_disk(
                    UpdateWeightFromDiskReqInput(model_path=path, flush_cache=False)
                )
            case LoadTensors(payloads=payloads, layout=layout):
                tensors = UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=list(payloads), load_format=layout, flush_cache=False
                )
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

    async def _check(self, *, flush: bool) -> Outcome:
        ok, text = await self._act_on_weights("check")
        if ok and flush and not (await self._manager.flush_cache()).success:
            return False, "the cache of the old weights could not be flushed: some request still runs"
        return ok, text

    async def _commit(self, version: str) -> Outcome:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        )
        self.version = version
        return await self._act_on_weights("drop")

    # ── sessions ──────────────────────────────────────────────────────────────

    @property
    def sessions(self) -> bool:
        """Whether the engine keeps the prefixes of sessions before others."""
        return bool(self._engine.server_args.enable_session_radix_cache)

    async def forget(self, session: str) -> None:
        """Drop a session's references to its prefixes. Nothing is freed, but these prefixes are evicted first
        when room is needed. An engine that does not know sessions evicts by age alone.
        """
        if self.sessions:
            from sglang.srt.managers.io_struct import CloseSessionReqInput

            await self._manager.close_session(CloseSessionReqInput(session_id=session))

    async def _act_on_weights(self, action: str) -> Outcome:
        """Send an action to the `Keeper` in every scheduler (`weights.py`)."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        ok, text, *_ = await self._manager.check_weights(CheckWeightsReqInput(action=f"{OURS}{action}"))
        return bool(ok), str(text)

    async def _group(self, order: JoinGroup | LeaveGroup) -> Outcome:
        from sglang.srt.managers.io_struct import (
            DestroyWeightsUpdateGroupReqInput,
            InitWeightsUpdateGroupReqInput,
        )

        if isinstance(order, LeaveGroup):
            ok, text = await self._manager.destroy_weights_update_group(
                DestroyWeightsUpdateGroupReqInput(group_name=order.name)
            )
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

    # ── adapters ──────────────────────────────────────────────────────────────

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The adapters that the engine holds, by name."""
        found: Mapping[str, Any] = self._manager.lora_registry.get_all_adapters()
        return found

    async def _unused(self, name: str) -> None:
        """Wait until no request samples by an adapter. SGLang waits too, but under the lock of every load.
        Requests that are frozen by a pause end after it, however long it lasts.
        """
        self._leaving.add(name)
        counters = self._manager.lora_registry._counters  # private, and the only place that has this number
        while name in self._leaving and (known := self.adapters.get(name)) is not None:
            if not counters[known.lora_id].value():
                return
            await asyncio.sleep(UNUSED_LOOK_S)

    async def _change_adapter(self, order: LoadAdapter | UnloadAdapter) -> Outcome:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

        name, manager = order.name, self._manager
        if isinstance(order, UnloadAdapter):
            if name not in self._leaving:
                return False, "it was asked for again"
            self._leaving.discard(name)
            done = await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
            manager.lora_ref_cache.pop(name, None)  # otherwise SGLang would load it again by itself
        elif name in self._leaving and name in self.adapters:
            self._leaving.discard(name)
            return True, ""
        else:
            done = await manager.load_lora_adapter(
                LoadLoRAAdapterReqInput(lora_name=name, lora_path=order.path)
            )
        return bool(done.success), str(done.error_message or "")

    # ── memory ────────────────────────────────────────────────────────────────

    async def _memory(self, order: ChangeMemory) -> Outcome:
        """Release GPU memory or take it back. Impossible orders are refused here, because SGLang checks them
        by assertion in its schedulers, which an assertion ends.
        """
        from sglang.srt.managers.io_struct import (
            ReleaseMemoryOccupationReqInput,
            ResumeMemoryOccupationReqInput,
        )

        if not self._engine.server_args.enable_memory_saver:
            return (
                False,
                (
                    "this engine cannot release memory: start the node with the setting memory_saver ="
                    ' "discard" or "backup"'
                ),
            )
        if self._paused not in ("retract", "abort"):
            return (
                False,
                (
                    "generation must be paused by retract or abort first: requests frozen in place hold their"
                    " cache"
                ),
            )
        if order.release:
            tags = sorted(set(order.tags) - self._released)
            (
                await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
                if tags
                else None
            )
            self._released |= set(tags)
        else:
            tags = sorted(set(order.tags) & self._released)
            (
                await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
                if tags
                else None
            )
            self._released -= set(tags)
        return True, ", ".join(tags)

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager
