"""Our ids, come back from Google's clients."""

import pytest

from polarnode.merge.attach import References
from polarnode.providers.google.write import signature_call_id, to_node_id

SESSION = References("s1", b"secret")
OURS = SESSION.call_id(3, 1)


@pytest.mark.parametrize("name", ["go", "mcp__server__go", ""])
def test_function_prefix_of_id_is_removed(name: str) -> None:
    """A function's name before our id is taken off."""
    assert to_node_id(f"{name}__{OURS}", name) == OURS
    assert to_node_id(OURS, name) == OURS


@pytest.mark.parametrize(
    "other",
    ["go__1", "run_shell_command_1795231589034_0", "stay__call_0123456789abcdef00", "call_1", "go__", ""],
)
def test_ids_of_another_kind_pass_unchanged(other: str) -> None:
    assert to_node_id(other, "go") == other


def test_signature_names_calls_of_turn() -> None:
    assert [signature_call_id(SESSION.signature(3), place) for place in (0, 1, 17)] == [
        SESSION.call_id(3, k) for k in (0, 1, 17)
    ]


@pytest.mark.parametrize(
    "other",
    [None, "", "skip_thought_signature_validator", "c2ln", "not base64!", "ü", "MDAwMDAwYWJjZGVmMDEyMzQ="],
)
def test_foreign_signature_names_nothing(other: str | None) -> None:
    assert signature_call_id(other, 0) is None
