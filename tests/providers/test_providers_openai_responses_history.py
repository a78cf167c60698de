"""Responses: what a session remembers of its answers, and how little of it."""

import json
import sys
from base64 import b64encode
from typing import Any

import pytest

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.gateway.earlier_requests import MAX_REMEMBERED_BYTES, REMEMBERED, SessionMemory
from polarnode.providers.openai_responses import history
from polarnode.providers.openai_responses.history import (
    StoredInput,
    input_to_store,
    keep,
    previous,
    referenced,
    response_id,
)


def said(text: str) -> dict[str, Json]:
    return {"role": "user", "content": text}


def answer(number: int) -> dict[str, Json]:
    return {
        "id": history.item_id("msg", f"{number:x}", 0),
        "type": "message",
        "role": "assistant",
        "content": f"answer {number}",
    }


def kept(memory: SessionMemory, number: int, items: list[Any]) -> StoredInput:
    """Answer a request with these items, as the reader and the writer do."""
    found = input_to_store(memory, items, map(history.item_digest, items))
    keep(memory, response_id(f"{number:x}"), found.as_json(), [answer(number)])
    return found


def test_answer_holds_input_and_output() -> None:
    memory = SessionMemory()
    kept(memory, 1, [said("a"), said("ü")])
    assert previous(memory, "resp_1") == [said("a"), said("ü"), answer(1)]


def test_full_resend_adds_only_new() -> None:
    """A client that sends everything every time adds only what is new."""
    memory, items = SessionMemory(), [said("x" * 10_000)]
    for number in range(1, 6):
        found = kept(memory, number, items)
        assert len(found.added) < 200 or number == 1
        assert previous(memory, f"resp_{number}") == [*items, answer(number)]
        # a client spells our items its own way
        items = [*items, {**answer(number), "status": "completed"}, said(str(number))]


def test_previous_response_adds_only_new() -> None:
    """A client that builds on answers adds only what is new."""
    memory = SessionMemory()
    kept(memory, 1, [said("x" * 10_000)])
    for number in range(2, 6):
        items = [*previous(memory, f"resp_{number - 1}"), said(str(number))]
        assert len(kept(memory, number, items).added) < 300
        assert previous(memory, f"resp_{number}") == [*items, answer(number)]


def test_interleaved_agents_find_their_own() -> None:
    """Agents that take turns each find their own history."""
    memory = SessionMemory()
    lines: dict[str, list[Any]] = {name: [said(name * 1000)] for name in "abc"}
    for number in range(1, 13):
        name = "abc"[number % 3]
        assert (kept(memory, number, lines[name]).base is None) == (number <= 3)
        lines[name] = [*lines[name], answer(number), said("on")]
    assert all(f"resp_{number:x}" for number in range(1, 13))
    assert previous(memory, "resp_c")[0] == said("a" * 1000)


def test_changed_history_is_kept_whole() -> None:
    memory = SessionMemory()
    kept(memory, 1, [said("a"), said("b")])
    assert kept(memory, 2, [said("A"), said("b"), said("c")]).base is None
    assert previous(memory, "resp_2") == [said("A"), said("b"), said("c"), answer(2)]


def test_same_input_twice_adds_nothing() -> None:
    memory = SessionMemory()
    kept(memory, 1, [said("a")])
    assert kept(memory, 2, [said("a")]).added == "[]"
    assert previous(memory, "resp_2") == [said("a"), answer(2)]


def test_long_chain_reads_without_recursion() -> None:
    """A chain as long as the memory is read without recursion."""
    memory = SessionMemory()
    assert sys.getrecursionlimit() < REMEMBERED
    for number in range(1, REMEMBERED):
        base = f"resp_{number - 1:x}" if number > 1 else None
        added = StoredInput(base=base, added=json.dumps([said(str(number))]), length=number, digest="")
        keep(memory, f"resp_{number:x}", added.as_json(), [answer(number)])
    found = previous(memory, f"resp_{number:x}")
    assert [item["content"] for item in found[:-1]] == [str(number) for number in range(1, REMEMBERED)]


def test_forgotten_head_is_unknown_answer() -> None:
    """The head of a chain falls out of memory: an answer built on it is not known any more, as half of what
    was said would be a lie.
    """
    memory = SessionMemory()
    kept(memory, 1, [said("a")])
    assert kept(memory, 2, [said("a"), said("b")]).base == "resp_1"
    for number in range(REMEMBERED - 2):  # two answers and the heads are one too many now
        memory.keep(f"another {number}", None)
    for name in ("resp_1", "resp_2"):
        with pytest.raises(Refused, match="send the whole input") as caught:
            previous(memory, name)
        assert caught.value.path == "$.previous_response_id"
    assert kept(memory, 3, [said("a"), said("b"), said("c")]).base is None
    assert len(previous(memory, "resp_3")) == 4


@pytest.mark.parametrize("name", ["resp_1", "", history._HEADS_NAME, "another dialect's"])
def test_unknown_answer_is_refused(name: str) -> None:
    memory = SessionMemory()
    memory.keep("another dialect's", {"of": "its own"})
    with pytest.raises(Refused, match="not known here"):
        previous(memory, name)


def test_item_reference_finds_its_answer() -> None:
    memory = SessionMemory()
    kept(memory, 31, [said("a")])
    assert referenced(memory, "msg_1f_0", "$.input[0]") == answer(31)
    # another server's
    assert referenced(memory, "msg_67ccd2bf17f0819081ff3bb2cf6508e6", "$.input[0]") is None
    for name in ("msg_1f_1", "msg_2f_0"):
        with pytest.raises(Refused, match="send the item itself") as caught:
            referenced(memory, name, "$.input[0]")
        assert caught.value.path == "$.input[0]"


REFERENCE = "00000a0123456789"


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        (b64encode(REFERENCE.encode()).decode(), f"msg_ab12_3_{REFERENCE}"),
        ("c2ln", "msg_ab12_3"),
        ("", "msg_ab12_3"),
        ("é", "msg_ab12_3"),
    ],
)
def test_item_id_carries_answer_reference(signature: str, expected: str) -> None:
    assert history.item_id("msg", "ab12", 3, signature) == expected
    assert len(history.item_id("msg", "f" * 32, 99, signature)) <= 64


def test_answers_with_images_are_bounded() -> None:
    """Answers with images are kept up to a number of bytes."""
    memory, image = SessionMemory(), "A" * (MAX_REMEMBERED_BYTES // 4)
    for number in range(1, 20):
        kept(memory, number, [said(f"{number}"), said(image)])
    assert previous(memory, "resp_13")[0] == said("19")
    with pytest.raises(Refused, match="not known here"):
        previous(memory, "resp_10")


def test_latest_answer_kept_whatever_size() -> None:
    memory = SessionMemory()
    for number in (1, 2):
        kept(memory, number, [said(f"{number}" + "A" * MAX_REMEMBERED_BYTES)])
    assert previous(memory, "resp_2")[-1] == answer(2)
    with pytest.raises(Refused, match="not known here"):
        previous(memory, "resp_1")
    kept(memory, 3, [said("3")])  # what is dropped is no longer counted
    kept(memory, 4, [said("4")])
    assert previous(memory, "resp_3") == [said("3"), answer(3)]
