"""What an exchange asks the engine for on its task's behalf, what its turn keeps of it, and that its client
sees only what it asked for.
"""

from typing import Any

import pytest
from exchange_kit import CHAT, END, LINES, ExchangeScene, sampled
from fakes_engine import routes

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.errors import EngineError
from polarnode.core.ports import GenerateOrder
from polarnode.core.trajectory import Turn
from polarnode.gateway.exchange import (
    ClientLeft,
    Command,
    EndStream,
    EngineFailed,
    KeepResponse,
    RecordTurn,
    Send,
    StartGeneration,
)
from polarnode.merge.token_extras import CUT, SIZE_LIMIT_REASON, CallExtras, note

PROMPT = 2  # tokens of "hi"


def scene(carry: CallExtras, **said: Any) -> ExchangeScene:
    """A scene whose turns carry."""
    made = ExchangeScene(said.pop("dialect", LINES), **said)
    made.carry = carry
    return made


def asked(commands: list[Command]) -> GenerateOrder:
    (found,) = [command.order for command in commands if isinstance(command, StartGeneration)]
    return found


def likely(tokens: list[int], k: int) -> TopLogprobs:
    """The token itself and its neighbours."""
    steps = range(k)
    return TopLogprobs(
        k=k,
        ids=ids([token + step for token in tokens for step in steps]),
        logprobs=floats([-1.0 - step for _ in tokens for step in steps]),
    )


def whole(made: ExchangeScene, tokens: list[int], *, k: int = 0, routed: RoutedExperts | None = None) -> Turn:
    """The turn of a sample that ended by itself, in two chunks."""
    half = len(tokens) // 2
    for first, last, finish in ((0, half, None), (half, len(tokens), "stop")):
        top = likely(tokens[first:last], k) if k else None
        event = sampled(
            tokens[first:last], finish, start=first, top_logprobs=top, routed=routed if finish else None
        )
        commands = made.exchange.receive(event)
    return made.turn(commands)


def test_no_extras_asked_where_none_carried() -> None:
    """Nothing is asked for where nothing is carried."""
    made = scene(CallExtras())
    order = asked(made.to_generation())
    assert (order.top_logprobs, order.routed_from) == (0, None)
    turn = whole(made, [*b"abc", END])
    assert (turn.top, turn.routed, turn.notes) == (None, None, ())


def test_turn_keeps_extras_of_its_task() -> None:
    made = scene(CallExtras(top_logprobs=2, routed_from=0, room=1000))
    order = asked(made.to_generation())
    assert (order.top_logprobs, order.routed_from) == (2, 0)
    tokens = [*b"abc", END]
    rows = routes(0, PROMPT + 3, layers=3)
    turn = whole(made, tokens, k=2, routed=rows)
    assert (turn.top, turn.routed, turn.notes) == (likely(tokens, 2), rows, ())


@pytest.mark.parametrize(("client", "task"), [(3, 1), (1, 3), (2, 2), (0, 2), (2, 0)])
def test_client_and_task_count_alternatives_apart(client: int, task: int) -> None:
    """The client sees as many as it asked for, and the turn keeps as many as the task."""
    made = scene(CallExtras(top_logprobs=task, room=1000), logprobs=client)
    most = max(client, task)
    assert asked(made.to_generation()).top_logprobs == most
    commands = made.exchange.receive(sampled([*b"ab", END], "stop", top_logprobs=likely([*b"ab", END], most)))
    (answered,) = [command for command in commands if isinstance(command, KeepResponse)]
    assert [[other.data for other in told.top] for told in answered.response.answers[0].logprobs] == [
        [bytes([letter + step]) for step in range(client)] for letter in b"ab"
    ]
    assert made.turn(commands).top == (likely([*b"ab", END], task) if task else None)


def test_client_sees_no_unasked_alternatives() -> None:
    """A client that asked for none is shown none."""
    made = scene(CallExtras(top_logprobs=2, room=1000), dialect=CHAT)
    made.to_generation()
    commands = made.exchange.receive(sampled([*b"ab", END], "stop", top_logprobs=likely([*b"ab", END], 2)))
    sent = b"".join(command.data for command in commands if isinstance(command, Send))
    assert b'"content":"ab"' in sent
    assert b"logprob" not in sent.replace(b'"logprobs":null', b"")
    assert made.turn(commands).top == likely([*b"ab", END], 2)


