"""One engine's cache in virtual time: what is found again, what is evicted, and laws for any load."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.engine.kv_model import KvConstants, KvEvent, KvModel

PAGE = 16


def pages(*parts: tuple[str, int]) -> list[tuple[str, int]]:
    """Keys of the pages of these segments, each a name and its tokens; a page is of where it stands."""
    keys: list[tuple[str, int]] = []
    for name, tokens in parts:
        keys += [(name, len(keys) + number) for number in range(tokens // PAGE)]
    return keys


def model(capacity: int) -> KvModel:
    return KvModel(KvConstants(capacity=capacity, page=PAGE))


def played(found: KvModel) -> list[KvEvent]:
    """What happens until nothing is left to do; the clock stands there then."""
    events: list[KvEvent] = []
    while (due := found.next_time()) is not None:
        events += found.advance(due)
    return events


def cached(found: KvModel, name: str, keys: Sequence[tuple[str, int]], *, sample: int = PAGE) -> int:
    """Run one request alone, after all before it. Gives the tokens that the cache had."""
    tail = [(name, len(keys) + number) for number in range(sample // PAGE)]
    found.submit(name, keys, prompt=len(keys) * PAGE, sample=sample, max_new=sample, tail=tail, now=0.0)
    events = played(found)
    assert [event.kind for event in events] == ["began", "ended"]
    assert events[0].at < events[1].at
    return events[0].cached


def test_prefix_hit_rereads_last_token() -> None:
    found = model(10_000)
    assert cached(found, "a", pages(("system", 320), ("a", 160))) == 0
    assert cached(found, "b", pages(("system", 320), ("b", 160))) == 320
    assert cached(found, "a", pages(("system", 320), ("a", 160))) == 464
    assert found.used == 320 + 2 * 160 + 2 * PAGE


def test_least_recently_used_is_evicted() -> None:
    """What was used longest ago is evicted, and what was forgotten before it."""
    found = model(1_000)
    for name in "abc":
        assert cached(found, name, pages((name, 304))) == 0
    assert cached(found, "a", pages(("a", 304))) == 288
    assert cached(found, "d", pages(("d", 304))) == 0  # b has to go
    assert cached(found, "a", pages(("a", 304))) == 288
    found.forget([*pages(("a", 304)), ("a", 19)])
    assert cached(found, "e", pages(("e", 304))) == 0  # a is younger than c
    assert cached(found, "c", pages(("c", 304))) == 288
    assert cached(found, "a", pages(("a", 304))) == 0


def test_shared_prefix_outlives_forgotten_session() -> None:
    found = model(1_000)
    for name in "ab":
        assert cached(found, name, pages(("system", 304), (name, 160))) == (304 if name == "b" else 0)
    found.forget([*pages(("system", 304), ("b", 160)), ("b", 29)])
    assert cached(found, "c", pages(("c", 400))) == 0
    assert found.used == 304 + 160 + PAGE + 400 + PAGE, "only what was b's alone had to go"
    assert cached(found, "a", pages(("system", 304), ("a", 160))) == 448


def test_found_prefixes_are_held_from_eviction() -> None:
    """Three sessions that come back at once: the first one's room must not come of what the others found."""
    found = model(1_150)
    for name in "abc":
        cached(found, name, pages((name, 240)))
    cached(found, "young", pages(("young", 304)))
    for name in "abc":
        keys = pages((name, 240), (f"{name}2", 96))
        found.submit(name, keys, prompt=336, sample=PAGE, max_new=PAGE, now=0.0)
    began = {event.request: event.cached for event in played(found) if event.kind == "began"}
    assert began == {"a": 240, "b": 240, "c": 240}


def test_split_prefix_rest_becomes_young() -> None:
    """SGLang's own oddity: who asks for half of an old prefix makes all of it young."""
    found = model(1_000)
    for name in "abc":
        cached(found, name, pages((name, 304)))
    assert cached(found, "x", pages(("a", 160)), sample=PAGE) == 144
    assert cached(found, "d", pages(("d", 304))) == 0
    assert cached(found, "a", pages(("a", 304))) == 288


