"""Requests and chunks in SGLang's words and in ours. Plain functions: no asyncio, no sglang.

Rule for whoever edits it: whatever SGLang gives in another shape than the one written here is a failure of that one request, said in numbers.
"""

from array import array
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import numpy
from attrs import evolve

from polarnode.engine_host.protocol import Experts, Failed, Generate, HostFinish, Piece, Routed

AFTER = "polarnode_constraint_after"  # among a request's custom_params, for `grammars`: the id behind which its constraint begins
OURS = "polarnode:"  # before an action of ours among those of SGLang's check_weights
SLAB = 4 << 20  # bytes of routed experts in a message: a quarter of what a frame may hold
IMPOSSIBLE = -9999.0  # nats, in place of float32's least: what OpenAI shows for a token that can not be sampled


def request(order: Generate) -> dict[str, Any]:
    """The arguments of `Engine.async_generate` that an order decides."""
    late = order.constraint_after is not None
    return {
        "input_ids": array("i", order.prompt).tolist(),
        "sampling_params": {**order.sampling, "custom_params": {AFTER: order.constraint_after}} if late else dict(order.sampling),
        "require_reasoning": late,  # to SGLang: the constraint begins when a thought ends
        "rid": order.rid,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": order.top_logprobs,
        "custom_logit_processor": order.processor,
        "return_routed_experts": order.routed_from is not None,
        "routed_experts_start_len": order.routed_from or 0,
        "stream": True,
    }


def piece(rid: str, ids: list[int], meta: Mapping[str, Any], *, top_logprobs: int = 0) -> Piece | Failed:
    """One chunk of SGLang's as a message. A finish that is no finish of ours (NaN logits, an aborted wait with a status) is a failure."""
    finish = meta.get("finish_reason")
    if finish is not None and (problem := _problem(finish)):
        return Failed(rid=rid, message=problem[0], retryable=problem[1])
    logprobs = array("f", [entry[0] for entry in meta.get("output_token_logprobs") or ()])
    if len(logprobs) != len(ids):
        return Failed(rid=rid, message=f"the engine gave {len(ids)} tokens with {len(logprobs)} logprobs", retryable=True)
    others = [entry for token in meta.get("output_top_logprobs") or () for entry in token or ()] if top_logprobs else []
    if len(others) != len(ids) * top_logprobs:
        return Failed(rid=rid, message=f"the engine gave {len(others)} alternatives for {len(ids)} tokens of {top_logprobs} each", retryable=True)
    kind: HostFinish | None = finish["type"] if finish is not None else None
    return Piece(
        rid=rid,
        ids=array("i", ids).tobytes(),
        logprobs=logprobs.tobytes(),
        version=str(meta.get("weight_version", "")),
        finish=kind,
        spans=tuple((str(each["version"]), each["start"], each["end"]) for each in meta.get("weight_versions") or ()),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        alternative_ids=array("i", [entry[1] for entry in others]).tobytes(),
        alternative_logprobs=array("f", [max(entry[0], IMPOSSIBLE) for entry in others]).tobytes(),
    )


def routed(order: Generate, experts: Experts, length: int, meta: Mapping[str, Any]) -> list[Routed] | Failed:
    """The experts of positions [`routed_from`, `length` - 1) of a request of `length` tokens, prompt and sample, as its last chunk tells them.

    SGLang sends int32, and the last token has no row. A build that ignores where to start sends all rows, and is understood.
    """
    told = meta.get("routed_experts")
    if told is None:
        return _unrouted(order, "the engine gave no routed experts, which it was asked for")
    start, width = order.routed_from or 0, experts.layers * experts.top_k
    given = numpy.frombuffer(b64decode(told), dtype="<i4")
    wanted = max(0, length - 1 - start)
    if given.size not in (wanted * width, (length - 1) * width):
        numbers = f"{given.size} numbers for {wanted} positions of {experts.layers} layers with {experts.top_k} experts each"
        return _unrouted(order, f"the engine gave routed experts in another shape: {numbers}")
    rows = given[given.size - wanted * width :]
    if rows.size and not rows.view("<u4").max() < experts.number:  # in one pass: what is below 0 is above everything so
        return _unrouted(order, f"the engine named experts from {rows.min()} to {rows.max()}, this model has 0 to {experts.number - 1}")
    wide = experts.number > 256
    data = rows.astype("<i2" if wide else "u1").tobytes()
    return _slabs(Routed(rid=order.rid, start=start, layers=experts.layers, top_k=experts.top_k, wide=wide, data=data))


def _slabs(whole: Routed) -> list[Routed]:
    """In messages that fit a frame, cut between rows."""
    width = whole.layers * whole.top_k * (2 if whole.wide else 1)
    rows = max(1, SLAB // width)
    places = range(0, max(1, len(whole.data) // width), rows)
    return [evolve(whole, start=whole.start + first, data=whole.data[first * width : (first + rows) * width]) for first in places]


def _unrouted(order: Generate, message: str) -> Failed:
    return Failed(rid=order.rid, message=message, retryable=True)


def _problem(finish: Mapping[str, Any]) -> tuple[str, bool] | None:
    if finish["type"] == "abort" and str(finish.get("message")).startswith("Grammar accept_token failed"):
        return "the constraint leaves nothing to sample: no text can match it from here on", False
    if finish["type"] == "abort" and (status := finish.get("status_code")) is not None:
        return str(finish.get("message")), int(status) >= 500
    if finish["type"] == "stop" and not isinstance(finish.get("matched"), int):
        return f"the engine stopped on {finish.get('matched')!r}: the weights gave NaN logits", False
    return None
