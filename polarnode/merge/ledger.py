"""The turns of a session that have ended, and the keys by which a later request finds them.

Every token is kept once, as deltas. Invariants: nothing here is O(prompt ids) in Python objects, only in
copied memory. Chains are walked, never recursed, because a session may have thousands of turns. A parent
always has a smaller index than its children.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from attrs import define, evolve, field

from polarnode.core.arrays import ids
from polarnode.core.conversation import Message
from polarnode.core.trajectory import Turn, line_of
from polarnode.merge.figures import shows_thinking
from polarnode.merge.fingerprint import NO_KEY, Path, advance, strip_ending

_NOBODY: Final[tuple[int, ...]] = ()
_NO_STOPS: Final[Mapping[str, None]] = {}
# The number of latest stop strings kept for the answers to one path. A client has a handful. Each costs a
# hash of the message that may end with it, 1 ms for 1 MB, in the event loop.
STOPS: Final = 16


# A chain of this length is walked in 20 us. For a longer one a full copy of the ids is kept, at which a walk
# ends. The harnesses observed interleave up to four agents. Sessions of the usual length (29 turns) keep no
# copy; four copies of 128k tokens are 2 MB.
_MAX_WALK_TURNS: Final = 64
_MAX_FULL_COPIES: Final = 4


def chain(turns: Mapping[int, Turn], index: int | None, *, since: int = -1) -> list[Turn]:
    """The turns from a root to `index`, in that order, or only from the turn on that added the token at
    `since`. Raises KeyError when one is missing.
    """
    line = [] if index is None else line_of(turns, index, since=since)
    if line is None:
        raise KeyError(index)
    return line


def prompt_ids(turns: Mapping[int, Turn], index: int) -> "array[int]":
    """Exactly the ids on which a turn was conditioned. A fresh array."""
    line = chain(turns, index)
    prompt = _extended(ids(), line[:-1])
    prompt.extend(line[-1].prompt_delta)
    return prompt


def _extended(prompt: "array[int]", line: Iterable[Turn]) -> "array[int]":
    """The same array, extended by what these turns added. Joining bytes first would copy everything twice."""
    for turn in line:
        prompt += turn.prompt_delta
        prompt += turn.sampled
    return prompt


def is_attachable(turn: Turn) -> bool:
    """Whether a request may extend the turn: it has an answer, and the engine did not fail."""
    return turn.state != "failed" and turn.answer is not None


@define(eq=False)
class Ledger:
    """The turns of one session that have ended. `_after` finds them by the path up to and with their answer,
    `_before` by the path that they answered.

    `_bare` finds them by the path with their answer but without the user message that they answered.
    """

    turns: dict[int, Turn] = field(factory=dict)
    _after: dict[str, list[int]] = field(factory=dict)
    _before: dict[str, list[int]] = field(factory=dict)
    _bare: dict[str, int] = field(factory=dict)
    _keys: dict[int, tuple[str, ...]] = field(factory=dict)
    _turns_with_thinking: set[int | None] = field(factory=set)
    # Maps a path to the stop strings at which its answers ended. Strings that a client only sends are not
    # kept, because it may send new ones with every request.
    _stops_by_path: dict[str, dict[str, None]] = field(factory=dict)
    # the result of `written` for some turns, the oldest first, _FULL_COPIES at most
    _full: dict[int, bytes] = field(factory=dict)

    def add(self, turn: Turn) -> None:
        """Keep a turn, and let requests attach to it if it has an answer."""
        self.turns[turn.index] = turn
        if not is_attachable(turn):
            return
        if (
            turn.parent in self._turns_with_thinking
            or _answer_message(turn).thinking.strip()
            or shows_thinking(turn.notes)
        ):
            self._turns_with_thinking.add(turn.index)
        keys = self._keys[turn.index] = self._answer_keys(turn)
        for key in keys:
            self._after.setdefault(key, []).append(turn.index)
        path = Path.read(turn.before_key)
        self._before.setdefault(path.key, []).append(turn.index)
        if path.bare != NO_KEY and turn.message is not None:
            self._bare[advance(path.bare, turn.message)] = turn.index
        if _stop_string(turn):
            for place in {path.key, path.bare, self._answer_start_key(turn)}:
                stops = self._stops_by_path.setdefault(place, {})
                stops.pop(_stop_string(turn), None)
                stops[_stop_string(turn)] = None
                if len(stops) > STOPS:
                    del stops[next(iter(stops))]

    def find_by_answer(self, key: str) -> "list[int] | tuple[int, ...]":
        """The turns whose path, answer included, has this key. Several such turns are twins: they have the
        same text and other tokens.
        """
        return self._after.get(key, _NOBODY)

    def strip_stops(self, before: str, message: Message) -> Iterator[tuple[str, Message]]:
        """For each stop string of an answer to this path with which the message ends: the stop string, and
        the message without it.
        """
        for stop in self._stops_by_path.get(before, _NO_STOPS):
            text = strip_ending(message.text, stop)
            if text is not None:
                yield stop, evolve(message, text=text)

    def find_by_stop(self, key: str, stop: str) -> list[int]:
        """The turns whose path has this key and whose answer ended at this stop string."""
        return [index for index in self.find_by_answer(key) if _stop_string(self.turns[index]) == stop]

    def find_by_prompt(self, key: str) -> "list[int] | tuple[int, ...]":
        """The turns that answered the path with this key."""
        return self._before.get(key, _NOBODY)

    def find_unprompted(self, key: str) -> int | None:
        """The latest turn whose path has this key if the user message that it answered is left out."""
        return self._bare.get(key)

    def written(self, index: int | None) -> "array[int]":
        """Exactly the ids with which a turn ends: its prompt and its sample. A fresh array; empty
        for None.
        """
        line: list[Turn] = []
        step = index
        while step is not None and step not in self._full:
            line.append(self.turns[step])
            step = line[-1].parent
        whole = _extended(ids() if step is None else ids(self._full[step]), reversed(line))
        if index is not None and len(line) > _MAX_WALK_TURNS:
            self._keep(index, whole.tobytes())
        return whole

    def _keep(self, index: int, whole: bytes) -> None:
        while len(self._full) >= _MAX_FULL_COPIES:
            del self._full[next(iter(self._full))]
        self._full[index] = whole

    def length(self, index: int | None) -> int:
        """The number of ids that `written` returns."""
        return 0 if index is None else self.turns[index].end

    def holds_thinking(self, index: int) -> bool:
        """Whether the ids with which a turn ends hold a thought: one that was sampled in it or in a turn that
        it extends, or one that was rendered into one of their prompts.
        """
        return index in self._turns_with_thinking

    def thinking(self, index: int, key: str) -> str:
        """The thinking before the message that a client names by this key, which is one of the
        turn's keys.
        """
        turn = self.turns[index]
        return (
            self._merged(turn).thinking
            if key != turn.message_key and self._goes_on(turn)
            else _answer_message(turn).thinking
        )

    def walk_ancestors(self, index: int) -> Iterator[int]:
        """A turn and the turns that it extends, the latest first."""
        step: int | None = index
        while step is not None:
            yield step
            step = self.turns[step].parent

    def _answer_keys(self, turn: Turn) -> tuple[str, ...]:
        """The turn's own key. For an answer that continued after a cut there are further keys, for clients
        that show all of its parts as one message: with the stop strings at which parts ended, and without.
        """
        if not self._goes_on(turn):
            return (turn.message_key,)
        before = self._answer_start_key(turn)
        merged = [advance(before, self._merged(turn, stops=stops)) for stops in (False, True)]
        return tuple(dict.fromkeys((turn.message_key, *merged)))

    def _merged(self, turn: Turn, *, stops: bool = False) -> Message:
        *earlier, last = reversed(self._halves(turn))
        first, *others = [*(_answer_message(half, stop=stops) for half in earlier), _answer_message(last)]
        return first.joined(*others)

    def _answer_start_key(self, turn: Turn) -> str:
        """The path at which an answer began. Its client may show the answer as one message from there."""
        return Path.read(self._halves(turn)[-1].before_key).key

    def _halves(self, turn: Turn) -> list[Turn]:
        """A turn that continued a cut answer, and the turns that it continued, the latest first."""
        halves = [turn]
        while self._goes_on(halves[-1]):
            halves.append(self.turns[_parent(halves[-1])])
        return halves

    def _goes_on(self, turn: Turn) -> bool:
        """Whether nothing new stands between the parent's answer and this turn."""
        return turn.parent is not None and Path.read(turn.before_key).key in self._keys.get(
            turn.parent, _NOBODY
        )


def _answer_message(turn: Turn, *, stop: bool = False) -> Message:
    message = turn.message or Message(role="assistant")
    return evolve(message, text=message.text + _stop_string(turn)) if stop else message


def _stop_string(turn: Turn) -> str:
    return "" if turn.answer is None else turn.answer.stop_string or ""


def _parent(turn: Turn) -> int:
    if turn.parent is None:
        raise ValueError(f"turn {turn.index} extends nothing")
    return turn.parent
