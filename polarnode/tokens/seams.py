"""The seam between a sampled turn and what is written after it: how a cut turn is closed, and what a template would have written there.

The rule for whoever edits it: sampled ids are never replaced. What the model sees then differs from its template by a token at most, and
that is said in a note. A close is the least that ends the turn: an open thought first, then the turn; nothing where what follows does it.
"""

from array import array
from typing import Final, assert_never

from attrs import frozen

from polarnode.ports import Tokenizer
from polarnode.records import ids
from polarnode.tokens.family import Family, HarmonyMarks, Mode

_HERE: Final = "the model sees it so"


@frozen
class Closing:
    """How a family's cut turns are ended."""

    family: Family

    def of(self, mode: Mode, opening: "array[int]") -> "array[int]":
        """The ids that close a turn in which this was being written. `opening` is what follows."""
        if self.family.harmony is not None:
            return self._message(mode, self.family.harmony)
        thought = self.family.think_close if mode == "thinking" else None
        closed_by_next = bool(opening) and opening[0] in self.family.boundaries
        return ids(token for token in (thought, None if closed_by_next else self.family.turn_end) if token is not None)

    def _message(self, mode: Mode, harmony: HarmonyMarks) -> "array[int]":
        """Harmony's messages are ended alike whatever they are; a header that was cut is made that of an empty message, so that it ends."""
        match mode:
            case "header":
                return ids((harmony.message, harmony.end))
            case "between":
                return ids()
            case "text" | "thinking" | "call":
                return ids((harmony.end,))
            case _:
                assert_never(mode)


def joined(sampled: "array[int]", opening: "array[int]", family: Family) -> "array[int]":
    """What follows a sample: without the boundary that the sample ended with, where it begins with the same."""
    twice = bool(sampled) and bool(opening) and sampled[-1] in family.boundaries and sampled[-1] == opening[0]
    return opening[1:] if twice else opening


def differences(sampled: "array[int]", opening: "array[int]", ended: str, tokenizer: Tokenizer, family: Family) -> tuple[str, ...]:
    """What a reader of the turn should know of its seam. `ended` is the turn end that the template writes there, empty for none."""
    last = sampled[-1] if sampled else None
    if last is None or last not in (*family.stop_ids, *family.turn_ends):
        return ()
    said = tokenizer.token_bytes(last).decode()
    if last in family.boundaries and opening and not ended:
        next_one = tokenizer.token_bytes(opening[0]).decode()
        return () if said == next_one else (f"the sample ends with {said!r} where the template goes on with {next_one!r}: {_HERE}, both stand",)
    if said == ended:
        return ()
    instead = f"writes {ended!r}" if ended else "goes on without a turn end"
    return (f"the sample ends with {said!r} where the template {instead}: {_HERE}",)
