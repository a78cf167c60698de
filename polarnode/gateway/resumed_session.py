"""What a session that resumes a harness must ask first: what its parent asked at the turn it goes on from.

A resumed harness rebuilds its conversation from its own files. The node takes out the marker that it had to
be given, and compares what remains with the parent's request by its path key: with equal keys the prompt is
the parent's, token for token. Anything else is refused with the first difference, before anything is sampled.

Calls of other roles (a title, a sub-agent) pass: a resumed harness may make one first. But a session whose
main agent never asked for the recorded turn is no fork either: `missing` says so at its end.
"""

from typing import Literal

from attrs import define, evolve, field

from polarnode.core.conversation import Conversation, ModelRequest
from polarnode.core.errors import ForkError
from polarnode.gateway.recorded_difference import first_difference
from polarnode.merge.attach import Plan
from polarnode.merge.fingerprint import Path
from polarnode.providers.volatile import without_marker


@define(eq=False, kw_only=True)
class ResumedSession:
    """The state that a session goes on from: its parent's turn `turn`, with the `before_key` and the
    conversation of its request. `how`: in a sentence, the way that it goes on.
    """

    parent: str
    turn: int
    before_key: str
    conversation: Conversation
    how: Literal["resuming", "freezing"] = "resuming"
    begun: bool = field(default=False, init=False)  # the recorded request was made again
    refused: ForkError | None = field(default=None, init=False)

    def unmarked(self, request: ModelRequest) -> ModelRequest:
        """The request without the marker, and without what its harness put before it."""
        conversation = request.conversation
        kept = without_marker(conversation.messages)
        if kept is conversation.messages:
            return request
        return evolve(request, conversation=evolve(conversation, messages=kept))

    def check(self, plan: Plan, conversation: Conversation) -> None:
        """Raise ForkError where the main agent's first request is not the recorded one. Once it was, nothing
        is compared any more.
        """
        if self.begun or plan.role != "main":
            return
        if Path.read(plan.before_key).key == Path.read(self.before_key).key:
            self.begun = True
            return
        found = first_difference(self.conversation, conversation)
        why = found or "its answers are not those of the session that it goes on from"
        self.refused = ForkError(
            f"turn {self.turn} of session {self.parent} cannot be forked by {self.how}: the resumed request"
            f" is not the recorded one: {why}"
        )
        raise self.refused

    def fault(self) -> ForkError | None:
        """Why the session is no fork, once its harness has ended; None where it is one."""
        if self.begun or self.refused is not None:
            return self.refused
        return ForkError(
            f"turn {self.turn} of session {self.parent} cannot be forked by {self.how}: the resumed harness"
            " ended without asking for it again"
        )
