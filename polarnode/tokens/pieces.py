"""The text of tokens, for people who look at rows: the text of each id, and the text of ids that only
together are text.

Pure. Bytes are decoded as UTF-8. An id whose bytes are whole characters has its own text. An id that splits a
character has none; neighbouring ids that together are text form a cluster, which has text. Nothing here is
fed to a model.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from attrs import frozen

from polarnode.core.errors import ModelError

UNKNOWN: Final = "\ufffd".encode()


@frozen(kw_only=True)
class Cluster:
    """Tokens [start, end) of row `trace` that only together are text."""

    trace: int
    start: int
    end: int
    text: str


@frozen(kw_only=True)
class TokenPieces:
    """The text of each id that occurs, by the id as a string, and the clusters of all rows. An id that is not
    in `tokens` is in clusters alone. Bytes that are no UTF-8, and ids that the vocabulary lacks, are U+FFFD.
    """

    tokens: Mapping[str, str]
    clusters: tuple[Cluster, ...] = ()


def text_of(ids: Iterable[int], token_bytes: Callable[[int], bytes]) -> str:
    """The text of these ids. Bytes that are not UTF-8 become U+FFFD."""
    return b"".join(map(token_bytes, ids)).decode("utf-8", "replace")


def pieces_of(rows: Sequence[Sequence[int]], token_bytes: Callable[[int], bytes]) -> TokenPieces:
    """The pieces of some rows of token ids. `token_bytes` raises ModelError for an id outside its vocabulary:
    such a row is from another model than is served now, and its text is not known.
    """
    bytes_of = {token: _bytes_or_mark(token, token_bytes) for token in set().union(*rows)}
    tokens: dict[str, str] = {}
    split: set[int] = set()
    for token, found in bytes_of.items():
        try:
            tokens[str(token)] = found.decode()
        except UnicodeDecodeError:
            split.add(token)
    clusters = tuple(
        Cluster(trace=number, start=start, end=end, text=text)
        for number, row in enumerate(rows)
        if not split.isdisjoint(row)
        for start, end, text in _find_clusters(row, split, bytes_of)
    )
    return TokenPieces(tokens=tokens, clusters=clusters)


def _bytes_or_mark(token: int, token_bytes: Callable[[int], bytes]) -> bytes:
    try:
        return token_bytes(token)
    except ModelError:
        return UNKNOWN


def _find_clusters(
    row: Sequence[int], split: set[int], bytes_of: Mapping[int, bytes]
) -> Iterator[tuple[int, int, str]]:
    """The clusters of a row. Each begins with an id that splits a character, and ends where all its bytes are
    used up.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    start: int | None = None
    text = ""
    for index, token in enumerate(row):
        if start is None and token not in split:
            continue
        if start is None:
            start, text = index, ""
        text += decoder.decode(bytes_of[token])
        if not decoder.getstate()[0]:
            yield start, index + 1, text
            start = None
    if start is not None:
        yield start, len(row), text + decoder.decode(b"", final=True)
