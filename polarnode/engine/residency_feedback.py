"""How an engine's budget of tokens corrects itself: from what was read again, and from how many calls were
late.

Pure. Tokens that were read again although nobody decided so are an estimate that is too low: the budget
shrinks. Late calls, and much that is read again, are sessions that began too early: the margin shrinks; while
both are rare and sessions wait, it grows. It moves slowly: in one half-hour of a dozen sessions chance does
more than the margin, and one that followed it would swing.
"""

from typing import Final

from attrs import define, field

START: Final = 0.75  # of the budget: what may be expected of all at first, for a session to begin
# What that part may become; the last where places are lent, whose sessions are away and count in part. With
# 0.9 twice as many calls are late: the large sessions come together now and then.
LEAST_MARGIN, MOST_MARGIN, MOST_LENT = 0.5, 0.85, 1.2
FALL: Final = 0.9  # of the margin, what is left of it after one time of too many sessions
SHRINK, GROW = 0.93, 1.01  # of the scale, at a look
STEP: Final = 0.002  # of the margin, at a look: 24 % an hour
FASTER: Final = 9.0  # steps at once, down: where one look in ten is bad, the margin stays
ENOUGH: Final = 16  # sessions that ended before the margin moves: until then it is sizes that are wrong
LEAST_SCALE: Final = 0.3  # estimates are wrong by less; beyond it something else is
TOO_MUCH, LITTLE = 0.03, 0.01  # of all prompt tokens, read again without a decision
LATE_S: Final = 5.0  # of waiting, for its place or in the engine: a call that waited so long is late
# of all calls, late, and held for as long as one may be: 99 of 100 are to be spared that
OFTEN, TOO_LONG = 0.006, 0.006
# of all prompt tokens, read again, and so while places are lent: more costs more than it gains
AGAIN, LOANS = 0.016, 0.045
# of all prompt tokens, what displaced sessions may read again instead of being held; while places are lent
ALLOWED, ALLOWED_LENT = 0.012, 0.035
# of all tokens, those of sessions that are away: above the first their places are lent, below the second not
LEND, KEEP = 0.18, 0.12
LEARNED: Final = 0.1  # weight of a look in a mean: that of the last five minutes
SOON: Final = 0.2  # … of the last two minutes: one session's read is 4 % of a look's tokens
LONG_READ: Final = 1024  # tokens: shorter reads measure overheads
LEARNED_READ: Final = 0.05  # weight of one long read in the engine's speed


@define(eq=False)
class PromptTokens:
    """Of prompts, and of them those that were read again, by whether the node decided so."""

    prompt: int = 0
    planned: int = 0
    unplanned: int = 0


@define(eq=False)
class Allowance:
    """Tokens that may be read again by decision. A share of prompt tokens is put in, a return that makes the
    engine evict takes out what is expected, and its read settles it. At most `most` tokens, or as many short.
    """

    tokens: float = 0.0

    def earn(self, prompt: int, *, lends: bool, most: float) -> None:
        """So many tokens of a prompt were asked for."""
        self.tokens = min(most, self.tokens + (ALLOWED_LENT if lends else ALLOWED) * prompt)

    def spend(self, tokens: int) -> bool:
        """Take so many, where they are there."""
        if self.tokens < tokens:
            return False
        self.tokens -= tokens
        return True

    def settle(self, charged: int, again: int, *, most: float) -> None:
        """`again` tokens were read again, for which `charged` had been taken."""
        self.tokens = max(-most, self.tokens + charged - again)


