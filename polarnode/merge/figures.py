"""What a session's turns show: the words with which notes begin, the counts of lineages, and conversations.

A note is `word: sentence`, and notes are counted by word. `lineage_figures` gives `metrics.lineage` of a
trajectory, `summed` the sums over many. Words and names are added and never removed, because trajectories are
kept for years. Document new ones in docs/token-fidelity.md and docs/api.md.

The messages of a conversation are what the client sent and the template was given; its answers are what the
client was given. Nothing is decoded from tokens. A conversation with a gap is None, never guessed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from attrs import evolve

from polarnode.core.codec.json import dump_json, read_json
from polarnode.core.conversation import Conversation, Json, Message, Tool
from polarnode.core.trajectory import LeftOut, NewMessages, Turn, line_of

if TYPE_CHECKING:
    from polarnode.merge.attach import Plan  # which imports this module

# ── notes ─────────────────────────────────────────────────────────────────────────────────────────

EDITED_NOTE: Final = "edited"  # an answer came back changed, but its ids prove it, so its tokens are kept
AMBIGUOUS: Final = "ambiguous"  # several turns fit an answer that came back, and no id decides
REWRITTEN_NOTE: Final = "rewritten"  # an assistant message differs from the answer of the turn at its place
FOREIGN_NOTE: Final = "foreign"  # this session did not sample an assistant message
# A message differs from an earlier request of the same conversation. The note names the first such message.
DIVERGED_NOTE: Final = "diverged"
VOLATILE_NOTE: Final = "volatile"  # the user message that a turn answered is missing or changed
RESUMED: Final = "resumed"  # the turn continues the cut sample of another turn
CLOSED_NOTE: Final = "closed"  # the parent's sample had no turn end and was closed
SIDE_CALL_NOTE: Final = "side call"  # the request has the sign of a side call of a harness
THINKING: Final = "thinking"  # which thinking the model was shown, under the thinking policy `template`
REGROUPED_NOTE: Final = "regrouped"  # calls of one answer came back as several messages
PREFILLED_NOTE: Final = "prefilled"  # the answer continues the request's last message, an assistant's
REFUSED: Final = "refused"  # the engine refused what the request asked for
WORDS: Final = (
    EDITED_NOTE,
    AMBIGUOUS,
    REGROUPED_NOTE,
    REWRITTEN_NOTE,
    FOREIGN_NOTE,
    DIVERGED_NOTE,
    VOLATILE_NOTE,
    RESUMED,
    CLOSED_NOTE,
    SIDE_CALL_NOTE,
    THINKING,
    PREFILLED_NOTE,
    REFUSED,
)

KEPT: Final = "its tokens are kept"  # the end of a note on an edit
# The note ends with this instead if the prompt is rendered again.
RERENDERED_ENDING: Final = "the model sees it as the request shows it"

_SHOWN: Final = f"{THINKING}: shown the thoughts of"


def note_word(note: str) -> str | None:
    """The word with which a note begins; None if it begins with no known word."""
    head = note.partition(":")[0]
    return head if head in WORDS else None


def counted(notes: Iterable[str]) -> "Counter[str]":
    """The number of notes for each word with which they begin."""
    return Counter(word for word in map(note_word, notes) if word is not None)


def thinking_notes(shown: Iterable[int], hidden: Iterable[int]) -> list[str]:
    """Notes on earlier thinking, with the positions of messages: what the model was shown, and what the
    template left out.
    """
    seen, unseen = ", ".join(map(str, shown)), ", ".join(map(str, hidden))
    hides = (
        [
            (
                f"{THINKING}: the template leaves out the thoughts of messages {unseen}, so the model did"
                " not see them"
            )
        ]
        if unseen
        else []
    )
    return [*([f"{_SHOWN} messages {seen}"] if seen else []), *hides]


def shows_thinking(notes: Iterable[str]) -> bool:
    """Whether the notes say that a prompt was rendered with earlier thinking."""
    return any(note.startswith(_SHOWN) for note in notes)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────

# The names of counts by word, and of single counts. `prefix_hit_rate` is computed from the sums.
WORD_COUNTS: Final = ("kinds", "reasons", "roles", "states", "notes", "left_out", "left_out_tokens")
ALONE: Final = ("turns", "lineages", "leaves", "tokens_in", "tokens_new", "tokens_sampled", "malformed_calls")


def lineage_figures(turns: Sequence[Turn], left_out: Sequence[LeftOut], *, thinking: str) -> dict[str, Json]:
    """The counts of one session. `thinking` is the thinking policy of its task.

    `tokens_in` counts all prompt tokens, `tokens_new` those that were not in the prompt or sample of the turn
    extended; `prefix_hit_rate` is the share of the others. `notes` counts notes by their first word.
    """
    sampled = {turn.index: len(turn.sampled) for turn in turns}
    left_out_tokens = Counter[str]()
    for one in left_out:
        left_out_tokens[one.reason] += sampled.get(one.turn, 0)
    words: dict[str, Counter[str]] = {
        "kinds": Counter(turn.kind for turn in turns),
        "reasons": Counter(turn.reason for turn in turns),
        "roles": Counter(turn.role for turn in turns),
        "states": Counter(turn.state for turn in turns),
        "notes": counted(note for turn in turns for note in turn.notes),
        "left_out": Counter(one.reason for one in left_out),
        "left_out_tokens": left_out_tokens,
    }
    return _shown(words, _alone(turns), thinking)


def summed(figures: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """The sums of the counts of many sessions. `thinking` is the policy of all of them, or `mixed`. A value
    that is not a number counts as 0.
    """
    words: dict[str, Counter[str]] = {name: Counter() for name in WORD_COUNTS}
    alone = dict.fromkeys(ALONE, 0)
    policies = set[str]()
    for one in figures:
        policies.add(str(one.get("thinking")))
        for name in WORD_COUNTS:
            counts = one.get(name)
            words[name].update(
                {word: _number(count) for word, count in counts.items()} if isinstance(counts, dict) else {}
            )
        for name in ALONE:
            alone[name] += _number(one.get(name))
    return _shown(words, alone, policies.pop() if len(policies) == 1 else "mixed")


def _number(value: Json) -> int:
    return value if isinstance(value, int) else 0


def _alone(turns: Sequence[Turn]) -> dict[str, int]:
    extended = {turn.parent for turn in turns if turn.state != "failed"}
    return {
        "turns": len(turns),
        "lineages": len({turn.lineage for turn in turns}),
        "leaves": sum(turn.index not in extended and turn.state != "failed" for turn in turns),
        "tokens_in": sum(turn.prompt_length for turn in turns),
        "tokens_new": sum(len(turn.prompt_delta) for turn in turns),
        "tokens_sampled": sum(len(turn.sampled) for turn in turns),
        "malformed_calls": sum(turn.answer.malformed_calls for turn in turns if turn.answer is not None),
    }


def _shown(words: Mapping[str, "Counter[str]"], alone: Mapping[str, int], thinking: str) -> dict[str, Json]:
    tokens, new = alone["tokens_in"], alone["tokens_new"]
    rate = round(1 - new / tokens, 4) if tokens else 0.0
    counts: dict[str, Json] = {name: dict(sorted(words[name].items())) for name in WORD_COUNTS}
    return {"thinking": thinking, **alone, "prefix_hit_rate": rate, **counts}


# ── conversations ─────────────────────────────────────────────────────────────────────────────────


def new_messages_of(plan: "Plan", conversation: Conversation) -> NewMessages:
    """What the turn of this plan adds to the conversation: the messages that are rendered, and for a root
    also the tools and the thinking flag at the head of the prompt.
    """
    messages = tuple(evolve(message, refs=()) if message.refs else message for message in plan.new)
    if plan.parent is not None:
        return NewMessages(messages=messages)
    return NewMessages(messages=messages, tools=_written(conversation.tools), thinking=conversation.thinking)


def _written(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    described: list[Json] = [
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        for tool in tools
    ]
    return dump_json(described).decode()


def parse_tools(new: NewMessages) -> tuple[Tool, ...]:
    """The tools of a root, parsed from their JSON."""
    found = read_json(new.tools.encode()) if new.tools else []
    return tuple(_tool(each) for each in found if isinstance(each, dict)) if isinstance(found, list) else ()


def _tool(fields: Mapping[str, Json]) -> Tool:
    parameters = fields.get("parameters")
    return Tool(
        name=str(fields.get("name", "")),
        description=str(fields.get("description", "")),
        parameters=parameters if isinstance(parameters, dict) else {},
    )


def transcript(turns: Mapping[int, Turn], index: int) -> Conversation | None:
    """The conversation that the model had read and written when turn `index` ended. None if a turn of its
    line is missing or has no messages.

    `turns` are by index. An answer that continued after a cut is one message, as its client saw it. An answer
    that ended at a stop string includes it, because the model wrote it and reads it in the next prompt.
    """
    line = line_of(turns, index)
    if line is None:
        return None
    messages: list[Message] = []
    before: Turn | None = None
    for turn in line:
        if turn.new_messages is None:
            return None
        messages += turn.new_messages.messages
        _answered(messages, before, turn)
        before = turn
    head = line[0].new_messages
    return (
        None
        if head is None
        else Conversation(messages=tuple(messages), tools=parse_tools(head), thinking=head.thinking)
    )


def _answered(messages: list[Message], before: Turn | None, turn: Turn) -> None:
    """Append a turn's answer to the messages, or let it replace the cut answer that it continues."""
    message = turn.message
    if message is None:
        return
    if turn.answer is not None and turn.answer.stop_string:
        message = evolve(message, text=message.text + turn.answer.stop_string)
    goes_on = (
        before is not None
        and before.answer is not None
        and turn.new_messages is not None
        and not turn.new_messages.messages
    )
    if goes_on and turn.reason == RESUMED:  # The answer includes the tokens sampled before the cut.
        messages[-1] = message
    elif goes_on and before is not None and before.finish_reason not in ("stop", "tool_calls"):
        messages[-1] = messages[-1].joined(message)
    else:
        messages.append(message)
