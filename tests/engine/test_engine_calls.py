"""One generation on the node's side: orders checked and spelled for SGLang, pieces of the wire made
chunks.
"""

from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from fakes_engine import order

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.conversation import Constraint, Sampling
from polarnode.core.errors import ContextTooLong, EngineError
from polarnode.core.ports import Chunk, GenerateOrder, LogitSteering
from polarnode.core.trajectory import VersionSpan
from polarnode.engine.calls import WITHHELD_TOKENS, Call, check_order, sampling_parameters, to_generate
from polarnode.engine.protocol import Piece, RoutedRows

RID = "0" * 32
SCHEMA = Constraint(kind="json_schema", text='{"type": "object"}')
STEERING = LogitSteering(processor='{"callable": ""}', parameters={"force": [1], "stop": 2})


def piece(sampled: list[int], version: str = "0", **more: Any) -> Piece:
    return Piece(
        rid=RID,
        ids=ids(sampled).tobytes(),
        logprobs=floats([-1.5] * len(sampled)).tobytes(),
        version=version,
        **more,
    )


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (order([]), "empty"),
        (order([5, 10]), "0 to 9"),
        (order([-1, 5]), "from -1 to 5"),
        (order([1], max_tokens=0), "max_tokens 0"),
        (
            GenerateOrder(request_id="A" * 32, prompt=ids([1]), sampling=Sampling(), stop_ids=()),
            "32 hex digits",
        ),
        (order([1], top_logprobs=11), "0 to 10"),
        (order([1], top_logprobs=-1), "top_logprobs -1"),
        (order([1], routed_from=0), "start the node with --routed-experts"),
        (order([1], constraint=Constraint(kind="regex", text="")), "regex is empty"),
        (order([1], constraint=SCHEMA, steering=STEERING), "not both"),
        (
            GenerateOrder(request_id="a" * 33, prompt=ids([1]), sampling=Sampling(), stop_ids=()),
            "32 hex digits",
        ),
    ],
)
def test_harmful_request_is_refused(asked: GenerateOrder, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence) as caught:
        check_order(asked, vocab_size=10, context_length=100)
    assert not caught.value.retryable


def test_prompt_needs_room_for_one_token() -> None:
    check_order(order([1] * 99), vocab_size=10, context_length=100)
    with pytest.raises(ContextTooLong, match="100 tokens"):
        check_order(order([1] * 100), vocab_size=10, context_length=100)


@pytest.mark.parametrize(("asked", "given"), [(None, 97), (5, 5), (1000, 97)])
def test_max_tokens_always_set_and_fits(asked: int | None, given: int) -> None:
    """The tokens asked for are always said and fit."""
    message = to_generate(order([1, 2, 3], max_tokens=asked, stop_ids=(7, 8)), context_length=100)
    assert message.sampling["max_new_tokens"] == given
    assert message.sampling["stop_token_ids"] == [7, 8]
    assert ids(message.prompt) == ids([1, 2, 3])


def test_calls_without_seed_get_own() -> None:
    """Where inference is deterministic, SGLang's default is one seed for all: a group's attempts would be one
    attempt.
    """
    seeds = {to_generate(order(), context_length=100).sampling["sampling_seed"] for _ in range(20)}
    assert len(seeds) == 20
    assert (
        to_generate(evolve(order(), sampling=Sampling(seed=0)), context_length=100).sampling["sampling_seed"]
        == 0
    )


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf"])
def test_constraint_becomes_sampling_parameter(kind: Any) -> None:
    asked = order(constraint=Constraint(kind=kind, text="x"), constraint_after=9)
    message = to_generate(asked, context_length=100)
    assert {name: message.sampling.get(name) for name in ("json_schema", "regex", "ebnf")} == {
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        kind: "x",
    }
    assert message.constraint_after == 9
    assert to_generate(evolve(asked, constraint=None), context_length=100).constraint_after is None


def test_steering_becomes_processor_with_parameters() -> None:
    message = to_generate(order(steering=STEERING, top_logprobs=3), context_length=100)
    assert message.processor == STEERING.processor
    assert message.sampling["custom_params"] == {"force": [1], "stop": 2}
    assert message.top_logprobs == 3
    assert "custom_params" not in to_generate(order(), context_length=100).sampling