@define(eq=False)
class Feedback:
    """`scale`: of the capacity, what the budget is. `margin`: of the budget, what may be expected for a
    session to begin, as it was learned; while no places are lent, less is `allowed`. `lends`: whether places
    of sessions that are away are lent. `ended`: sessions, ever. `calls`, `late`, `expired`, `waited` and
    `least` are since the last look.
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
    waited: bool = False  # somebody was refused a start
    least: float = 0.0  # of the budget, what was expected where that was the least; 0 where nobody asked
    _open: float = START  # the margin, when it last was what kept sessions from beginning
    _lately: PromptTokens = field(factory=PromptTokens, init=False)  # since the last look
    _unplanned: float = field(default=0.0, init=False)  # share of prompt tokens, read again by no decision
    _away: float = field(default=0.0, init=False)  # share of tokens whose sessions are away
    _tokens_read: float = field(default=0.0, init=False)
    _seconds_read: float = field(default=0.0, init=False)

    @property
    def allowed(self) -> float:
        """Of the budget, what may be expected now for a session to begin."""
        return min(self.margin, MOST_LENT if self.lends else MOST_MARGIN)

    def recall(self, margin: float) -> None:
        """Begin with the margin that was learned before."""
        self.margin = min(MOST_LENT, max(LEAST_MARGIN, margin))

    def read(self, prompt: int, computed: int, seconds: float) -> None:
        """The engine read a prompt: `computed` tokens of it, the others were in its cache."""
        self.totals.prompt += prompt
        self._lately.prompt += prompt
        if computed >= LONG_READ:
            self._tokens_read += computed - LEARNED_READ * self._tokens_read
            self._seconds_read += seconds - LEARNED_READ * self._seconds_read

    def asked(self, part: float, *, fits: bool) -> None:
        """Somebody asked to begin, where so much of the budget was expected."""
        self.waited = self.waited or not fits
        self.least = min(self.least, part) if self.least else part

    def waited_for(self, seconds: float) -> None:
        """A call of a session that goes on waited so long for its place, or in the engine."""
        self.late += seconds > LATE_S

    def read_again(self, tokens: int, *, planned: bool, cold: bool = False) -> None:
        """So many tokens of a prompt had been in the cache before. `cold`: no size of the cache would have
        kept them, so nothing is to be corrected.
        """
        for each in (self.totals,) if cold else (self.totals, self._lately):
            each.planned += tokens if planned else 0
            each.unplanned += 0 if planned else tokens

    def seconds_to_read(self, tokens: int) -> float | None:
        """How long the engine takes to read so many tokens; None while that is unknown."""
        return tokens * self._seconds_read / self._tokens_read if self._tokens_read else None

    def look(self, now: float, *, away: float | None) -> None:
        """Correct the budget and the margin. `away`: the share of tokens whose sessions are away; None where
        there are none.
        """
        if away is not None:
            self._away += LEARNED * (away - self._away)
            self.lends = self._away > (KEEP if self.lends else LEND)
        if self._lately.prompt:
            self._correct()
        self.looked, self._lately = now, PromptTokens()
        self.calls, self.late, self.expired, self.waited, self.least = 0, 0, 0, False, 0.0

    def _correct(self) -> None:
        unplanned = self._lately.unplanned / self._lately.prompt
        again = unplanned + self._lately.planned / self._lately.prompt
        self._unplanned += SOON * (unplanned - self._unplanned)
        if self._unplanned > TOO_MUCH:
            self.scale = max(LEAST_SCALE, self.scale * SHRINK)
        elif self._unplanned < LITTLE:
            self.scale = min(1.0, self.scale * GROW)
        if self.ended >= ENOUGH:
            self._move(again)

    def _move(self, again: float) -> None:
        """The margin by a step: the further from what is wanted, the larger. Of this look alone: a mean of
        several goes on after what caused it. While more is expected than fits, no margin lets a session
        begin, and what is late was caused before: there it falls by a tenth, and not on until they are gone.
        """
        calls = max(1, self.calls)
        loans = max(again / LOANS, self.expired / calls / TOO_LONG)
        cost = loans if self.lends else max(self.late / calls / OFTEN, again / AGAIN)
        step = STEP * max(-FASTER, 1.0 - cost)
        most = MOST_LENT if self.lends else MOST_MARGIN
        if self.least <= max(1.0, most):
            self._open = self.allowed
        if step < 0:
            self.margin = max(LEAST_MARGIN, FALL * self._open, self.allowed * (1.0 + step))
        elif self.waited and self.margin < most:
            self.margin = min(most, self.margin * (1.0 + step))
