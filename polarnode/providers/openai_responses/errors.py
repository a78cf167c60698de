"""Responses: what a fault is called inside a stream, as Codex and the others on this API understand it.

Whoever changes it should know what Codex does: `response.failed` ends its run for some codes and starts it again for others, while a broken
connection always starts it again.
"""

from polarnode.conversation import Json
from polarnode.providers import openai
from polarnode.providers.contract import TRIED_AGAIN, Fault


def in_stream(fault: Fault) -> Json:
    """The `error` of a `response.failed`; None for what a client should try again: to that end its connection is broken without a word.

    `invalid_prompt` is the one code of this API's streams that is fatal to Codex and says nothing of accounts or quotas.
    """
    if fault.kind in TRIED_AGAIN:
        return None
    code = "context_length_exceeded" if fault.kind == "context_too_long" else "invalid_prompt"
    return {"code": code, "message": openai.message(fault)}
