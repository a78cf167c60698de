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

from polarnode.gateway.call_events import Break, EndStream, Outgoing, Send
from polarnode.http.asgi import Responder
from polarnode.providers.contract import Reply


@frozen(kw_only=True)
class KeepAlivePacing:
    """Seconds of silence before a keep-alive: before the first byte, and after it.

    The first is short, so that headers are sent long before any client times out (60 s), and not zero, so
    that an engine that is down or a context that is too long can still be reported with a status. The second
    is half the shortest time-out measured in a harness.
    """

    opening_s: float = 1.0
    quiet_s: float = 10.0


async def deliver(
    outgoing: "trio.MemoryReceiveChannel[Outgoing]",
    to: Responder,
    *,
    pacing: KeepAlivePacing,
    on_quiet: Callable[[], list[Outgoing]],
) -> None:
    """Send commands until the response ends or the channel closes. `on_quiet` returns a keep-alive when
    nothing was sent for the time in `pacing`.
    """
    while True:
        commands: list[Outgoing] = []
        # one scope for many chunks, until a silence: a new one costs 10 us per chunk
        with trio.CancelScope() as silence:
            while not commands:
                silence.deadline = trio.current_time() + (pacing.quiet_s if to.opened else pacing.opening_s)
                try:
                    commands = _with_more(await outgoing.receive(), outgoing)
                except trio.EndOfChannel:
                    return
                # after the deadline a send here would be cancelled: it waits until the scope exits
                if not silence.cancel_called:
                    silence.deadline = math.inf
                    if await _sent(commands, to):
                        return
                    commands = []
        if await _sent(commands or on_quiet(), to):
            return


def _with_more(first: Outgoing, outgoing: "trio.MemoryReceiveChannel[Outgoing]") -> list[Outgoing]:
    """The first command and those queued since. Bytes of a stream are joined, so that a busy node writes less
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
    """Send these commands. Returns whether one of them ended the response."""
    for command, following in zip_longest(commands, commands[1:]):
        if await _send_one(command, to, last=isinstance(following, EndStream)):
            return True
    return False


async def _send_one(command: Outgoing, to: Responder, *, last: bool) -> bool:
    """Send one command. Returns whether it ended the response. `last`: the end of the stream follows."""
    match command:
        case Send(data, content_type):
            await to.stream(data, content_type, last=last)
            return False
        case Reply():
            await to.reply(command)
        case EndStream():
            await to.end()
        case Break():
            pass  # returning breaks the connection
        case _:
            assert_never(command)
    return True
