"""A user's words over a source's: partial TaskSpecs as JSON, laid one over the other. Pure.

The rule for whoever edits it: an object that has a name (harness, builder, evaluator) is a program with its settings. Another name is another
program, so that the settings of the first are not given to it.
"""

from collections.abc import Mapping

from polarnode.conversation import Json

PROGRAMS = ("harness", "builder", "evaluator")
WHO = ("name", "import_path", "parts")


def laid_over(value: Mapping[str, Json], over: Mapping[str, Json]) -> dict[str, Json]:
    """`over` upon `value`: objects are merged, all else is replaced."""
    merged: dict[str, Json] = dict(value)
    for key, new in over.items():
        old = merged.get(key)
        replaces = key in PROGRAMS and isinstance(new, Mapping) and isinstance(old, Mapping) and _is_another(old, new)
        merged[key] = laid_over(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) and not replaces else new
    return merged


def _is_another(old: Mapping[str, Json], new: Mapping[str, Json]) -> bool:
    """Settings that say no name yet are of whatever program is named later."""
    return any(key in old for key in WHO) and any(key in new and new[key] != old.get(key) for key in WHO)
