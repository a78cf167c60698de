"""A builder of your own: one row per lineage, in which only the last answer is trained.

A task names it by its import path, and the node must allow that module (`polarnode --allow-import
own_builder`, with its folder on PYTHONPATH):

    [builder]
    import_path = "own_builder:last_answers"
    config = { train_cut = false }

The node checks the invariants on the result: rows are exactly what the engine saw, and each sampled token is
trained once or its turn is left out.
"""

from collections.abc import Mapping, Sequence

from polarnode.core.conversation import Json
from polarnode.core.trajectory import Built, LeftOut, Turn
from polarnode.merge.builders import line_to, rows
from polarnode.merge.selection import select


def last_answers(turns: Sequence[Turn], config: Mapping[str, Json]) -> Built:
    """Rows of the session's leaves. The config is that of polarnode's own builders; a builder may as well
    read one of its own.
    """
    cast = select(turns, config)
    ends = {leaf.index for leaf in cast.leaves}
    traces = [
        trace
        for leaf in cast.leaves
        for trace in rows(
            line_to(cast.by_index, leaf.index), {leaf.index}, limit=cast.settings.max_row_tokens
        )
    ]
    inner = tuple(
        LeftOut(turn=turn.index, reason="not the last answer")
        for turn in cast.trained
        if turn.index not in ends
    )
    return Built(traces=tuple(traces), left_out=(*cast.left_out, *inner))
