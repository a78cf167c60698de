"""What the tests of provider modules share: calls to answer, without a session behind them, and what OpenAI's
SDK makes of a fault.
"""

from typing import Any, Final

import openai

from polarnode.core.conversation import Conversation, Message, ModelRequest, Sampling
from polarnode.providers.contract import FaultKind, ModelCallInfo

OPENAI_ERRORS: Final[tuple[tuple[FaultKind, type[openai.APIStatusError]], ...]] = (
    ("bad_request", openai.BadRequestError),
    ("unauthorized", openai.AuthenticationError),
    ("not_found", openai.NotFoundError),
    ("context_too_long", openai.BadRequestError),
    ("budget_spent", openai.BadRequestError),
    ("session_over", openai.APIStatusError),
    ("overloaded", openai.RateLimitError),
    ("engine_failed", openai.InternalServerError),
    ("cancelled", openai.InternalServerError),
    ("too_large", openai.APIStatusError),
)


def a_call(**asked: Any) -> ModelCallInfo:
    """A call of a request with these fields; whoever asked for nothing asked for model `asked-for`."""
    said = Conversation(messages=(Message(role="user", text="hi"),))
    request = ModelRequest(
        **({"provider": "p", "model": "asked-for", "conversation": said, "sampling": Sampling()} | asked)
    )
    return ModelCallInfo(request=request, id="0f1e", created=1700000000, signature="c2ln")
