"""What is asked of the engine beside its sampling: a request as it can be kept, and what its reader is told where it can not.

Pure, and applied to a request before anything is planned or counted, so that both see the same prompt. The rule for whoever edits it: what a
client asked for and does not get is a note, never silence.
"""

from attrs import evolve

from polarnode.conversation import ModelRequest


def as_kept(request: ModelRequest, *, headers: bool = False) -> ModelRequest:
    """The request with a constraint only where it can hold. `headers`: the model writes one before each message of its own (gpt-oss).

    An engine holds it from the first token on. So it does not go with tools that may be called nor with headers, and thinking that the client
    did not ask for is switched off, because the constrained text is then the whole answer.
    """
    constraint, conversation = request.constraint, request.conversation
    if constraint is None:
        return request
    why = None
    if conversation.tools and conversation.tool_choice != "none":
        why = "the model may call tools: ask without tools, or with tool_choice none"
    elif headers:
        why = "this model's messages have headers of their own: say in the prompt what the answer must be"
    if why is not None:
        note = f"constraint: the {constraint.kind} was not held, because {why}"
        return evolve(request, constraint=None, notes=(*request.notes, note))
    return request if conversation.thinking is not None else evolve(request, conversation=evolve(conversation, thinking=False))
