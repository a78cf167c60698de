"""A model request as it came, between the route that read it and the call that answers it.

The rule for whoever edits it: two requests have one name only where the one may be given the other's answer.
"""

from attrs import frozen

from polarnode.conversation import ModelRequest
from polarnode.providers.dialect import Dialect
from polarnode.shell.live import LiveSession


@frozen(kw_only=True)
class Incoming:
    """A request as it came: who asks, in which dialect, what. `key` is the digest of its body, by which a retry is known."""

    session: LiveSession
    dialect: Dialect
    request: ModelRequest
    key: str

    @property
    def name(self) -> str:
        """Whose body it is: two agents of a harness may ask the same at once."""
        return f"{self.dialect.name} {self.request.hints.get('agent', '')} {self.key}"

    @property
    def can_go_on(self) -> bool:
        """Whether a cut sample of it can be continued: an engine begins constraints anew, and logprobs are kept for no one."""
        request = self.request
        return request.choices == 1 and request.logprobs is None and request.constraint is None
