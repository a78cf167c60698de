"""Signed references: found in any spelling, and never believed when forged."""

import re
from base64 import b64encode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.merge.attach import ProvenReference, References

OURS = References("session-a", b"secret of the node")
INDEXES = st.integers(min_value=0, max_value=0xFFFFFF)


def test_ref_is_signed_turn_index() -> None:
    """A reference is six digits of index and ten that sign it."""
    assert re.fullmatch(r"00000c[0-9a-f]{10}", OURS.ref(12))
    assert OURS.ref(12) == OURS.ref(12)
    assert OURS.ref(12)[6:] != OURS.ref(13)[6:]


def test_long_id_is_searched_without_signing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id full of places for a reference signs nothing."""
    ours = References("session-a", b"secret of the node")
    own, signed = ours.call_id(0, 0), 0

    def digest(*_: object) -> bytes:
        nonlocal signed
        signed += 1
        return b"\0" * 32

    monkeypatch.setattr("polarnode.merge.attach.hmac.digest", digest)
    assert ours.find_turns(["f" * 96, "0" * 96, "call_" + "000001" * 15, own]) == {0}
    assert signed == 0


def test_unissued_reference_is_not_believed() -> None:
    given_out = References("session-a", b"secret of the node").ref(5)
    asked = References("session-a", b"secret of the node")
    assert asked.find_turn(given_out) is None
    asked.ref(5)
    assert asked.find_turn(given_out) == 5


@given(
    index=INDEXES,
    k=st.integers(min_value=0, max_value=5000),
    prefix=st.sampled_from(["call_", "toolu_", "fc_", "chatcmpl-tool-"]),
)
def test_call_id_valid_everywhere_and_proven(index: int, k: int, prefix: str) -> None:
    """A call id fits every provider and is proven."""
    call_id = OURS.call_id(index, k, prefix)
    assert len(call_id) <= 40
    assert re.fullmatch(r"[A-Za-z0-9_-]+", call_id)
    assert OURS.locate(call_id) == ProvenReference(index=index, rest=f"{k:02x}")


def test_call_ids_are_unique_per_session() -> None:
    made = [OURS.call_id(index, k) for index in range(200) for k in range(20)]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    "spell",
    [
        lambda given: given,
        lambda given: given.replace("_", ""),  # OpenClaw
        lambda given: given.replace("call_", "toolu_"),
        lambda given: given.replace("call_", "toolu"),
        lambda given: given.replace("call_", "fc_"),
        lambda given: given.replace("call_", "fc"),
        lambda given: given.replace("call_", ""),
        lambda given: given.replace("call_", "call-"),
        lambda given: given.upper(),
        lambda given: f"  {given} ",
        lambda given: f"functions.bash:{given}",
        lambda given: f"{given}_0",
    ],
)
@pytest.mark.parametrize("index", [0, 7, 0xABCDEF])
def test_harness_spellings_are_still_proven(spell, index: int) -> None:  # type: ignore[no-untyped-def]
    assert OURS.find_turn(spell(OURS.call_id(index, 3))) == index


@given(index=INDEXES)
def test_signatures_proven_raw_or_decoded(index: int) -> None:
    """Signatures look like base64 and are proven as they are or decoded."""
    signature = OURS.signature(index)
    assert signature
    assert re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", signature)
    assert OURS.signature(index) == signature
    for spelling in (
        signature,
        signature.rstrip("="),
        OURS.ref(index),
        urlsafe_b64encode(OURS.ref(index).encode()).decode(),
    ):
        assert OURS.find_turn(spelling) == index


@given(
    opaque=st.one_of(
        st.text(),
        st.text("0123456789abcdef", min_size=14, max_size=60),
        st.binary(max_size=60).map(lambda data: b64encode(data).decode()),
    )
)
def test_whatever_else_comes_proves_nothing(opaque: str) -> None:
    assert OURS.find_turn(opaque) is None


@given(index=INDEXES, place=st.integers(0, 15), digit=st.sampled_from("0123456789abcdef"))
def test_a_changed_digit_is_a_forgery(index: int, place: int, digit: str) -> None:
    ref = OURS.ref(index)
    forged = ref[:place] + digit + ref[place + 1 :]
    assert OURS.find_turn(f"call_{forged}00") == (index if forged == ref else None)


@given(index=INDEXES)
def test_another_session_or_another_node_proves_nothing(index: int) -> None:
    call_id = OURS.call_id(index, 0)
    for other in (References("session-b", b"secret of the node"), References("session-a", b"another secret")):
        other.ref(index)  # it has a turn of the same index
        assert other.find_turn(call_id) is None


def test_session_and_index_signed_apart() -> None:
    assert References("s:1", b"k").ref(2)[6:] != References("s", b"k").ref(12)[6:]
    assert References("s1", b"k").ref(2)[6:] != References("s", b"k").ref(12)[6:]


def test_long_opaque_field_searched_in_part() -> None:
    assert OURS.find_turn("x" * 1_000_000 + OURS.ref(1)) is None
    assert OURS.find_turn("0" * 1_000_000) is None


def test_find_refs_gathers_proven_ones() -> None:
    given = [
        OURS.call_id(3, 0),
        OURS.call_id(3, 1),
        OURS.signature(9),
        "call_forged",
        References("other", b"k").call_id(4, 0),
    ]
    assert OURS.find_turns(given) == {3, 9}


def test_secret_is_not_shown() -> None:
    assert "secret" not in repr(OURS)
