"""Speculative decoding that is exact, or refused: with which drafts a node may start SGLang, and which calls
they serve. Pure.

SGLang verifies drafted tokens against the target's own distribution. This was read in 0.5.23 (speculative/):
with drafts SGLang ignores `min_p`, and it ignores custom logit processors except with DFLASH. Penalties are
those of the step before a draft for all of its tokens (SGLang calls them relaxed). Thresholds under 1 accept
tokens that the target would not sample, and so does a simulated acceptance. On a CPU it takes the likeliest
token whatever the temperature, and NGRAM needs kernels that only a GPU has. `top_p`, `top_k`, temperature,
constraints and stops are exact.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from polarnode.core.conversation import Json, Sampling
from polarnode.core.errors import Refused
from polarnode.core.ports import GenerateOrder

ALGORITHM_ARGUMENT: Final = "speculative_algorithm"
DRAFT_MODEL: Final = "speculative_draft_model_path"
THRESHOLDS: Final = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
SIMULATED_VARIABLE: Final = "SGLANG_SIMULATE_ACC_LEN"  # SGLang's own variable, for its benchmarks
# The counters of drafts: fields of `Piece` and of `HostStatistics`.
COUNTED: Final = ("drafted", "accepted", "verified")


def algorithm_of(arguments: Mapping[str, Json]) -> str:
    """The algorithm that drafts, in capitals. It is empty if none does."""
    return str(arguments.get(ALGORITHM_ARGUMENT) or "").upper()


# ── at the start ────────────────────────────────────────────────────────


def draft_refusal(
    arguments: Mapping[str, Json], *, cpu: bool, routes: bool, environment: Mapping[str, str]
) -> str | None:
    """Why an engine of the node's own cannot draft with these arguments. None if it does not draft, or can.
    `cpu` says that SGLang itself runs on a CPU, and `routes` that routed experts are reported.
    """
    if reason := inexact(arguments):
        return f"--engine-arg {reason}"
    algorithm = algorithm_of(arguments)
    if not algorithm:
        return None
    if cpu:
        return (
            f"--engine-arg {ALGORITHM_ARGUMENT}={algorithm} needs a GPU: SGLang has no kernels that verify"
            " drafts on a"
            " CPU, and would take the likeliest token whatever the temperature; leave it out"
        )
    if routes and algorithm == "NGRAM":
        return (
            f"--routed-experts: SGLang reports none with {ALGORITHM_ARGUMENT}=NGRAM; leave one of them out,"
            " or take"
            " EAGLE or DFLASH"
        )
    if (number := environment.get(SIMULATED_VARIABLE)) and number not in ("0", "0.0", "-1"):
        return f"{SIMULATED_VARIABLE}={number} accepts drafts that the model would not sample: unset it"
    return None


def inexact(arguments: Mapping[str, Json]) -> str | None:
    """The argument with which drafts are not sampled from the model's own distribution, and what to do. None
    if there is none.
    """
    for name in THRESHOLDS:
        value = arguments.get(name)
        if value is not None and value != 1:
            return f"{name}={value}, which accepts tokens that the model would not sample: leave it out"
    if algorithm_of(arguments) == "UNO":
        return f"{ALGORITHM_ARGUMENT}=UNO, which gives no logprobs of sampled tokens: take another algorithm"
    return None


# ── of a call ───────────────────────────────────────────────────────────


def check_draft_call(order: GenerateOrder, algorithm: str) -> None:
    """Raise Refused, which names the field, for a call that an engine with drafts would not sample as
    asked.
    """
    if not algorithm:
        return
    name = next(_ignored_parameters(order.sampling), None) or (
        "steering" if order.steering is not None else None
    )
    if name is not None:
        raise Refused(
            f"{name} cannot be held by this engine, which drafts tokens ({ALGORITHM_ARGUMENT}={algorithm}):"
            " leave it"
            " out, or start the node without drafts",
            path=f"$.{name}",
        )


def _ignored_parameters(sampling: Sampling) -> Iterator[str]:
    neutral = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    for name, value in neutral.items():
        if getattr(sampling, name) not in (None, value):
            yield name
