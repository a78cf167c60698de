"""Carries out the commands of a call's machine on its HTTP response: bytes as they come, keep-alives between.

A stream ends properly or not at all: returning without the last body message makes Hypercorn cut the
connection without the terminal chunk, which a client sees as a broken stream. Keep-alives are the dialect's
own data events, never SSE comments.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from typing import assert_never

import trio
from attrs import frozen

from polarnode.gateway.call_events import Break, Done, Outgoing, Send
from polarnode.http.asgi import Responder
from polarnode.providers.contract import Reply


@frozen(kw_only=True)
class Pace:
    """Seconds of silence before a sign of life: before the first byte, and after it.

    The first is short, so that headers leave long before any client's patience (60 s) ends, and not zero, so
    that an engine that is down and a context that is too long can still say so in a status. The second is
    half of what the least patient harness was seen to need.
    """

    opening_s: float = 1.0
    quiet_s: float = 10.0


async def deliver(
    outgoing: "trio.MemoryReceiveChannel[Outgoing]",
    to: Responder,
    *,
    pace: Pace,
    on_quiet: Callable[[], list[Outgoing]],
) -> None:
    """Send what comes until the answer is at its end, or nothing comes any more. `on_quiet` is asked for a
    sign of life in every silence.
    """
    while True:
        commands: list[Outgoing] = []
        # one for all of a stream between two silences: a new one costs 10 us a chunk
        with trio.CancelScope() as silence:
            while not commands:
                silence.deadline = trio.current_time() + (pace.quiet_s if to.opened else pace.opening_s)
                try:
                    commands = _with_more(await outgoing.receive(), outgoing)
                except trio.EndOfChannel:
                    return
                # else it would cut what is sent now: that waits until it is left
                if not silence.cancel_called:
                    silence.deadline = math.inf
                    if await _sent(commands, to):
                        return
                    commands = []
        if await _sent(commands or on_quiet(), to):
            return


def _with_more(first: Outgoing, outgoing: "trio.MemoryReceiveChannel[Outgoing]") -> list[Outgoing]:
    """What came, and what came meanwhile. Pieces of a stream become one, so that a busy node writes less
    often, not later.
    """
    found = [first]
    with suppress(trio.WouldBlock, trio.EndOfChannel):
        while True:
            more, last = outgoing.receive_nowait(), found[-1]
            if isinstance(more, Send) and isinstance(last, Send) and not more.alone:
                found[-1] = Send(last.data + more.data, last.content_type)
            else:
                found.append(more)
    return found


async def _sent(commands: list[Outgoing], to: Responder) -> bool:
    """Whether the answer ended with one of these."""
    for command, following in zip_longest(commands, commands[1:]):
        if await _obey(command, to, last=isinstance(following, Done)):
            return True
    return False


async def _obey(command: Outgoing, to: Responder, *, last: bool) -> bool:
    """Whether that was the end of the answer. `last`: a stream's end follows."""
    match command:
        case Send(data, content_type):
            await to.stream(data, content_type, last=last)
            return False
        case Reply():
            await to.reply(command)
        case Done():
            await to.end()
        case Break():
            pass  # returning is what cuts the connection
        case _:
            assert_never(command)
    return True
