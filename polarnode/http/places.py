"""The places of a socket's connections, and how often an address may try a key.

A socket has a fixed number of places. When all are taken, a new connection replaces the oldest one that has
not shown the token or a key; if several peers have such connections, the peer with the most loses one. If
every connection has shown a token or key, the one that has been idle longest is replaced. A running request
of an admitted client is never ended for another. So neither silent nor slow connections can lock out a client
that has the token. One key gets a share of the places, and an address that shows wrong keys gets few tries.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, cast

import trio
from attrs import define, field
from hypercorn.typing import HTTPScope

from polarnode.support.bounded import remember

# Streams may take this share of a socket's places. The other places remain for short requests.
MAX_STREAM_SHARE: Final = 0.75
# The connections of one key. An agent that samples 128 answers at once fills a GPU by itself, and four such
# agents fill the socket of captures.
MAX_KEY_CONNECTIONS: Final = 128
# An address may make this many tries at once without a right key: 64 agents behind one address open four
# connections each before the first of them has shown its key.
TRIES: Final = 256
# After that an address may make this many tries a second. A handshake takes some 1.5 ms of the event loop, so
# one address takes 3 % of it.
TRIES_PER_S: Final = 20.0
# This many addresses are remembered, at 200 bytes each. An attacker with more uses a new one for every try.
MAX_ADDRESSES: Final = 4096
SLOT_KEY: Final = "polarnode.place"  # the key of a connection's `Place` in a request's scope["state"]


@define(eq=False)
class AddressTries:
    """Limits how often each address may try without a right key: a bucket of TRIES tokens that regains
    TRIES_PER_S of them every second. A header that names another address (`X-Forwarded-For`) is ignored.
    """

    # by address: the tokens that were left, and when that was
    _left: dict[str, tuple[float, float]] = field(factory=dict, init=False)

    def take(self, peer: str, now: float) -> bool:
        """Take one try. False when none is left."""
        left, since = self._left.get(peer, (float(TRIES), now))
        left = min(float(TRIES), left + TRIES_PER_S * (now - since))
        remember(self._left, peer, (left - 1.0 if left >= 1.0 else left, now), most=MAX_ADDRESSES)
        return left >= 1.0

    def give_back(self, peer: str) -> None:
        """Return the try of a connection that has shown a right key."""
        if peer in self._left:
            left, since = self._left[peer]
            self._left[peer] = (left + 1.0, since)


@define(eq=False)
class Place:
    """A connection's place on its socket. `close` closes the connection; `since` is when it was accepted, or
    when its last request ended. `admitted`: a request on it had the token, or a key. `owner`: the owner of
    the key that the last request had, on a socket with several keys. `tried`: it took one of its address's
    tries.
    """

    places: "ConnectionSlots"
    peer: str
    close: Callable[[], None]
    since: float
    admitted: bool = False
    busy: bool = False
    streaming: bool = False
    owner: str = ""
    tried: bool = False

    def admit(self, owner: str = "") -> bool:
        """Record that a request on this connection had the token, or the key of `owner`. Return False when
        `owner` already has as many connections as one owner may.
        """
        if owner != self.owner and self.places.of(owner) >= MAX_KEY_CONNECTIONS:
            return False
        if self.tried:
            self.places.tries.give_back(self.peer)
        self.admitted, self.owner, self.tried = True, owner, False
        return True

    def try_key(self) -> bool:
        """Count a wrong key. False when the connection's address has tried too many."""
        return self.places.tries.take(self.peer, trio.current_time())

    def open_stream(self) -> bool:
        """Count this connection's response as a stream until it ends. False when there is no room for one."""
        self.streaming = self.streaming or self.places.has_room_for_stream()
        return self.streaming

    def rest(self, now: float) -> None:
        """Record that a response has ended."""
        self.busy, self.streaming, self.since = False, False, now


@define(eq=False)
class ConnectionSlots:
    """The places of one socket, at most `limit`."""

    limit: int
    tries: AddressTries = field(factory=AddressTries, init=False)
    _taken: dict[Place, None] = field(factory=dict, init=False)  # oldest connection first

    def take(self, peer: str, close: Callable[[], None], now: float) -> tuple[Place | None, Place | None]:
        """Return a place for a new connection, and the place whose connection was closed for it, if any. No
        place is returned when every connection runs a request of an admitted client.
        """
        closed = self._slot_to_close() if len(self._taken) >= self.limit else None
        if closed is not None:
            self.leave(closed)
            closed.close()
        elif len(self._taken) >= self.limit:
            return None, None
        place = Place(places=self, peer=peer, close=close, since=now)
        self._taken[place] = None
        return place, closed

    def leave(self, place: Place) -> None:
        """Give a place back. Nothing happens if that was done before."""
        self._taken.pop(place, None)

    def of(self, owner: str) -> int:
        """How many connections `owner` has."""
        return sum(place.owner == owner for place in self._taken)

    def has_room_for_stream(self) -> bool:
        return sum(place.streaming for place in self._taken) < self.limit * MAX_STREAM_SHARE

    def _slot_to_close(self) -> Place | None:
        strangers = [place for place in self._taken if not place.admitted]
        if strangers:
            peer, _ = Counter(place.peer for place in strangers).most_common(1)[0]
            return next(place for place in strangers if place.peer == peer)
        idle = (place for place in self._taken if not place.busy)
        return min(idle, key=lambda place: place.since, default=None)


def slot_of(scope: HTTPScope) -> Place | None:
    """The place of a request's connection; None under a server other than `open_server`'s."""
    return cast("dict[str, Place]", scope.get("state") or {}).get(SLOT_KEY)


def admit(scope: HTTPScope) -> None:
    """Record that the request had what its app asks for: the token, a key, or nothing."""
    place = slot_of(scope)
    if place is not None:
        place.admit()
