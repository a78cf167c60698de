"""The check on the first request of a session that resumes a harness: it must be its parent's request at the
turn from which the session goes on.

A resumed harness rebuilds its conversation from its own files. The node removes the resume marker that it had
to give the harness, and compares the rest with the parent's request by its path key. With equal keys the
prompt is the parent's, token for token. Any other request is refused with the first difference, before
anything is sampled.

Calls of other roles (a title, a sub-agent) pass, because a resumed harness may make one first. But a session
whose main agent never sent the recorded request is no fork either; `fault` says so at its end.
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
    """The state from which a session goes on: its parent's turn `turn`, with the `before_key` and the
    conversation of that turn's request. `how` is the way of the fork, as a word in a sentence.
    """

    parent: str
    turn: int
    before_key: str
    conversation: Conversation
    how: Literal["resuming", "freezing"] = "resuming"
    begun: bool = field(default=False, init=False)  # whether the recorded request was made again
    refused: ForkError | None = field(default=None, init=False)

    def strip_marker(self, request: ModelRequest) -> ModelRequest:
        """The request without the resume marker, and without what its harness put around it."""
        conversation = request.conversation
        kept = without_marker(conversation.messages)
        if kept is conversation.messages:
            return request
        return evolve(request, conversation=evolve(conversation, messages=kept))

    def check(self, plan: Plan, conversation: Conversation) -> None:
        """Raise ForkError if the main agent's first request is not the recorded one. Later requests are not
        compared.
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
        """Why the session is no fork, once its harness has ended. None if it is one."""
        if self.begun or self.refused is not None:
            return self.refused
        return ForkError(
            f"turn {self.turn} of session {self.parent} cannot be forked by {self.how}: the resumed harness"
            " ended without asking for it again"
        )
