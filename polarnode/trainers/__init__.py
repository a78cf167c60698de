"""A trajectory in the format of each trainer: one module per trainer, each a pure projection.

A format holds nothing that the trajectory does not. Each module's docstring lists what its format cannot
carry. Values that a format needs beyond the trajectory (an advantage, a group's number) are arguments.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.trainers import areal, atropos, miles, nemo_rl, prime_rl, skyrl, slime, tinker, trl, verl
from polarnode.trainers.rows import Absent, Arrays, of_roles

__all__ = ["FORMATS", "Absent", "Arrays", "Format", "of_roles", "project"]


@frozen(kw_only=True)
class Format:
    """A trainer's format: what a session becomes in it, and the function that makes it with default
    arguments.
    """

    what: str
    of_session: Callable[[Trajectory, Arrays], Any]


_FORMATS_BY_NAME = {
    "verl": Format(
        what="AgentLoopOutput fields, a row each",
        of_session=lambda one, arrays: verl.agent_loop_outputs(one, arrays=arrays),
    ),
    "slime": Format(
        what="Sample fields, a row each", of_session=lambda one, arrays: slime.samples(one, arrays=arrays)
    ),
    "miles": Format(
        what="Sample fields, a row each", of_session=lambda one, arrays: miles.samples(one, arrays=arrays)
    ),
    "trl": Format(
        what="what rollout_func returns for one prompt",
        of_session=lambda one, arrays: trl.rollout_output([one], arrays=arrays),
    ),
    "prime_rl": Format(
        what="TrainingSample fields, a row each",
        of_session=lambda one, arrays: prime_rl.training_samples(one, arrays=arrays),
    ),
    "skyrl": Format(
        what="a GeneratorOutput of one session",
        of_session=lambda one, arrays: skyrl.generator_output([one], arrays=arrays),
    ),
    "nemo_rl": Format(
        what="message_log and full_result, a row each",
        of_session=lambda one, arrays: nemo_rl.results(one, arrays=arrays),
    ),
    "tinker": Format(
        what="Datum fields, a row each", of_session=lambda one, arrays: tinker.datums(one, arrays=arrays)
    ),
    "areal": Format(
        what="a rollout's tensors", of_session=lambda one, arrays: areal.rollout([one], arrays=arrays)
    ),
    "atropos": Format(
        what="the ScoredData of one session",
        of_session=lambda one, arrays: atropos.scored_data([one], arrays=arrays),
    ),
}
FORMATS: Final[Mapping[str, Format]] = MappingProxyType(_FORMATS_BY_NAME)


def project(name: str, trajectory: Trajectory, *, arrays: Arrays = "list") -> Any:
    """One session in the named format. Raises Refused for an unknown name, and for a session that the format
    cannot carry.
    """
    if name not in FORMATS:
        raise Refused(f"format must be one of {', '.join(FORMATS)}, not {name!r}", path="?format")
    return FORMATS[name].of_session(trajectory, arrays)