async def test_alternatives_belong_to_their_tokens() -> None:
    call = Call(rid=RID, top_logprobs=2)
    others: dict[str, Any] = {
        "alternative_ids": ids([1, 5, 2, 6]).tobytes(),
        "alternative_logprobs": floats([-0.5, -2.0, -0.25, -4.0]).tobytes(),
    }
    chunks = await read(call, piece([1, 2], **others), piece([], finish="stop"))
    top = chunks[0].top_logprobs
    assert top is not None
    assert [top.row(place) for place in range(top.rows)] == [((1, -0.5), (5, -2.0)), ((2, -0.25), (6, -4.0))]
    assert chunks[1].top_logprobs is None


def test_experts_start_at_prompt_position() -> None:
    check_order(order([1, 2], routed_from=2), vocab_size=10, context_length=9, routes=True)
    assert to_generate(order([1, 2], routed_from=2), context_length=9).routed_from == 2
    for wrong in (-1, 3):
        with pytest.raises(EngineError, match=f"routed_from {wrong}: give 0 to 2"):
            check_order(order([1, 2], routed_from=wrong), vocab_size=10, context_length=9, routes=True)


async def test_experts_come_with_last_chunk() -> None:
    call = Call(rid=RID)
    call.take(piece([1]))
    first = await call.__anext__()
    for start, wide in ((2, b"\1\0\2\0"), (3, b"\3\0\4\1")):
        call.take(RoutedRows(rid=RID, start=start, layers=2, top_k=1, wide=True, data=wide))
    assert not call.over
    call.take(piece([2], finish="stop"))
    last = await call.__anext__()
    assert first.routed is None
    assert last.routed == RoutedExperts(start=2, layers=2, top_k=1, dtype="int16", data=b"\1\0\2\0\3\0\4\1")
    assert (await read(Call(rid=RID), piece([1], finish="stop")))[0].routed is None


async def test_waiting_pieces_merge_with_alternatives() -> None:
    call = Call(rid=RID, top_logprobs=2)
    for token in (1, 2):
        call.take(
            piece(
                [token],
                alternative_ids=ids([token, 9]).tobytes(),
                alternative_logprobs=floats([-0.5, -token]).tobytes(),
            )
        )
    chunk = await call.__anext__()
    assert chunk.top_logprobs == TopLogprobs(
        k=2, ids=ids([1, 9, 2, 9]), logprobs=floats([-0.5, -1, -0.5, -2])
    )


def test_sampling_overrides_engine_defaults() -> None:
    assert sampling_parameters(Sampling(), max_tokens=9) == {
        "max_new_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "sampling_seed": None,
    }  # fmt: skip


def test_requested_extras_reach_engine() -> None:
    asked = Sampling(
        temperature=0.0,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1,
        stop=("x",),
    )
    assert sampling_parameters(asked, max_tokens=9) == {
        "max_new_tokens": 9, "temperature": 0.0, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": -0.5,
        "repetition_penalty": 1.1, "sampling_seed": 7,
    }  # fmt: skip
    assert sampling_parameters(Sampling(top_k=0), max_tokens=9)["top_k"] == -1


async def read(call: Call, *pieces: Piece) -> list[Chunk]:
    """The chunks of a consumer that takes each piece as it comes."""
    chunks = []
    for each in pieces:
        call.take(each)
        chunks.append(await call.__anext__())
    return chunks


async def test_whole_answer_wakes_reader_once() -> None:
    """The reader of a whole answer sleeps until its end."""
    call, reads = Call(rid=RID, whole=True), []

    async def reader() -> None:
        async for chunk in call:
            reads.append(chunk.ids.tolist())  # noqa: PERF401 - looked at meanwhile

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        for each in (piece([]), piece([1]), piece([2]), piece([3, 4])):
            call.take(each)
            await trio.testing.wait_all_tasks_blocked()
        assert reads == []
        call.take(piece(list(range(WITHHELD_TOKENS))))
        await trio.testing.wait_all_tasks_blocked()
        assert reads == [[1, 2, 3, 4, *range(WITHHELD_TOKENS)]]
        for each in (piece([5]), piece([6], finish="stop")):
            call.take(each)
            await trio.testing.wait_all_tasks_blocked()
    assert reads[1:] == [[5, 6]]