def test_flush_keeps_what_is_read() -> None:
    found = model(10_000)
    cached(found, "a", pages(("a", 304)))
    found.submit("b", pages(("b", 304)), prompt=304, sample=400, max_new=400, now=0.0)
    while not found.sampled("b"):
        due = found.next_time()
        assert due is not None
        found.advance(due)
    found.flush()
    assert found.used == 304 + found.sampled("b") - 1
    assert found.sampled("a") == 0


def test_waiting_request_finds_read_chunks() -> None:
    """A long prompt is read in chunks, and whoever enters meanwhile finds those that were read."""
    found = KvModel(KvConstants(capacity=10_000, page=PAGE, chunk=512))
    for name in "ab":
        keys = pages(("task", 1600), (name, 160))
        found.submit(name, keys, prompt=1760, sample=PAGE, max_new=PAGE, now=0.0)
    began = {event.request: event.cached for event in played(found) if event.kind == "began"}
    assert began == {"a": 0, "b": 1536}
    assert found.read_tokens == 1760 + 224


def test_refused_request_waits_for_departure() -> None:
    """However far the share that is kept free for those who run has fallen meanwhile."""
    found = model(2_000)
    for name, prompt in (("a", 800), ("b", 800)):
        found.submit(name, pages((name, prompt)), prompt=prompt, sample=600, max_new=1_000, now=0.0)
    order = [(event.request, event.kind) for event in played(found)]
    assert order == [("a", "began"), ("a", "ended"), ("b", "began"), ("b", "ended")]


def test_group_shares_prompt_once_read() -> None:
    """Members of a group find the prompt that another one has read."""
    found = model(100_000)
    for name in "ab":
        keys = pages(("task", 3200), (name, 160))
        found.submit(name, keys, prompt=3360, sample=400, max_new=400, now=0.0)
    events = played(found)
    assert {event.request: event.cached for event in events if event.kind == "began"} == {"a": 0, "b": 0}
    assert cached(found, "c", pages(("task", 3200), ("c", 160))) == 3200


def test_request_beyond_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 1000"):
        model(1_000).submit("a", [], prompt=990, sample=11, max_new=11, now=0.0)


def test_alternating_sessions_lose_their_prefixes() -> None:
    """The cliff of SGLang on a CPU: sessions of 1,000 tokens that grow by 220 a turn, in a cache of 6,000."""
    share = {}
    for sessions in (2, 5):
        found, known, again = model(6_000), 0, 0
        for turn in range(4):
            for number in range(sessions):
                again += cached(found, f"s{number}", pages((f"s{number}", 1_008 + 224 * turn)), sample=PAGE)
                known += (1_008 + 224 * (turn - 1)) if turn else 0
        share[sessions] = again / known
    assert share[2] > 0.95
    assert share[5] < 0.5


requests = st.lists(
    st.tuples(
        st.integers(0, 5),  # which prefix
        st.integers(1, 30),  # pages of the prompt
        st.integers(1, 200),  # sampled tokens
        st.floats(0, 3),  # seconds since the one before
        st.booleans(),  # given up
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(1_000, 4_000))
def test_requests_begin_once_without_overflow(
    load: list[tuple[int, int, int, float, bool]], capacity: int
) -> None:
    """Every request begins once and ends and the cache never overflows."""
    found, now = model(capacity), 0.0
    ended: set[str] = set()
    began: set[str] = set()
    given_up: set[str] = set()

    def look(until: float) -> None:
        last = 0.0
        for event in found.advance(until):
            assert last <= event.at <= until
            last = event.at
            (began if event.kind == "began" else ended).add(event.request)
        assert 0 <= found.evictable <= found.used <= capacity

    for number, (prefix, count, sample, wait, leaves) in enumerate(load):
        now += wait
        look(now)
        name, keys = f"r{number}", pages((f"p{prefix}", count * PAGE))
        found.submit(name, keys, prompt=count * PAGE, sample=sample, max_new=sample, now=now)
        if leaves:
            look(now + 0.01)
            found.abort(name)
            given_up.add(name)
    look(1e9)
    names = {f"r{number}" for number in range(len(load))}
    assert names - given_up <= ended
    assert ended <= began
    assert (found.waiting, found.running) == (0, 0)
    assert found.used == found.evictable, "nobody reads any more"
    assert found.next_time() is None
