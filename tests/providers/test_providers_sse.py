"""Events as bytes."""

import json

from hypothesis import given
from hypothesis import strategies as st

from polarnode.providers.contract import DONE, event


def test_event_named_only_when_asked() -> None:
    assert event({"a": 1}) == b'data: {"a":1}\n\n'
    assert event({"a": 1}, name="ping") == b'event: ping\ndata: {"a":1}\n\n'
    assert DONE == b"data: [DONE]\n\n"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_text_breaks_an_event(text: str) -> None:
    """Line breaks of every kind are escaped or inside a line: CR, LF, U+2028, NEL."""
    sent = event({"text": text})
    assert sent.count(b"\n") == 2
    assert b"\r" not in sent
    assert json.loads(sent.removeprefix(b"data: ")) == {"text": text}
