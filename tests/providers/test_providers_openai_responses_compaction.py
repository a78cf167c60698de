"""Responses: a history as one item, there and back."""

from polarnode.core.conversation import Message
from polarnode.merge.roles import holds_summary
from polarnode.providers.openai_responses.history import INSTRUCTION, retold


def test_14_20_what_stands_for_a_history_is_known_as_that() -> None:
    """Lineage then says why the conversation begins anew."""
    assert holds_summary(
        (Message(role="system", text="Code."), Message(role="user", text=retold("We did it.")))
    )
    assert retold("We did it.").endswith("\n\nWe did it.")
    assert retold(" ").endswith("(It wrote nothing.)")


def test_the_model_is_asked_for_text() -> None:
    assert "Do not call any tools" in INSTRUCTION
