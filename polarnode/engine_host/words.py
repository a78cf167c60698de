"""Requests and chunks in SGLang's words and in ours. Plain functions: no asyncio, no sglang.

Rule for whoever edits it: whatever SGLang gives in another shape than the one written here is a failure of that one request, said in numbers.
"""

from array import array
from collections.abc import Mapping
from typing import Any

from polarnode.engine_host.protocol import Failed, Generate, HostFinish, Piece

AFTER = "polarnode_constraint_after"  # among a request's custom_params, for `grammars`: the id behind which its constraint begins
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


def _problem(finish: Mapping[str, Any]) -> tuple[str, bool] | None:
    if finish["type"] == "abort" and str(finish.get("message")).startswith("Grammar accept_token failed"):
        return "the constraint leaves nothing to sample: no text can match it from here on", False
    if finish["type"] == "abort" and (status := finish.get("status_code")) is not None:
        return str(finish.get("message")), int(status) >= 500
    if finish["type"] == "stop" and not isinstance(finish.get("matched"), int):
        return f"the engine stopped on {finish.get('matched')!r}: the weights gave NaN logits", False
    return None
