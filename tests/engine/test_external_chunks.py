"""What SGLang's chunks become: only new tokens, their logprobs, and the weights that named themselves. The
shapes are those that SGLang 0.5.23 sent (test_external_sglang.py samples from it).
"""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from polarnode.core.arrays import floats, ids
from polarnode.core.trajectory import UNKNOWN_VERSION
from polarnode.engine.external import Versions, Wanted, read_requirements
from polarnode.engine.external_sglang import UNNAMED_LABELS, AnswerReader, EventReader, generate_body
from polarnode.engine.protocol import Failed, Generate, Piece, RoutedRows, ToNode

URL = "http://server:30000"
WANTED = Wanted(url=URL, vocab_size=1000)
STOP = {"type": "stop", "matched": 9}


def order(**more: Any) -> Generate:
    prompt = ids([1, 2, 3]).tobytes()
    return Generate(rid="a" * 32, prompt=prompt, sampling={"max_new_tokens": 9, "sampling_seed": 5}, **more)


def answer(asked: Generate | None = None, *, label: str = "7") -> AnswerReader:
    versions = Versions(nameless=UNNAMED_LABELS)
    versions.note(label, "/model")
    return AnswerReader(asked or order(), versions, WANTED)


def chunk(tokens: Sequence[int], total: int, *, label: str = "7", **meta: Any) -> dict[str, Any]:
    """One event of a stream: these tokens, of `total` so far."""
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": None,
            "weight_version": label,
            "completion_tokens": total,
            "cached_tokens": 2,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            **meta,
        },
    }


def only(messages: Sequence[ToNode]) -> Piece:
    (message,) = messages
    assert isinstance(message, Piece), message
    return message


def failure(messages: Sequence[ToNode]) -> Failed:
    (message,) = messages
    assert isinstance(message, Failed), message
    return message


@pytest.mark.parametrize("whole", [False, True], ids=["new tokens alone", "the sample so far"])
def test_each_token_is_taken_once(whole: bool) -> None:
    reads = answer()
    first = only(reads.take(chunk([5, 6], 2)))
    last = only(reads.take(chunk([5, 6, 9] if whole else [9], 3, finish_reason=STOP)))
    assert (ids(first.ids).tolist(), ids(last.ids).tolist()) == ([5, 6], [9])
    assert floats(last.logprobs).tolist() == [-0.5]
    assert (first.finish, last.finish, last.version, first.cached_tokens) == (None, "stop", "7", 2)
    assert reads.over
    assert not reads.failed


def test_cumulative_alternatives_follow_their_tokens() -> None:
    reads = answer(order(top_logprobs=1))
    reads.take(chunk([5], 1, output_top_logprobs=[[[-0.5, 5, None]]]))
    later = only(reads.take(chunk([5, 6], 2, output_top_logprobs=[[[-0.5, 5, None]], [[None, 8, None]]])))
    assert ids(later.alternative_ids).tolist() == [8]
    assert floats(later.alternative_logprobs).tolist() == [-9999.0]  # minus infinity is null in JSON


@pytest.mark.parametrize(
    ("event", "why", "again"),
    [
        (chunk([6], 3), "skipped tokens: 1 tokens up to 3, where 0 were sent", True),
        ({**chunk([6], 1), "output_ids": [7]}, "of other tokens than its ids", True),
        (chunk([6], 1, output_token_logprobs=None), "skipped tokens", True),
        ({"error": {"message": "too long", "code": 400}}, "too long", False),
        ({"error": {"message": "draining", "code": 503}}, "draining", True),
        ({"error": {"message": "who are you", "code": 401}}, "who are you", False),
        (
            chunk([], 0, finish_reason={"type": "abort", "message": "no grammar", "status_code": 400}),
            "no grammar",
            False,
        ),
        ({"text": "x"}, "a chunk of another shape", True),
        (chunk([], 0, finish_reason={"type": "abort", "message": "out", "status_code": 503}), "out", True),
        (chunk([6], 1, finish_reason={"type": "stop", "matched": "NaN happened"}), "NaN logits", False),
    ],
)
def test_unfit_event_fails_its_call(event: dict[str, Any], why: str, again: bool) -> None:
    reads = answer()
    found = failure(reads.take(event))
    assert why in found.message
    assert URL in found.message
    assert (found.retryable, reads.failed) == (again, True)
    assert found.refused == (why in ("too long", "no grammar"))


