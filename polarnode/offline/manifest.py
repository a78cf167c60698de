"""What a folder of generated data was begun with, so that it is only ever gone on with as it was begun.

Acceptance, splits and retries are not in it: they are asked of what there is, each time. The rule for whoever edits it: a refusal names what
is different, what it was, and what to do.
"""

from collections.abc import Sequence
from hashlib import blake2b

from attrs import fields, frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.tasks import TaskSpec
from polarnode.wire import dump_json, plain, structure, task_json


@frozen(kw_only=True)
class Manifest:
    """`digest` is of all tasks as they are submitted, in order."""

    source: str
    harness: str
    model: str
    engine: str
    tasks: int
    slots: int
    digest: str
    version: int = 1

    def json(self) -> Json:
        said: Json = plain(self)
        return said

    def check(self, now: "Manifest", *, folder: str) -> None:
        """Refused when the folder was begun with something else."""
        for each in fields(Manifest):
            was, is_now = getattr(self, each.name), getattr(now, each.name)
            if was != is_now:
                what = (
                    "the tasks of the source are not the same any more" if each.name == "digest" else f"its {each.name} was {was!r}, not {is_now!r}"
                )
                raise Refused(
                    f"{folder} was begun otherwise: {what}; give the same again, or another --out (only --accept and what is exported may change)"
                )


def manifest_of(tasks: Sequence[tuple[str, TaskSpec]], *, source: str, model: str, engine: str) -> Manifest:
    """What these tasks would be begun with."""
    digest = blake2b(digest_size=16)
    for name, spec in tasks:
        digest.update(dump_json([name, task_json(spec)]) + b"\n")
    harnesses = dict.fromkeys(spec.harness.name for _, spec in tasks)
    return Manifest(
        source=source,
        harness=", ".join(harnesses),
        model=model,
        engine=engine,
        tasks=len(tasks),
        slots=sum(spec.num_samples for _, spec in tasks),
        digest=digest.hexdigest(),
    )


def read_manifest(said: Json, *, folder: str) -> Manifest:
    """The manifest of a folder. Refused when it is none."""
    try:
        return structure(said, Manifest)
    except Refused as refused:
        raise Refused(f"{folder}: generate.json can not be read ({refused}): give another --out", path=refused.path) from refused
