"""The sampling of a session that is trained: as its trainer says, and without anything else that moves a
logprob.

Recorded logprobs are after penalties and before cuts (docs/token-fidelity.md), and a trainer computes its own
without either. A harness's penalty would give the trainer wrong ratios, and a cut would sample another
distribution than the one that the trainer differentiates.
"""

from collections.abc import Mapping
from typing import Final

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused

# Sampling with temperature alone, whatever a harness requests.
UNCUT: Final[Mapping[str, Json]] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
# Trainers divide logits by their own temperature; one that names none divides by this.
DEFAULT_TEMPERATURE: Final = 1.0


def trained_sampling(own: Json, given: Mapping[str, Json]) -> dict[str, Json]:
    """The sampling of a task: the trainer's `given`, over UNCUT, over the task's `own`. A None counts as not
    given.

    Raises Refused naming the field if the task has a cut or a penalty that the trainer does not know of.
    """
    if own is not None and not isinstance(own, dict):
        raise Refused("sampling must be an object", path="$.sampling")
    named = {name: value for name, value in (own or {}).items() if value is not None}
    asked = {**UNCUT, **{name: value for name, value in given.items() if value is not None}}
    for name in UNCUT:
        if named.get(name, asked[name]) != asked[name]:
            raise Refused(
                f"sampling.{name} of the task is {named[name]}, and this trainer samples with {asked[name]}:"
                " its loss would take the recorded logprobs for those of another distribution. Leave it out"
                " of the task; the trainer's own configuration says how sessions are sampled",
                path=f"$.sampling.{name}",
            )
    return {"temperature": DEFAULT_TEMPERATURE, **named, **asked}
