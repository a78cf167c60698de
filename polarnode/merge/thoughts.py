"""The thinking policy `template`: a model is shown what its chat template shows it, which may leave out what it thought before.

The other policy, `keep`, needs no code: sampled tokens stay in the prompt. Under this one a request whose new messages make the template leave
out earlier thoughts is rendered anew. Whoever edits this keeps two rules: harnesses drop thinking, so the thoughts of our own answers are
given back before the template decides; and what the model saw is said in the turn's notes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from polarnode.conversation import Conversation, Message
from polarnode.merge import notes
from polarnode.merge.attach import Attached, excusable, opaques
from polarnode.merge.ledger import Ledger
from polarnode.merge.references import References

# Whether a model's template leaves out the thoughts of turns before these messages.
DropsThinking = Callable[[Sequence[Message]], bool]


@frozen(kw_only=True)
class Thoughts:
    """What one session's requests are rendered from where the template decides over thoughts."""

    drops: DropsThinking
    ledger: Ledger
    references: References

    def shown(self, found: Attached, conversation: Conversation) -> tuple[Attached, tuple[Message, ...]]:
        """What a request extends under this policy, and the messages that are rendered, with their thoughts."""
        messages = conversation.messages
        if self._hides(found, messages[found.matched :]):
            kept = tuple(note.replace(notes.KEPT, notes.AS_SHOWN) for note in found.notes)
            found = evolve(found, parent=None, matched=0, anew=found.parent, notes=kept)
        new = tuple(self._restored(place, messages[place], found) for place in range(found.matched, len(messages)))
        thoughts = [place for place, message in enumerate(new) if message.thinking.strip()]
        first = bisect_left(thoughts, True, key=lambda place: not self.drops(new[place + 1 :]))  # what follows only grows towards the front
        places = [found.matched + place for place in thoughts]
        return evolve(found, notes=(*found.notes, *notes.thoughts(places[first:], places[:first]))), new

    def _hides(self, found: Attached, new: Sequence[Message]) -> bool:
        return found.parent is not None and bool(new) and self.ledger.thoughtful(found.parent) and self.drops(new)

    def _restored(self, place: int, message: Message, found: Attached) -> Message:
        """A message of ours with what was thought before it."""
        if message.role != "assistant":
            return message
        key = found.keys[place + 1]
        candidates = self.ledger.answered_with(key)
        proven = self.references.find_refs(opaques(message))
        if not candidates:
            candidates = [index for index in sorted(proven) if self._is_answer(index, message)]
            key = self.ledger.turns[candidates[-1]].message_key if candidates else key
        if not candidates:
            return message
        author = self._author(candidates, proven, found)
        return evolve(message, thinking=self.ledger.thinking(author, key))

    def _author(self, candidates: Sequence[int], proven: frozenset[int], found: Attached) -> int:
        """Among twins the one the message names, then the one whose tokens the request goes on from, then the latest."""
        line = frozenset(self.ledger.ancestry(found.before)) if len(candidates) > 1 and found.before is not None else frozenset[int]()
        return max(candidates, key=lambda index: (index in proven, index in line, index))

    def _is_answer(self, index: int, message: Message) -> bool:
        turn = self.ledger.turns.get(index)
        return turn is not None and turn.answer is not None and excusable(self.references, turn.answer.as_message(), message)
