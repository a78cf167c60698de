"""What no model of text can see of a Responses request: described where a tool gave it, or refused."""

import json
from typing import Any

import pytest

from polarnode.core.errors import Refused
from polarnode.providers.contract import Envelope
from polarnode.providers.dialect import route
from polarnode.providers.shapes import as_unseen

URL = "data:image/png;base64," + "iVBORw0KGgo" * 1000


def read(*items: dict[str, Any]) -> Any:
    found = route("POST", "/v1/responses", {})
    assert found is not None
    return found.dialect.read(json.dumps({"model": "m", "input": items}).encode(), Envelope())


@pytest.mark.parametrize("kind", ["computer_call", "computer_call_output"])
def test_computer_items_are_refused(kind: str) -> None:
    with pytest.raises(Refused, match="sees no screen") as caught:
        read({"type": "message", "role": "user", "content": "click"}, {"type": kind, "call_id": "c"})
    assert caught.value.path == "$.input[1]"


def test_data_url_result_is_described() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"}
    said = read(call, {"type": "function_call_output", "call_id": "c", "output": URL}).conversation
    assert said.messages[-1].text == "[image/png: not shown, because this model reads text only]"


@pytest.mark.parametrize("text", ["", "data:", "see " + URL, URL + " above", "data:image/png;base64,a b"])
def test_text_about_data_stays(text: str) -> None:
    assert as_unseen(text) == text