@pytest.mark.parametrize("whole", [False, True])
async def test_chunk_has_time_of_first_token(autojump_clock: trio.abc.Clock, whole: bool) -> None:
    call = Call(rid=RID, whole=whole)
    call.take(piece([]))
    await trio.sleep(1)
    came = trio.current_time()
    call.take(piece([1]))
    await trio.sleep(1)
    call.take(piece([2], finish="stop"))
    await trio.sleep(1)
    assert (await call.__anext__()).first_at == came


async def test_failure_follows_withheld_tokens() -> None:
    call = Call(rid=RID, whole=True)
    call.take(piece([1]))
    call.take(piece([2], version="1"))
    call.fail(EngineError("the host died"))
    last = await call.__anext__()
    assert last.ids.tolist() == [1, 2]
    assert last.version_spans == (
        VersionSpan(version="0", start=0, end=1),
        VersionSpan(version="1", start=1, end=2),
    )
    with pytest.raises(EngineError, match="the host died"):
        await call.__anext__()


async def test_departing_reader_gets_withheld_tokens() -> None:
    """A reader that leaves gets what was withheld once, and never the end."""
    call = Call(rid=RID, whole=True)
    assert call.withheld() is None
    call.take(piece([2]))
    call.take(piece([3], finish="stop"))
    withheld = call.withheld()
    assert withheld is not None
    assert (withheld.ids.tolist(), withheld.finish_reason) == ([2, 3], None)
    assert call.withheld() is None
    streamed = Call(rid=RID)
    streamed.take(piece([1]))
    assert streamed.withheld() is None


async def test_pieces_become_chunks_until_end() -> None:
    call = Call(rid=RID)
    chunks = await read(call, piece([1, 2], cached_tokens=3), piece([3], finish="stop"))
    assert [chunk.ids.tolist() for chunk in chunks] == [[1, 2], [3]]
    assert [chunk.logprobs.tolist() for chunk in chunks] == [[-1.5, -1.5], [-1.5]]
    assert [chunk.finish_reason for chunk in chunks] == [None, "stop"]
    assert [chunk.cached_tokens for chunk in chunks] == [3, 0]
    assert call.over
    assert [chunk async for chunk in call] == []


async def test_unread_pieces_become_one_chunk() -> None:
    call = Call(rid=RID)
    call.take(piece([1, 2], "a", cached_tokens=3))
    call.take(piece([3], "b"))
    call.take(piece([], "b", finish="stop"))
    (chunk,) = [chunk async for chunk in call]
    assert (chunk.ids.tolist(), chunk.logprobs.tolist(), chunk.finish_reason, chunk.cached_tokens) == (
        [1, 2, 3],
        [-1.5] * 3,
        "stop",
        3,
    )
    assert chunk.version_spans == (
        VersionSpan(version="a", start=0, end=2),
        VersionSpan(version="b", start=2, end=3),
    )


async def test_piece_without_tokens_is_no_chunk(autojump_clock: trio.abc.Clock) -> None:
    call = Call(rid=RID)
    call.take(piece([]))
    with trio.move_on_after(1) as waited:
        await call.__anext__()
    assert waited.cancelled_caught
    call.take(piece([5]))
    assert (await call.__anext__()).ids.tolist() == [5]


async def test_version_spans_grow_with_sample() -> None:
    chunks = await read(
        Call(rid=RID), piece([1, 2], "a"), piece([3], "a"), piece([4, 5], "b", finish="length")
    )
    a, b = VersionSpan(version="a", start=0, end=3), VersionSpan(version="b", start=3, end=5)
    assert [chunk.version_spans for chunk in chunks] == [
        (VersionSpan(version="a", start=0, end=2),),
        (a,),
        (a, b),
    ]