def test_stop_keeps_alternatives_drops_experts() -> None:
    """A sample cut at its stop string keeps alternatives up to the cut, and no experts."""
    made = scene(CallExtras(top_logprobs=1, routed_from=0, room=1000), stop=("STOP",))
    made.to_generation()
    tokens = list(b"so STOP and more")
    commands = made.play(
        (sampled(tokens, top_logprobs=likely(tokens, 1)), [RecordTurn, KeepResponse, Send, EndStream])
    )
    turn = made.turn(commands)
    assert turn.top == likely(tokens[:7], 1)
    assert (turn.routed, turn.notes[-1]) == (None, note("routed_experts", CUT))


def test_stop_in_last_chunk_cuts_experts() -> None:
    """A stop string in the last chunk cuts the experts with the sample."""
    made = scene(CallExtras(routed_from=1, room=1000), stop=("STOP",))
    made.to_generation()
    tokens = list(b"STOP more")
    commands = made.play(
        (
            sampled(tokens, "length", routed=routes(1, PROMPT + 8, layers=2)),
            [RecordTurn, KeepResponse, Send, EndStream],
        )
    )
    turn = made.turn(commands)
    assert (len(turn.sampled), turn.routed, turn.notes) == (4, routes(1, PROMPT + 3, layers=2), ())


def test_disconnect_costs_experts_alone() -> None:
    """A client that leaves costs the experts alone."""
    made = scene(CallExtras(top_logprobs=1, routed_from=0, room=1000))
    made.to_generation()
    made.exchange.receive(sampled([*b"ab"], top_logprobs=likely([*b"ab"], 1)))
    turn = made.turn(made.exchange.receive(ClientLeft(at=12.0)))
    assert (turn.state, turn.top, turn.routed) == ("partial", likely([*b"ab"], 1), None)
    assert turn.notes == (note("routed_experts", CUT),)


def test_call_without_token_lacks_nothing() -> None:
    made = scene(CallExtras(top_logprobs=1, routed_from=0, room=1000))
    made.to_generation()
    turn = made.turn(made.exchange.receive(EngineFailed(error=EngineError("gone"), at=12.0)))
    assert (turn.state, turn.top, turn.routed, turn.notes) == ("failed", None, None, ())


def test_extras_over_limit_are_noted() -> None:
    """Extras that exceed the limit are dropped, and the turn's notes say so."""
    made = scene(CallExtras(top_logprobs=2, routed_from=0, room=40))
    made.to_generation()
    turn = whole(made, [*b"abc", END], k=2, routed=routes(0, PROMPT + 3, layers=3))
    assert (turn.top, turn.routed) == (None, None)
    assert turn.notes == (note("top_logprobs", SIZE_LIMIT_REASON), note("routed_experts", SIZE_LIMIT_REASON))
    spent = scene(CallExtras(notes=(note("routed_experts", SIZE_LIMIT_REASON),)))
    assert asked(spent.to_generation()).routed_from is None
    assert whole(spent, [*b"abc", END]).notes == (note("routed_experts", SIZE_LIMIT_REASON),)


def test_each_choice_carries_its_own() -> None:
    made = scene(CallExtras(routed_from=0, room=1000), choices=2)
    orders = [command.order for command in made.to_generation() if isinstance(command, StartGeneration)]
    assert [order.routed_from for order in orders] == [0, 0]
    first = made.exchange.receive(sampled([*b"a", END], "stop", routed=routes(0, PROMPT + 1, layers=1)))
    second = made.exchange.receive(
        sampled([*b"bcd", END], "stop", routed=routes(0, PROMPT + 3, layers=1), choice=1)
    )
    kept = [turn.routed for turn in made.turns([*first, *second])]
    assert [rows.end for rows in kept if rows is not None] == [PROMPT + 1, PROMPT + 3]
