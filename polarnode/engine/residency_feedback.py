"""How an engine's budget of tokens corrects itself: from what was read again, and from how often calls were
held.

Pure. Tokens that were read again although nobody decided so are an estimate that is too low: the budget
shrinks. Calls that are held often are sessions that began too early: the margin shrinks; while both are rare
and sessions wait, it grows. Decided re-reads are no fault, so they count only for whether lending pays.
"""

from typing import Final

from attrs import define, field

START: Final = 0.8  # of the budget: what may be expected of all at first, for a session to begin
LEAST_MARGIN, MOST_MARGIN = 0.5, 1.2  # what that part may become
SHRINK, GROW = 0.93, 1.01  # of the scale, at a look
SPARE: Final = 0.985  # of the margin, at a look with calls held too often
LEAST_SCALE: Final = 0.3  # estimates are wrong by less; beyond it something else is
TOO_MUCH, LITTLE = 0.03, 0.01  # of all prompt tokens, read again without a decision
# of all calls, held, and held for as long as one may be: 99 of 100 are to be spared waits, the engine's own
# included
OFTEN, TOO_LONG = 0.007, 0.006
LOANS: Final = 0.045  # of all prompt tokens, read again while places are lent: more costs more than it gains
SELDOM: Final = 0.8  # of those: below it more sessions may begin
ROOM: Final = 0.85  # of the budget: with less at once since the last look more sessions could run
# of all tokens, those of sessions that are away: above the first their places are lent, below the second not
LEND, KEEP = 0.18, 0.12
LEARNED: Final = 0.1  # weight of a look in a mean: that of the last five minutes
LONG_READ: Final = 1024  # tokens: shorter reads measure overheads
LEARNED_READ: Final = 0.05  # weight of one long read in the engine's speed


@define(eq=False)
class PromptTokens:
    """Of prompts, and of them those that were read again, by whether the node decided so."""

    prompt: int = 0
    planned: int = 0
    unplanned: int = 0


@define(eq=False)
class Feedback:
    """`scale`: of the capacity, what the budget is. `margin`: of the budget, what may be expected for a
    session to begin. `lends`: whether places of sessions that are away are lent. `calls`, `holds`,
    `expired`, `peak` and `waited` are since the last look.
    """

    scale: float = 1.0
    margin: float = START
    lends: bool = False
    totals: PromptTokens = field(factory=PromptTokens)
    looked: float = 0.0
    calls: int = 0
    holds: int = 0
    expired: int = 0  # calls that were held to the bound
    peak: int = 0  # tokens at once
    waited: bool = False  # somebody was refused a start
    _lately: PromptTokens = field(factory=PromptTokens, init=False)  # since the last look
    _often: float = field(default=0.0, init=False)  # share of calls that were held
    _long: float = field(default=0.0, init=False)  # share of calls that were held to the bound
    _again: float = field(default=0.0, init=False)  # share of prompt tokens that was read again
    _away: float = field(default=0.0, init=False)  # share of tokens whose sessions are away
    _tokens_read: float = field(default=0.0, init=False)
    _seconds_read: float = field(default=0.0, init=False)

    def recall(self, margin: float) -> None:
        """Begin with the margin that was learned before."""
        self.margin = min(MOST_MARGIN, max(LEAST_MARGIN, margin))

    def read(self, prompt: int, computed: int, seconds: float) -> None:
        """The engine read a prompt: `computed` tokens of it, the others were in its cache."""
        self.totals.prompt += prompt
        self._lately.prompt += prompt
        if computed >= LONG_READ:
            self._tokens_read += computed - LEARNED_READ * self._tokens_read
            self._seconds_read += seconds - LEARNED_READ * self._seconds_read

    def read_again(self, tokens: int, *, planned: bool) -> None:
        """So many tokens of a prompt had been in the cache before."""
        for each in (self.totals, self._lately):
            each.planned += tokens if planned else 0
            each.unplanned += 0 if planned else tokens

    def seconds_to_read(self, tokens: int) -> float | None:
        """How long the engine takes to read so many tokens; None while that is unknown."""
        return tokens * self._seconds_read / self._tokens_read if self._tokens_read else None

    def look(self, now: float, *, budget: int, away: float | None) -> None:
        """Correct the budget and the margin. `away`: the share of tokens whose sessions are away; None where
        there are none.
        """
        if away is not None:
            self._away += LEARNED * (away - self._away)
            self.lends = self._away > (KEEP if self.lends else LEND)
        if self._lately.prompt:
            self._correct(budget)
        self.looked, self._lately = now, PromptTokens()
        self.calls, self.holds, self.expired, self.peak, self.waited = 0, 0, 0, 0, False

    def _correct(self, budget: int) -> None:
        unplanned = self._lately.unplanned / self._lately.prompt
        if unplanned > TOO_MUCH:
            self.scale = max(LEAST_SCALE, self.scale * SHRINK)
        elif unplanned < LITTLE:
            self.scale = min(1.0, self.scale * GROW)
        again = unplanned + self._lately.planned / self._lately.prompt
        self._often += LEARNED * (self.holds / max(1, self.calls) - self._often)
        self._again += LEARNED * (again - self._again)
        self._long += LEARNED * (self.expired / max(1, self.calls) - self._long)
        loans = max(self._again / LOANS, self._long / TOO_LONG)
        cost = loans if self.lends else self._often / OFTEN
        if cost > 1:
            self.margin = max(LEAST_MARGIN, self.margin * SPARE)
        elif cost < SELDOM and self.waited and (self.lends or self.peak < ROOM * budget):
            self.margin = min(MOST_MARGIN, self.margin * GROW)