async def test_engine_spans_replace_gathered_ones() -> None:
    call = Call(rid=RID)
    call.take(piece([1, 2, 3], "b"))
    call.take(piece([4], "b", finish="length", spans=[["a", 0, 1], ["b", 1, 4], ["c", 4, 4]]))
    last = [chunk async for chunk in call][-1]
    assert last.version_spans == (
        VersionSpan(version="a", start=0, end=1),
        VersionSpan(version="b", start=1, end=4),
    )


async def test_failure_follows_sampled_tokens() -> None:
    call = Call(rid=RID)
    call.take(piece([1]))
    call.fail(EngineError("the host died"))
    assert (await call.__anext__()).ids == ids([1])
    with pytest.raises(EngineError, match="the host died"):
        await call.__anext__()


async def test_failure_wakes_waiting_consumer(autojump_clock: trio.abc.Clock) -> None:
    call = Call(rid=RID)
    async with trio.open_nursery() as nursery:

        async def fail_later() -> None:
            await trio.sleep(1)
            call.fail(EngineError("gone"))

        nursery.start_soon(fail_later)
        with pytest.raises(EngineError, match="gone"):
            await call.__anext__()


def test_pieces_after_consumer_left_are_dropped() -> None:
    call = Call(rid=RID)
    call.close()
    call.take(piece([1]))
    assert not call.over
    call.take(piece([], finish="abort"))
    assert call.over


NAN = floats([float("nan")]).tobytes()
# What a host may never send of a call for two alternatives in a vocabulary of 10, and how it is refused.
UNFIT: tuple[tuple[Any, str], ...] = (
    (Piece(rid=RID, ids=b"\1\0\0", logprobs=b"", version="0"), "3 bytes of token ids"),
    (Piece(rid=RID, ids=bytes(8), logprobs=bytes(4), version="0"), "8 bytes of token ids with 4 bytes"),
    (piece([1]), "0 bytes of alternatives for 1 tokens, 8 are due"),
    (piece([10], alternative_ids=bytes(8), alternative_logprobs=bytes(8)), "a token outside the vocabulary"),
    (piece([-1], alternative_ids=bytes(8), alternative_logprobs=bytes(8)), "a token outside the vocabulary"),
    (
        piece([1], alternative_ids=ids([1, 99]).tobytes(), alternative_logprobs=bytes(8)),
        "an alternative outside the vocabulary",
    ),
    (
        Piece(rid=RID, ids=bytes(4), logprobs=NAN, version="0", alternative_ids=bytes(8), alternative_logprobs=bytes(8)),
        "a token with a logprob that is not a number",
    ),
    (piece([], finish="stop", spans=(("0", 0, 2),)), "weight versions of 2 tokens, 1 were sampled"),
    (piece([], finish="stop", spans=(("0", 1, 1),)), "tokens 1 to 1, where 0 is due"),
    (RoutedRows(rid=RID, start=-1, layers=1, top_k=1, wide=False, data=b""), "from -1 on"),
    (RoutedRows(rid=RID, start=0, layers=0, top_k=1, wide=False, data=b""), "0 a position"),
    (RoutedRows(rid=RID, start=0, layers=2, top_k=1, wide=False, data=b"\1"), "1 bytes of routed experts"),
)  # fmt: skip


@pytest.mark.parametrize(("unfit", "why"), UNFIT, ids=[why for _, why in UNFIT])
async def test_unfit_pieces_fail_the_call(unfit: Any, why: str) -> None:
    call = Call(rid=RID, vocab_size=10, top_logprobs=2)
    call.take(piece([3], alternative_ids=ids([3, 4]).tobytes(), alternative_logprobs=bytes(8)))
    call.take(unfit)
    assert call.over
    assert (await call.__anext__()).ids == ids([3])
    with pytest.raises(EngineError, match=f"cannot be used: .*{why}") as caught:
        await call.__anext__()
    assert caught.value.retryable


async def test_expert_rows_are_joined() -> None:
    call = Call(rid=RID)
    call.take(RoutedRows(rid=RID, start=2, layers=2, top_k=1, wide=True, data=bytes(4)))
    call.take(RoutedRows(rid=RID, start=4, layers=2, top_k=1, wide=True, data=bytes(4)))
    with pytest.raises(EngineError, match="from 4 on where 3 is due"):
        await call.__anext__()
