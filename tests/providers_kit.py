"""What the tests of provider modules share: calls to answer, without a session behind them."""

from typing import Any

from polarnode.conversation import Conversation, Message, ModelRequest, Sampling
from polarnode.providers.contract import Call


def a_call(**asked: Any) -> Call:
    """A call of a request with these fields; whoever asked for nothing asked for model `asked-for`."""
    said = Conversation(messages=(Message(role="user", text="hi"),))
    request = ModelRequest(**({"provider": "p", "model": "asked-for", "conversation": said, "sampling": Sampling()} | asked))
    return Call(request=request, id="0f1e", created=1700000000, signature="c2ln")
