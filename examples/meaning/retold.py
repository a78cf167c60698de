"""Re-tokenize a row in the two ways of gateways that keep no ids, and find which sampled tokens remain.

The comparison favours the text: its row keeps every control token, and a sampled token counts as kept if it
is in the longest common runs of ids. What is then compared is the model's logprob of that token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from examples.meaning.checkpoint import Checkpoint, shared
from examples.meaning.echoes import Echo
from examples.meaning.trajectories import Row, Session


@dataclass(frozen=True)
class Retold:
    """`kept` maps positions in the old ids to positions in the new ones. `whole` are the turns up to whose
    samples nothing has changed.
    """

    ids: list[int]
    kept: dict[int, int]
    whole: frozenset[int]


def in_place(row: Row, checkpoint: Checkpoint) -> Retold:
    """Each sample decoded and encoded where it stands: what a gateway of text trains on, its prompts granted
    to it.
    """
    ids: list[int] = []
    kept: dict[int, int] = {}
    done = 0
    for sample in row.samples:
        ids += row.ids[done : sample.start]
        new = checkpoint.encoded(checkpoint.text(row.ids[sample.start : sample.end]))
        kept |= {
            sample.start + old: len(ids) + at for old, at in common(row.ids[sample.start : sample.end], new)
        }
        ids += new
        done = sample.end
    return Retold(ids, kept, _whole(row, ids))


def rendered(row: Row, session: Session, echoes: dict[int, Echo], checkpoint: Checkpoint) -> Retold | None:
    """The chat template over the row's last conversation as its harness gave it back, and its answer. None
    where either is not known.
    """
    last = session.turns[row.samples[-1].turn]
    if last.index not in echoes or last.answer is None:
        return None
    ids = checkpoint.encoded(echoes[last.index].whole(last.answer, checkpoint))
    return Retold(ids, dict(common(row.ids, ids)), _whole(row, ids))


def pieces(row: Row, session: Session, echoes: dict[int, Echo], checkpoint: Checkpoint) -> int | None:
    """Into how many rows a gateway cuts this one that renders each request in full and joins only exact
    prefixes. None where a request is not known.
    """
    if any(sample.turn not in echoes for sample in row.samples):
        return None
    count, so_far = 1, None
    for sample in row.samples:
        prompt = checkpoint.encoded(echoes[sample.turn].prompt(checkpoint))
        count += so_far is not None and prompt[: len(so_far)] != so_far
        so_far = prompt + session.turns[sample.turn].sampled
    return count


def common(old: list[int], new: list[int]) -> Iterator[tuple[int, int]]:
    """Places of the old that are places of the new, in the same order."""
    same = shared(old, new)
    yield from ((at, at) for at in range(same))
    for block in SequenceMatcher(None, old[same:], new[same:], autojunk=False).get_matching_blocks():
        yield from ((same + block.a + at, same + block.b + at) for at in range(block.size))


def _whole(row: Row, ids: list[int]) -> frozenset[int]:
    return frozenset(sample.turn for sample in row.samples if row.ids[: sample.end] == ids[: sample.end])
