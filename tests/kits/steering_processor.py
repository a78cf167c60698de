"""A logit processor that makes an engine say given ids, for tests whose answers must be known: `forced(ids,
stop)` is the order's `steering`.

The class is made inside a function and names nothing outside itself: dill then carries its code, not its
import path, and the engine's processes need no module of the tests. Rule for whoever edits it: SGLang calls
it for all requests of a batch that send this very text, and asks for nothing but the call; what it raises
ends the scheduler. It counts by `output_ids`, which lag where sampling overlaps with scheduling: start a
GPU's engine with `disable_overlap_schedule` (a CPU's has it).
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import dill  # type: ignore[import-untyped]

from polarnode.core.ports import LogitSteering


def forced(ids: Sequence[int], stop: int) -> LogitSteering:
    """Say `ids`, then `stop`, whatever the model thinks. `stop` must be among the order's stop ids, or it is
    said until `max_tokens`.
    """
    return LogitSteering(processor=processor(), parameters={"force": [*ids], "stop": stop})


@functools.cache
def processor() -> str:
    """What SGLang's `CustomLogitProcessor.to_str` would give; one text for all orders, so that one batch has
    one processor.
    """
    return json.dumps({"callable": dill.dumps(_made(), recurse=True).hex()})


def _made() -> type:
    class Forced:
        """Leaves each row one choice. `logits` [requests, vocabulary]; `parameters` a dictionary each, with
        the request itself in `__req__`.
        """

        def __call__(self, logits: Any, parameters: Any = None) -> Any:
            for row, asked in enumerate(parameters or ()):
                step = len(asked["__req__"].output_ids)
                token = asked["force"][step] if step < len(asked["force"]) else asked["stop"]
                logits[row] = -float("inf")
                logits[row, token] = 0.0
            return logits

    Forced.__module__ = "builtins"  # so that nobody looks for ours
    return Forced
