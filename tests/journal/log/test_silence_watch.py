"""Silence is judged by the watcher's own clock, and never over its own pauses."""

from polarnode.journal.log.watching import SIGN_LEASE_S, SilenceWatch


def _watch(watch: SilenceWatch, reads: list[tuple[float, dict[int, int]]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for at, signs in reads:
        found = list(watch.find_silent(signs, asked=at, now=at + 0.01))
    return found


def test_unchanged_sign_expires_after_lease() -> None:
    watch = SilenceWatch()
    reads = [(float(second), {1: 7, 2: second}) for second in range(6)]
    assert _watch(watch, reads[:5]) == []
    assert _watch(watch, reads[5:]) == [(1, 7)]


def test_new_sign_restarts_the_lease() -> None:
    watch = SilenceWatch()
    assert _watch(watch, [(float(second), {1: second // 4}) for second in range(60)]) == []


def test_paused_watcher_expires_nobody() -> None:
    """A watcher that was stopped for ten seconds has seen nobody in between: it expires nobody."""
    watch = SilenceWatch()
    _watch(watch, [(0.0, {1: 7}), (1.0, {1: 7})])
    assert _watch(watch, [(11.0, {1: 7})]) == []
    assert _watch(watch, [(float(second), {1: 7}) for second in (12, 13, 14, 15)]) == []
    assert _watch(watch, [(16.0, {1: 7})]) == [(1, 7)]


def test_slow_answer_is_no_silence() -> None:
    """An answer that took long says how things stood when it was asked for."""
    watch = SilenceWatch()
    watch.find_silent({1: 7}, asked=0.0, now=0.0)
    watch.find_silent({1: 7}, asked=0.1, now=2.4)
    assert watch.find_silent({1: 7}, asked=2.5, now=SIGN_LEASE_S + 0.5) == ()


def test_departed_incarnation_is_forgotten() -> None:
    watch = SilenceWatch()
    assert _watch(watch, [(float(second), {1: 7} if second < 3 else {}) for second in range(9)]) == []
