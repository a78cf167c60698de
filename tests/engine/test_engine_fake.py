"""The fake engine keeps the engines' contract, and offers what tests above it need to go wrong."""

import pytest
import trio
from fakes_engine import ScriptedEngine, contract, joined, order, sample

from polarnode.core.errors import EngineError


async def test_fake_engine_keeps_contract() -> None:
    with trio.fail_after(30):
        await contract(ScriptedEngine())


async def test_self_ending_reply_stops() -> None:
    engine = ScriptedEngine(reply=lambda _: [5, 6, 7])
    chunks = await sample(engine, order())
    assert joined(chunks) == [5, 6, 7]
    assert chunks[-1].finish_reason == "stop"
    assert engine.ended == {"stop": 1}


async def test_generation_can_be_held_and_left(autojump_clock: trio.abc.Clock) -> None:
    engine = ScriptedEngine(hold=trio.Event())
    with trio.move_on_after(5) as scope:
        await sample(engine, order(max_tokens=20))
    assert scope.cancelled_caught
    assert engine.ended == {"abort": 1}
    assert engine.statistics().hosts[0].running == 0


async def test_generation_can_fail_half_way() -> None:
    engine = ScriptedEngine(fail=EngineError("the host died"))
    async with engine.generate(order(max_tokens=20)) as stream:
        assert len((await stream.__anext__()).ids) == 4
        with pytest.raises(EngineError, match="the host died"):
            await stream.__anext__()
