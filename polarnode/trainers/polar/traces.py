"""A row as Polar's Trace: prompt, response, mask, and one logprob entry a token of the response.

The rule for whoever edits it: some bridges read `loss_mask`, others take a token for trainable when its logprob entry has a `token`; both must
say the same, token by token. The id stands for the text, as engines write it when they are asked for tokens and not for words.
"""

from polarnode.conversation import Json
from polarnode.records import Trace, Turn
from polarnode.trainers.polar.messages import messages_json, words_of
from polarnode.trainers.polar.words import finish_word
from polarnode.wire import plain
from polarnode.wire.turns import weight_versions


def trace_json(trace: Trace, turns: dict[int, Turn]) -> dict[str, Json]:
    """One row: what was asked before its first sample is the prompt, all behind it the response."""
    at, words = trace.prompt_length, words_of(trace, turns)
    return {
        "prompt_ids": list[Json](trace.token_ids[:at]),
        "response_ids": list[Json](trace.token_ids[at:]),
        "loss_mask": list(trace.loss_mask[at:]),
        "prompt_messages": messages_json(words.prompt),
        "response_messages": messages_json(words.response),
        "tools": words.tools,
        "finish_reason": finish_word(trace.finish_reason),
        "response_logprobs": _logprobs(trace),
        "reward": trace.reward,
        "metadata": _metadata(trace, turns, known=words.known),
    }


def _logprobs(trace: Trace) -> list[Json]:
    at = trace.prompt_length
    response = zip(trace.token_ids[at:], trace.logprobs[at:], trace.loss_mask[at:], strict=True)
    return [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob} if trained else {"token_id": token, "logprob": 0.0}
        for token, logprob, trained in response
    ]


def _metadata(trace: Trace, turns: dict[int, Turn], *, known: bool) -> dict[str, Json]:
    ours: dict[str, Json] = {
        "lineage": trace.lineage,
        "role": trace.role,
        "weight_versions": list[Json](weight_versions(trace.version_spans)),
        "version_spans": plain(trace.version_spans),  # of the whole row, prompt and response, as are the turns' spans
        "turn_spans": plain(trace.turn_spans),
        "offset": trace.offset,
        "part": trace.part,
        "parts": trace.parts,
        "over_long": trace.over_long,
        "lacks": list(trace.lacks),
    }
    if not known:
        ours["words"] = "unknown"
    return {"completion_metadata": [_completion(turns[span.turn]) for span in trace.turn_spans if span.turn in turns], "polarnode": ours}


def _completion(turn: Turn) -> Json:
    return {
        "completion_id": completion_id(turn),
        "timestamp": turn.started + turn.ended_s,
        "turn": turn.index,
        "role": turn.role,
        "state": turn.state,
        "finish_reason": finish_word(turn.finish_reason),
        "usage": plain(turn.usage),
    }


def completion_id(turn: Turn) -> str:
    """A name for a model call: Polar's are made up, ours say which it is."""
    return f"msg_{turn.session_id}_{turn.index}"
