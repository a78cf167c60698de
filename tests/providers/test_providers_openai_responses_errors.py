"""Responses: what a fault is called inside a stream."""

from typing import Any, get_args

import pytest

from polarnode.providers.contract import Fault, FaultKind
from polarnode.providers.openai_responses.write import stream_error

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
# What may be tried again: its connection is broken, or its status says so.
RETRIED = ("overloaded", "engine_failed", "cancelled")


@pytest.mark.parametrize("kind", KINDS)
def test_only_final_faults_sent(kind: FaultKind) -> None:
    """Codex ends its run on these codes and tries again on `server_error` and `rate_limit_exceeded`; a broken
    connection it always tries again.
    """
    said: Any = stream_error(Fault(kind=kind, message="m"))
    if kind in RETRIED:
        assert said is None
    else:
        assert said["code"] == ("context_length_exceeded" if kind == "context_too_long" else "invalid_prompt")
        assert said["message"]
