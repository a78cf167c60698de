"""A request is read in place only where what it takes is known to be little."""

from random import Random

from polarnode.gateway.earlier_requests import (
    MAX_HISTORIES,
    MAX_NEW_BYTES,
    MAX_READ_S,
    STEP_BYTES,
    BodyDigest,
    KnownHistories,
)

TEXT = Random(1).randbytes(12 * STEP_BYTES)


def digest(body: bytes) -> BodyDigest:
    return BodyDigest.of(body, "generate")


def test_operations_share_no_digests() -> None:
    assert not set(digest(TEXT).steps) & set(BodyDigest.of(TEXT, "compact").steps)


def test_only_short_new_body_in_place() -> None:
    """A short body is read in place, and a long new one is not."""
    histories = KnownHistories()
    assert histories.is_short(digest(TEXT[:MAX_NEW_BYTES]))
    assert not histories.is_short(digest(TEXT[: MAX_NEW_BYTES + 1]))


def test_grown_history_is_read_in_place() -> None:
    """A history that grew is read in place up to its new part."""
    histories, size = KnownHistories(), 5 * STEP_BYTES
    histories.note(digest(TEXT[: size + 10] + b"]}"), MAX_READ_S)
    assert histories.is_short(digest(TEXT[: size + MAX_NEW_BYTES]))
    assert not histories.is_short(digest(TEXT[: size + MAX_NEW_BYTES + 1]))
    # a change at its beginning makes all of it new, one in its middle what follows
    assert not histories.is_short(digest(b"x" + TEXT[1:size]))
    middle = TEXT[: 3 * STEP_BYTES] + b"x" + TEXT[3 * STEP_BYTES + 1 :]
    assert histories.is_short(digest(middle[: 3 * STEP_BYTES + MAX_NEW_BYTES]))
    assert not histories.is_short(digest(middle[: 3 * STEP_BYTES + MAX_NEW_BYTES + 1]))


def test_slow_history_leaves_the_loop() -> None:
    """A history that took long to read is not read in place again."""
    histories, body = KnownHistories(), TEXT[: MAX_NEW_BYTES + STEP_BYTES]
    histories.note(digest(body), MAX_READ_S * 1.01)
    assert not histories.is_short(digest(body))
    histories.note(digest(body), MAX_READ_S / 2)
    assert histories.is_short(digest(body))


def test_agents_known_apart_oldest_forgotten() -> None:
    """The agents of a session are known apart, and the oldest is forgotten."""
    histories, bodies = (
        KnownHistories(),
        [bytes([number]) + TEXT[:MAX_NEW_BYTES] for number in range(MAX_HISTORIES)],
    )
    for body in bodies:
        histories.note(digest(body), 0.0)
    assert all(histories.is_short(digest(body)) for body in bodies)
    histories.note(digest(b"\xff" + TEXT[:MAX_NEW_BYTES]), 0.0)
    assert [histories.is_short(digest(body)) for body in bodies] == [False] + [True] * (MAX_HISTORIES - 1)
