"""How an engine's budget of tokens corrects itself: from what was read again, and from how many calls were
late.

Pure. If tokens are read again although nobody decided so, the estimate was too low, and the budget shrinks.
Late calls, and many tokens that are read again, mean that sessions began too early, and the margin shrinks.
While both are rare and sessions wait, it grows. It moves slowly: in one half-hour of a dozen sessions chance
does more than the margin, and a margin that followed chance would swing.
"""

from typing import Final

from attrs import define, field

START: Final = 0.75  # part of the budget that all may be expected to need for a session to begin, at first
# Bounds of that part. The last applies where places are lent, whose sessions are away and count in part. With
# 0.9 twice as many calls are late, because the large sessions come together now and then.
MIN_MARGIN, MAX_MARGIN, MAX_LENT_MARGIN = 0.5, 0.85, 1.2
MARGIN_FALL: Final = 0.9  # part of the margin that is left after one time of too many sessions
SHRINK, SCALE_GROW = 0.93, 1.01  # factors of the scale, at a look
STEP: Final = 0.002  # change of the margin, at a look: 24 % an hour
MAX_STEPS_DOWN: Final = 9.0  # steps at once, down: if one look in ten is bad, the margin stays
ENOUGH: Final = 16  # Sessions that ended before the margin moves. Until then it is sizes that are wrong.
MIN_SCALE: Final = 0.3  # estimates are wrong by less than that; beyond it something else is wrong
HIGH_REREAD_SHARE, LOW_REREAD_SHARE = (
    0.03,
    0.01,
)  # shares of all prompt tokens that are read again without a decision
LATE_S: Final = 5.0  # Seconds of waiting, for its place or in the engine, after which a call counts as late.
# Shares of all calls that may be late, and that may be held for the longest time. 99 of 100 calls are to be
# spared that.
MAX_LATE_SHARE, TOO_LONG = 0.006, 0.006
# Share of all prompt tokens that may be read again, and the same while places are lent. More costs more than
# it gains.
AGAIN, MAX_LENT_REREAD_SHARE = 0.016, 0.045
# Share of all prompt tokens that displaced sessions may read again instead of being held, and the same while
# places are lent.
ALLOWED, LENT_ALLOWANCE_SHARE = 0.012, 0.035
# Share of all tokens that belongs to sessions that are away. Above the first value their places are lent,
# below the second they are not.
LEND_ABOVE_SHARE, KEEP_BELOW_SHARE = 0.18, 0.12
LEARNED: Final = 0.1  # weight of a look in a mean of the last five minutes
# Weight of a look in a mean of the last two minutes: one session's read is 4 % of a look's tokens.
FAST_MEAN_WEIGHT: Final = 0.2
LONG_READ_TOKENS: Final = 1024  # tokens; shorter reads measure overheads
SPEED_MEAN_WEIGHT: Final = 0.05  # weight of one long read in the engine's speed


@define(eq=False)
class PromptTokens:
    """Tokens of prompts, and those of them that were read again, by whether the node decided so."""

    prompt: int = 0
    planned: int = 0
    unplanned: int = 0


@define(eq=False)
class RereadAllowance:
    """Tokens that may be read again by decision. A share of prompt tokens is put in. A return that makes the
    engine evict takes out what is expected, and its read settles the difference. The balance is at most
    `most` tokens, and may be as many below 0.
    """

    tokens: float = 0.0

    def earn(self, prompt: int, *, lends: bool, most: float) -> None:
        """A prompt of so many tokens was asked for."""
        self.tokens = min(most, self.tokens + (LENT_ALLOWANCE_SHARE if lends else ALLOWED) * prompt)

    def spend(self, tokens: int) -> bool:
        """Take so many tokens, if there are that many."""
        if self.tokens < tokens:
            return False
        self.tokens -= tokens
        return True

    def settle(self, charged: int, again: int, *, most: float) -> None:
        """`again` tokens were read again, for which `charged` had been taken."""
        self.tokens = max(-most, self.tokens + charged - again)


