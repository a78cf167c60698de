"""Bytes and plain requests handed on between a container and the world.

Everything here is given its two ends and ends with them; how long it may take is the caller's, who is told by `moved` of all that passes.
Rule for whoever edits it: what a peer does wrong ends its own connection and is no error of ours.
"""

from collections.abc import Callable

import h11
import trio
from attrs import define, field
from trio.abc import HalfCloseableStream

from polarnode.shell.egress.asking import end_to_end

READ_BYTES = 64 << 10  # at once: a download is some hundred of them a second
HEAD_BYTES = 32 << 10  # of a request's or an answer's head: package indexes set a few headers, not kilobytes of them

Moved = Callable[[int, int], None]  # bytes sent to the world, bytes received of it
GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


@define(eq=False)
class Side:
    """One end of HTTP on a stream."""

    stream: HalfCloseableStream
    http: h11.Connection
    begun: bool = field(default=False, init=False)  # an answer of ours has begun, so no other can be given

    async def next(self) -> object:
        """The next event of h11; raises its RemoteProtocolError and what streams raise."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self.http.our_role is h11.SERVER and self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.http.receive_data(bytes(await self.stream.receive_some(READ_BYTES)))

    async def send(self, event: h11.Event) -> None:
        self.begun = self.begun or isinstance(event, h11.Response)
        await self.stream.send_all(self.http.send(event) or b"")

    def asked_again(self) -> bool:
        """Make ready for another request, where question and answer were whole and both want to go on. Whether it is."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        self.begun = False
        return True


def container_side(stream: HalfCloseableStream) -> Side:
    return Side(stream, h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES))


async def hand_on(client: Side, world: HalfCloseableStream, request: h11.Request, moved: Moved) -> None:
    """A plain request to its server and the answer back, each written anew. What goes wrong before the answer is raised, and cuts it after."""
    server = Side(world, h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES))
    await server.send(request)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send_body, client, server, moved)
        await _answer(client, server, moved)
        nursery.cancel_scope.cancel()  # an answer that came before its question was whole: nobody reads the rest


async def _send_body(client: Side, server: Side, moved: Moved) -> None:
    """The request's body, as it comes. A server that does not want it may still answer, and a client that breaks off has left."""
    try:
        while True:
            event = await client.next()
            if isinstance(event, h11.Data):
                moved(len(event.data), 0)
                await server.send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await server.send(h11.EndOfMessage())
                return
            else:
                return
    except (*GONE, h11.RemoteProtocolError, h11.LocalProtocolError):
        return


async def _answer(client: Side, server: Side, moved: Moved) -> None:
    while True:
        event = await server.next()
        if isinstance(event, h11.Response):
            answer = h11.Response(status_code=event.status_code, reason=event.reason, headers=list(end_to_end(event)))
            await client.send(answer)
        elif isinstance(event, h11.Data):
            moved(0, len(event.data))
            await client.send(h11.Data(data=event.data))
        elif isinstance(event, h11.EndOfMessage):
            await client.send(h11.EndOfMessage())
            return
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("the server closed the connection without an answer")


async def tunnel(client: Side, world: HalfCloseableStream, moved: Moved) -> None:
    """Bytes both ways until both have ended."""
    await client.next()  # the end of a request without a body
    await client.send(h11.Response(status_code=200, reason=b"Connection established", headers=[]))
    early = client.http.trailing_data[0]
    if early:
        moved(len(early), 0)
        await world.send_all(early)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_pour, client.stream, world, lambda count: moved(count, 0), nursery.cancel_scope)
        nursery.start_soon(_pour, world, client.stream, lambda count: moved(0, count), nursery.cancel_scope)


async def _pour(source: HalfCloseableStream, target: HalfCloseableStream, moved: Callable[[int], None], both: trio.CancelScope) -> None:
    """One way to its end, which the other way may outlive. A connection that breaks ends both."""
    try:
        while data := await source.receive_some(READ_BYTES):
            moved(len(data))
            await target.send_all(data)
        await target.send_eof()
    except GONE:
        both.cancel()
