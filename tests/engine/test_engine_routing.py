"""Which host serves a call, and whether a dead one is started again: tables of what was seen and what was
chosen.
"""

from polarnode.engine.routing import (
    HOME_SLACK_CALLS,
    MAX_DEATHS,
    REMEMBERED,
    RESTART_PAUSES,
    WINDOW,
    HostDeaths,
    Router,
)


def test_new_session_goes_to_idlest_host() -> None:
    router = Router()
    assert router.choose("a", {0: 3, 1: 1, 2: 2}) == 1
    assert router.choose("b", {0: 0, 1: 0}) == 0  # a tie: the first, so that it can be told beforehand


def test_session_stays_despite_idle_hosts() -> None:
    router = Router()
    assert router.choose("a", {0: 0, 1: 5}) == 0
    assert router.choose("a", {0: HOME_SLACK_CALLS, 1: 0}) == 0


def test_overloaded_host_loses_session() -> None:
    router = Router()
    router.choose("a", {0: 0, 1: 5})
    assert router.choose("a", {0: HOME_SLACK_CALLS + 1, 1: 0}) == 1
    assert router.choose("a", {0: 0, 1: 3}) == 1


def test_session_leaves_unready_host() -> None:
    router = Router()
    router.choose("a", {0: 0, 1: 5})
    assert router.choose("a", {1: 40}) == 1


def test_sessionless_calls_follow_load() -> None:
    router = Router()
    assert [router.choose("", {0: 0, 1: 1}), router.choose("", {0: 2, 1: 1})] == [0, 1]


def test_old_idle_sessions_are_forgotten() -> None:
    """Old sessions are forgotten, and the busy ones are kept."""
    router = Router()
    router.choose("old", {0: 0, 1: 9})
    router.choose("kept", {0: 0, 1: 9})
    for number in range(REMEMBERED - 1):
        router.choose("kept", {0: 0, 1: 0})
        router.choose(str(number), {0: 9, 1: 0})
    assert router.choose("kept", {0: 1, 1: 0}) == 0
    assert router.choose("old", {0: 1, 1: 0}) == 1


def test_restart_delays_grow_after_first() -> None:
    deaths = HostDeaths()
    assert [deaths.note(float(second)) for second in range(MAX_DEATHS)] == [
        0.0,
        RESTART_PAUSES.first_s,
        2 * RESTART_PAUSES.first_s,
        4 * RESTART_PAUSES.first_s,
        None,
    ]


def test_deaths_long_ago_do_not_count() -> None:
    deaths = HostDeaths()
    for number in range(3 * MAX_DEATHS):
        assert deaths.note(number * (WINDOW + 1)) == 0.0