def test_abort_without_tokens_ends_call() -> None:
    """SGLang 0.5.23 counts a token that it does not send where it refuses a grammar."""
    spans = [{"version": "7", "start": 0, "end": 3}]
    reads = answer()
    reads.take(chunk([5, 6], 2))
    ended = {"finish_reason": {"type": "abort", "message": "Aborted"}, "weight_versions": spans}
    last = only(reads.take(chunk([], 3, **ended)))
    assert (last.finish, last.ids, last.spans) == ("abort", b"", ())
    refused = {"finish_reason": {"type": "abort", "message": "no grammar", "status_code": 400}}
    assert not failure(answer().take(chunk([], 1, **refused))).retryable


def test_null_logprob_reaches_the_check() -> None:
    """The node fails a call with a logprob that is not a number; nothing may take its place."""
    (logprob,) = floats(only(answer().take(chunk([6], 1, output_token_logprobs=[[None, 6, None]]))).logprobs)
    assert logprob != logprob


# ── weights ───────────────────────────────────────────────────────────────────


def test_scheduler_spans_become_sample_spans() -> None:
    reads = answer()
    reads.take(chunk([5, 6], 2))
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    last = only(reads.take(chunk([9], 3, label="8", finish_reason=STOP, weight_versions=spans)))
    assert last.spans == (("7", 0, 1), ("8", 1, 3))


def test_change_without_spans_is_unknown() -> None:
    """It is labelled after it was sampled, so it may be of either."""
    reads = answer()
    found = [
        only(reads.take(chunk([5], total, label=label))) for total, label in ((1, "7"), (2, "8"), (3, "8"))
    ]
    assert [piece.version for piece in found] == ["7", UNKNOWN_VERSION, "8"]


def test_default_label_names_no_version() -> None:
    reads = answer(label="default")
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    assert only(reads.take(chunk([5], 1, label="default"))).version == UNKNOWN_VERSION
    assert only(reads.take(chunk([6], 2, label="8", weight_versions=spans))).spans == (
        (UNKNOWN_VERSION, 0, 1),
        ("8", 1, 2),
    )


def test_stale_label_names_no_version() -> None:
    """A label that outlives its weights names nothing until it changes."""
    versions = Versions(nameless=UNNAMED_LABELS)
    versions.note("7", "/steps/7")
    assert versions.named("7") == "7"
    versions.note("7", "/steps/8")
    assert versions.named("7") == UNKNOWN_VERSION
    assert versions.named("6") == "6"  # what was sampled before under another label
    versions.note("7", "/steps/8")
    assert versions.named("7") == UNKNOWN_VERSION
    versions.note("9", "/steps/9")
    assert (versions.named("9"), versions.named("7")) == ("9", "7")


def test_reused_label_makes_sample_unknown() -> None:
    reads = answer()
    last = only(reads.take(chunk([5, 9], 2, finish_reason=STOP)))
    unnamed = reads.unnamed(last)
    assert (unnamed.spans, unnamed.version) == (((UNKNOWN_VERSION, 0, 2),), UNKNOWN_VERSION)


# ── requests ──────────────────────────────────────────────────────────────────


def test_request_contains_only_requested_fields() -> None:
    body = orjson.loads(generate_body(order(), deterministic=False))
    assert body == {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 9},
        "rid": "a" * 32,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": True,
    }
    more = orjson.loads(generate_body(order(routed_from=2, constraint_after=4), deterministic=True))
    assert more["sampling_params"]["sampling_seed"] == 5
    assert (more["return_routed_experts"], more["routed_experts_start_len"]) == (True, 2)
    assert more["require_reasoning"] is True


def test_events_are_read_across_cuts() -> None:
    stream = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    for size in (1, 5, 1000):
        reader = EventReader()
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [event for part in parts for event in reader.feed(part)] == [{"a": 1}, {"b": 2}]


def test_experts_only_at_requested_positions() -> None:
    import base64

    wanted = read_requirements(
        {"url": URL, "vocab_size": 9, "words": [], "context_length": None, "experts": [2, 1, 8]}
    )
    versions = Versions(nameless=UNNAMED_LABELS)
    rows = base64.b64encode(ids([1, 2, 3, 4]).tobytes()).decode()
    reads = AnswerReader(order(routed_from=1), versions, wanted)
    routed, last = reads.take(chunk([9], 1, finish_reason=STOP, routed_experts=rows))
    assert isinstance(routed, RoutedRows)
    assert (routed.start, routed.layers, routed.top_k, routed.data) == (1, 2, 1, b"\1\2\3\4")
    assert isinstance(last, Piece)
    assert (
        "no routed experts"
        in failure(
            AnswerReader(order(routed_from=1), versions, wanted).take(chunk([9], 1, finish_reason=STOP))
        ).message
    )