@define(eq=False)
class BudgetFeedback:
    """`scale` is the part of the capacity that is the budget. `margin` is the part of the budget that may be
    expected for a session to begin, as it was learned; while no places are lent, less is `allowed`. `lends`
    says whether places of sessions that are away are lent. `ended` counts all sessions that ever ended.
    `calls`, `late`, `expired`, `waited` and `least` are since the last look.
    """

    scale: float = 1.0
    margin: float = START
    lends: bool = False
    totals: PromptTokens = field(factory=PromptTokens)
    looked: float = 0.0
    calls: int = 0
    ended: int = 0
    late: int = 0  # calls that waited for LATE_S
    expired: int = 0  # calls that were held to the bound
    waited: bool = False  # a session was refused a start
    # The least part of the budget that was expected when a session asked to begin; 0 where none asked.
    least: float = 0.0
    _open: float = START  # the margin when it last was what kept sessions from beginning
    _recent_tokens: PromptTokens = field(factory=PromptTokens, init=False)  # since the last look
    # Share of prompt tokens that were read again without a decision.
    _unplanned_share: float = field(default=0.0, init=False)
    _away_share: float = field(default=0.0, init=False)  # share of tokens whose sessions are away
    _tokens_read: float = field(default=0.0, init=False)
    _seconds_read: float = field(default=0.0, init=False)

    @property
    def allowed(self) -> float:
        """The part of the budget that may be expected now for a session to begin."""
        return min(self.margin, MAX_LENT_MARGIN if self.lends else MAX_MARGIN)

    def recall(self, margin: float) -> None:
        """Begin with the margin that was learned before."""
        self.margin = min(MAX_LENT_MARGIN, max(MIN_MARGIN, margin))

    def read(self, prompt: int, computed: int, seconds: float) -> None:
        """The engine read a prompt. It computed `computed` tokens of it, and the others were in its cache."""
        self.totals.prompt += prompt
        self._recent_tokens.prompt += prompt
        if computed >= LONG_READ_TOKENS:
            self._tokens_read += computed - SPEED_MEAN_WEIGHT * self._tokens_read
            self._seconds_read += seconds - SPEED_MEAN_WEIGHT * self._seconds_read

    def asked(self, part: float, *, fits: bool) -> None:
        """A session asked to begin when so large a part of the budget was expected."""
        self.waited = self.waited or not fits
        self.least = min(self.least, part) if self.least else part

    def note_wait(self, seconds: float) -> None:
        """A call of a session that goes on waited so long for its place, or in the engine."""
        self.late += seconds > LATE_S

    def note_reread(self, tokens: int, *, planned: bool, cold: bool = False) -> None:
        """So many tokens of a prompt had been in the cache before. If `cold`, no size of the cache would have
        kept them, so nothing is to be corrected.
        """
        for each in (self.totals,) if cold else (self.totals, self._recent_tokens):
            each.planned += tokens if planned else 0
            each.unplanned += 0 if planned else tokens

    def seconds_to_read(self, tokens: int) -> float | None:
        """How long the engine takes to read so many tokens. None while that is unknown."""
        return tokens * self._seconds_read / self._tokens_read if self._tokens_read else None

    def look(self, now: float, *, away: float | None) -> None:
        """Correct the budget and the margin. `away` is the share of tokens whose sessions are away, or None
        if there are no tokens.
        """
        if away is not None:
            self._away_share += LEARNED * (away - self._away_share)
            self.lends = self._away_share > (KEEP_BELOW_SHARE if self.lends else LEND_ABOVE_SHARE)
        if self._recent_tokens.prompt:
            self._correct()
        self.looked, self._recent_tokens = now, PromptTokens()
        self.calls, self.late, self.expired, self.waited, self.least = 0, 0, 0, False, 0.0

    def _correct(self) -> None:
        unplanned = self._recent_tokens.unplanned / self._recent_tokens.prompt
        again = unplanned + self._recent_tokens.planned / self._recent_tokens.prompt
        self._unplanned_share += FAST_MEAN_WEIGHT * (unplanned - self._unplanned_share)
        if self._unplanned_share > HIGH_REREAD_SHARE:
            self.scale = max(MIN_SCALE, self.scale * SHRINK)
        elif self._unplanned_share < LOW_REREAD_SHARE:
            self.scale = min(1.0, self.scale * SCALE_GROW)
        if self.ended >= ENOUGH:
            self._move(again)

    def _move(self, again: float) -> None:
        """Move the margin by a step, which is larger the further the figures are from what is wanted. Only
        this look counts, because a mean of several goes on after what caused it. While more is expected than
        fits, no margin lets a session begin, and late calls were caused before: then the margin falls by a
        tenth, and no further until those sessions are gone.
        """
        calls = max(1, self.calls)
        loans = max(again / MAX_LENT_REREAD_SHARE, self.expired / calls / TOO_LONG)
        cost = loans if self.lends else max(self.late / calls / MAX_LATE_SHARE, again / AGAIN)
        step = STEP * max(-MAX_STEPS_DOWN, 1.0 - cost)
        most = MAX_LENT_MARGIN if self.lends else MAX_MARGIN
        if self.least <= max(1.0, most):
            self._open = self.allowed
        if step < 0:
            self.margin = max(MIN_MARGIN, MARGIN_FALL * self._open, self.allowed * (1.0 + step))
        elif self.waited and self.margin < most:
            self.margin = min(most, self.margin * (1.0 + step))
