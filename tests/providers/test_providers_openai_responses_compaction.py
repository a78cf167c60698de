"""Responses: a history as one item, there and back."""

from polarnode.core.conversation import Message
from polarnode.merge.roles import holds_summary
from polarnode.providers.openai_responses.history import INSTRUCTION, retold


def test_summary_is_recognised() -> None:
    """Lineage then says why the conversation begins anew."""
    assert holds_summary(
        (Message(role="system", text="Code."), Message(role="user", text=retold("We did it.")))
    )
    assert retold("We did it.").endswith("\n\nWe did it.")
    assert retold(" ").endswith("(It wrote nothing.)")


def test_instruction_forbids_tool_calls() -> None:
    assert "Do not call any tools" in INSTRUCTION
