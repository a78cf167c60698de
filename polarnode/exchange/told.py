"""What is told of a sample: to the engine, as an order, and to the session, as a turn. Pure functions of it.

The rule for whoever edits it: what stands in a turn is what was planned, what was sampled and what was used, never what should have been.
"""

from collections.abc import Iterator
from hashlib import blake2b

from attrs import evolve

from polarnode.exchange.events import Asked
from polarnode.exchange.sample import Sample
from polarnode.merge.carried import held_of
from polarnode.merge.transcript import heard_of
from polarnode.ports import GenerateOrder
from polarnode.records import Turn, TurnState


def request_ids(call_id: str, count: int) -> Iterator[str]:
    """A name of 32 hex digits for each sample of a call; the first is the call's own. None is the beginning of another, as all are as long."""
    yield call_id
    for choice in range(1, count):
        yield blake2b(f"{call_id}.{choice}".encode(), digest_size=16).hexdigest()


def order_of(sample: Sample, *, stop_ids: tuple[int, ...], affinity: str) -> GenerateOrder:
    """What the engine is asked for."""
    return GenerateOrder(
        request_id=sample.request_id,
        prompt=sample.rendered.prompt,
        sampling=sample.used,
        stop_ids=stop_ids,
        affinity=affinity,
        constraint=sample.request.constraint,
        constraint_after=sample.constraint_after,
        top_logprobs=max(sample.request.logprobs or 0, sample.carry.top_logprobs),
        routed_from=sample.carry.routed_from,
    )


def turn_of(sample: Sample, asked: Asked, *, session_id: str, state: TurnState, at: float) -> Turn:
    """The turn of a sample that ended. An answer nobody could have seen a token of is none, so that no request attaches to it.

    Its logprobs are not kept beside the answer: the turn has those of every token, and alternatives where its task asked for them.
    """
    plan, answer = sample.plan, sample.answer
    if answer is None:
        raise ValueError(f"turn {plan.index} is told of before its sample ended")
    shown = evolve(answer, logprobs=()) if sample.ids else None
    held = held_of(sample.carry, sampled=len(sample.ids), top=sample.top, routed=sample.routed)
    return Turn(
        session_id=session_id,
        index=plan.index,
        provider=asked.request.provider,
        lineage=plan.lineage,
        parent=plan.parent,
        kind=plan.kind,
        reason=plan.reason,
        role=plan.role,
        state=state,
        prompt_delta=sample.rendered.delta,
        prompt_length=len(sample.rendered.prompt),
        close_length=sample.rendered.close_length,
        matched=plan.matched,
        messages=plan.total,
        heard=heard_of(plan, asked.request.conversation),
        sampled=sample.ids,
        logprobs=sample.logprobs,
        version_spans=sample.spans,
        finish_reason=answer.finish_reason,
        request_key=plan.request_key,
        before_key=plan.before_key,
        message_key=plan.after(shown) if shown is not None and state != "failed" else "",
        answer=shown,
        asked=asked.request.sampling,
        used=sample.used,
        usage=sample.usage(),
        started=asked.wall,
        first_token_s=None if sample.first_at is None else sample.first_at - asked.at,
        ended_s=at - asked.at,
        notes=(*plan.notes, *_notes(sample), *held.notes),
        top=held.top,
        routed=held.routed,
    )


def _notes(sample: Sample) -> Iterator[str]:
    """What a reader of the turn should know of how it was asked."""
    request, rendered = sample.request, sample.rendered
    if rendered.close_length:
        yield f"closed: the first {rendered.close_length} ids end the parent's cut sample"
    yield from rendered.notes
    if request.conversation.tool_choice != "auto":
        yield f"tool_choice {request.conversation.tool_choice!r} was asked: nothing makes the model obey it"
    yield from request.notes
    if request.ignored:
        yield f"ignored: {', '.join(request.ignored)}"
