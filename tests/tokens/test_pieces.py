"""The text of tokens: every letter is somewhere once, whatever tokens spell it."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.errors import ModelError
from polarnode.tokens.pieces import pieces_of


def text_of(row: list[int], vocabulary: list[bytes]) -> str:
    """The row's text from its pieces, as a reader puts it together."""
    found = pieces_of([row], vocabulary.__getitem__)
    clusters = {each.start: each for each in found.clusters}
    words, at = [], 0
    while at < len(row):
        cluster = clusters.get(at)
        words.append(found.tokens[str(row[at])] if cluster is None else cluster.text)
        at = at + 1 if cluster is None else cluster.end
    return "".join(words)


def test_split_letters_form_a_cluster() -> None:
    """Ids have their own text, and the ids of a split letter a cluster."""
    vocabulary = [b"a", b"\xe2\x98", b"\x83", b"<|end|>", b"", b"\xc3\xa9"]
    found = pieces_of([[0, 1, 2, 3], [4, 5, 0]], vocabulary.__getitem__)
    assert found.tokens == {"0": "a", "3": "<|end|>", "4": "", "5": "é"}
    (cluster,) = found.clusters
    assert (cluster.trace, cluster.start, cluster.end, cluster.text) == (0, 1, 3, "☃")
    assert pieces_of([], vocabulary.__getitem__).tokens == {}


def test_foreign_vocabulary_id_is_marked() -> None:
    def token_bytes(token: int) -> bytes:
        if token > 1:
            raise ModelError("outside of the vocabulary")
        return b"x"

    assert pieces_of([[1, 7]], token_bytes).tokens == {"1": "x", "7": "\ufffd"}


def test_cut_off_letter_is_shown() -> None:
    """A letter that is cut off is shown as such."""
    (cluster,) = pieces_of([[0, 1]], [b"x", b"\xe2\x98"].__getitem__).clusters
    assert (cluster.start, cluster.end, cluster.text) == (1, 2, "\ufffd")


@given(st.text(max_size=40), st.data())
def test_token_pieces_join_to_text(text: str, data: st.DataObject) -> None:
    """Whatever way a text is cut into tokens its pieces are the text."""
    whole = text.encode("utf-8", "surrogatepass") if text.isascii() else text.encode("utf-8", "ignore")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=12)) | {0, len(whole)})
    vocabulary = [whole[start:end] for start, end in pairwise(cuts)]
    assert text_of(list(range(len(vocabulary))), vocabulary) == whole.decode()


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_invalid_bytes_replaced_tokens_covered(vocabulary: list[bytes]) -> None:
    """Bytes that are no text are replaced and every token is covered."""
    row = list(range(len(vocabulary)))
    found = pieces_of([row], vocabulary.__getitem__)
    covered = {at for each in found.clusters for at in range(each.start, each.end)}
    assert covered | {int(token) for token in found.tokens} == set(row)
    assert all(each.start < each.end for each in found.clusters)
