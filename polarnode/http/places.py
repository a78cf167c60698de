"""The places of a socket, and the tries of an address.

A socket has a fixed number of places. When all are taken, a new connection takes the place of the oldest one
that has not shown the token or key (of the peer with the most of them), else of the one that is idle
longest; a request of somebody who was let in is never ended for another. So neither silent connections nor
slow ones keep out who has the token. One key has a share of the places, and an address that shows wrong keys
has few tries.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, cast

import trio
from attrs import define, field
from hypercorn.typing import HTTPScope

from polarnode.support.bounded import remember

# of a socket's places, what streams may take: the others remain for short requests
STREAMING: Final = 0.75
# connections of one key: an agent that samples 128 answers at once fills a GPU by itself, and four such
# agents the socket of captures
KEY_CONNECTIONS: Final = 128
# tries of one address without a key that is right, at once: 64 agents behind it open four connections each
# before the first of them has shown its key
TRIES: Final = 256
# and then so many a second: a handshake takes some 1.5 ms of the loop, so an address takes 3 % of it
TRIES_PER_S: Final = 20.0
ADDRESSES: Final = 4096  # remembered, 200 bytes each; who has so many has a new one for every try
PLACE: Final = "polarnode.place"  # the key of a connection's `Place` in a request's scope["state"]


@define(eq=False)
class Tries:
    """What each address may still try without a key that is right: a bucket of TRIES tokens that wins
    TRIES_PER_S of them back. Nobody's word about another address (`X-Forwarded-For`) counts here.
    """

    _left: dict[str, tuple[float, float]] = field(factory=dict, init=False)  # tokens at a time, by address

    def take(self, peer: str, now: float) -> bool:
        """Take one try. False when none is left."""
        left, since = self._left.get(peer, (float(TRIES), now))
        left = min(float(TRIES), left + TRIES_PER_S * (now - since))
        remember(self._left, peer, (left - 1.0 if left >= 1.0 else left, now), most=ADDRESSES)
        return left >= 1.0

    def give_back(self, peer: str) -> None:
        """Return a try that came to a right key."""
        if peer in self._left:
            left, since = self._left[peer]
            self._left[peer] = (left + 1.0, since)


@define(eq=False)
class Place:
    """A connection's place on its socket. `close` closes the connection; `since` is when it was accepted, or
    when its last request ended. `admitted`: a request on it had the token, or the key. `owner`: whose key the
    last one had, on a socket of several. `tried`: it took one of its address's tries.
    """

    places: "Places"
    peer: str
    close: Callable[[], None]
    since: float
    admitted: bool = False
    busy: bool = False
    streaming: bool = False
    owner: str = ""
    tried: bool = False

    def admit(self, owner: str = "") -> bool:
        """Record that a request on it had the token, or the key of `owner`. False when `owner` has as many
        connections as one may.
        """
        if owner != self.owner and self.places.of(owner) >= KEY_CONNECTIONS:
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
        """A response has ended."""
        self.busy, self.streaming, self.since = False, False, now


@define(eq=False)
class Places:
    """The places of one socket, at most `limit`."""

    limit: int
    tries: Tries = field(factory=Tries, init=False)
    _taken: dict[Place, None] = field(factory=dict, init=False)  # oldest connection first

    def take(self, peer: str, close: Callable[[], None], now: float) -> tuple[Place | None, Place | None]:
        """A place for a new connection, and the one that was closed for it. No place when a request of
        somebody who was let in is running on every one.
        """
        closed = self._least() if len(self._taken) >= self.limit else None
        if closed is not None:
            self.leave(closed)
            closed.close()
        elif len(self._taken) >= self.limit:
            return None, None
        place = Place(places=self, peer=peer, close=close, since=now)
        self._taken[place] = None
        return place, closed

    def leave(self, place: Place) -> None:
        """Give a place back. Harmless when it was."""
        self._taken.pop(place, None)

    def of(self, owner: str) -> int:
        """How many connections `owner` has."""
        return sum(place.owner == owner for place in self._taken)

    def has_room_for_stream(self) -> bool:
        return sum(place.streaming for place in self._taken) < self.limit * STREAMING

    def _least(self) -> Place | None:
        strangers = [place for place in self._taken if not place.admitted]
        if strangers:
            peer, _ = Counter(place.peer for place in strangers).most_common(1)[0]
            return next(place for place in strangers if place.peer == peer)
        idle = (place for place in self._taken if not place.busy)
        return min(idle, key=lambda place: place.since, default=None)


def place_of(scope: HTTPScope) -> Place | None:
    """The place of a request's connection; None under a server other than `open_server`'s."""
    return cast("dict[str, Place]", scope.get("state") or {}).get(PLACE)


def admit(scope: HTTPScope) -> None:
    """Record that the request had what its app asks for: the token, a key, or nothing."""
    place = place_of(scope)
    if place is not None:
        place.admit()
