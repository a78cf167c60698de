"""Responses: what clients carry for us comes back as it went."""

import re
import zlib
from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.providers.openai_responses.history import MAX_UNSEALED_BYTES, SealedContent, seal, unseal
from polarnode.providers.openai_responses.transcript import Transcript

words = st.text(st.characters(exclude_categories=["Cs"]))


@given(words, words, st.none() | words)
def test_what_is_sealed_is_opened(signature: str, thinking: str, summary: str | None) -> None:
    sealed = seal(SealedContent(signature=signature, thinking=thinking, summary=summary))
    assert re.fullmatch(r"[A-Za-z0-9_-]+", sealed)
    assert unseal(sealed) == SealedContent(signature=signature, thinking=thinking, summary=summary)


def test_empty_summary_is_a_summary() -> None:
    assert unseal(seal(SealedContent(summary=""))) == SealedContent(summary="")


def test_seal_is_small_and_compressed() -> None:
    assert len(seal(SealedContent(signature="MDAwMDAxYWJjZGVmMDEyMw=="))) < 96
    thinking = "I should look at the file first. " * 100
    assert len(seal(SealedContent(thinking=thinking))) < len(thinking) / 10


@pytest.mark.parametrize(
    "foreign",
    [
        "",
        "gAAAAABo",
        "pn1_",
        "pn1_!!!",
        "pn1_AAAA",
        seal(SealedContent(thinking="x"))[:-6],
        "pn1_ü",
        seal(SealedContent(thinking="x")).replace("pn1", "pn2"),
    ],
)
def test_foreign_seal_stays_closed(foreign: str) -> None:
    assert unseal(foreign) is None


def forged(data: bytes) -> str:
    return "pn1_" + urlsafe_b64encode(zlib.compress(data, 9)).decode()


@pytest.mark.parametrize("data", [b"[]", b"5", b"no json", b"\xff", b""])
def test_forged_data_opens_to_nothing(data: bytes) -> None:
    assert unseal(forged(data)) is None


def test_wrong_typed_fields_are_none() -> None:
    assert unseal(forged(b'{"s":1,"t":[],"c":{},"new":1}')) == SealedContent()


def test_oversized_seal_is_not_unpacked() -> None:
    assert unseal(forged(b'{"t":"' + b"a" * (17 << 20) + b'"}')) is None


def test_sealed_items_share_one_bound() -> None:
    """The sealed items of a request have a bound together."""
    sealed = seal(SealedContent(thinking="a" * (MAX_UNSEALED_BYTES // 3)))
    transcript = Transcript()
    for _ in range(5):
        transcript.read(
            {"type": "reasoning", "id": "x", "encrypted_content": sealed, "summary": []}, "$.input[0]"
        )
    transcript.close()
    assert sum(len(message.thinking) for message in transcript.messages) <= MAX_UNSEALED_BYTES
