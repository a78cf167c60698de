"""`python -m polarnode.engine.embedded.arguments`: what is wrong with arguments for SGLang, by its own table
of them, before an engine is started. `node/checks.py` runs it.

It reads a JSON object from standard input and writes a JSON list of sentences. It takes seconds, because
SGLang imports torch.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from polarnode.core.conversation import Json
from polarnode.core.spelling import meant, nearest


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints when it is imported is no part of the answer
    found = faults(json.load(sys.stdin))
    answer.write(json.dumps(found))
    answer.close()


def faults(arguments: Mapping[str, Json]) -> list[str]:
    """A sentence for each argument that SGLang does not have, or does not take with this value."""
    from polarnode.engine.embedded.building import ensure_torchvision

    if os.environ.get("SGLANG_PLATFORM") == "polarnode_cpu":
        ensure_torchvision()
    from sglang.srt.server_args import ServerArgs

    known = get_type_hints(ServerArgs, include_extras=True)
    aliases = {
        alias.strip("-").replace("-", "_"): name
        for name, hint in known.items()
        for part in get_args(hint)[1:]
        for alias in getattr(part, "aliases", None) or ()
    }
    found = []
    for name, value in arguments.items():
        if name in known:
            fault = fault_of(value, known[name])
        else:
            near = aliases.get(name) or nearest(name, known)
            fault = "is no argument of this SGLang" + (f": did you mean {near}?" if near else "")
        if fault is not None:
            found.append(f"--engine-arg {name} {fault}")
    return found


def fault_of(value: Json, hint: Any) -> str | None:
    """What is wrong with a value, by the type of SGLang's field and its choices. None if nothing is wrong."""
    import msgspec  # a dependency of SGLang, whose fields have its types

    kind, notes = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    choices = next((each.choices for each in notes if getattr(each, "choices", None)), None)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return f"must be of another type: {str(error)[:1].lower()}{str(error)[1:]}"
    except TypeError:
        return None  # a union that msgspec cannot tell apart, so SGLang finds out
    if choices and value is not None and value not in choices:
        names = list(map(str, choices))
        return f"cannot be {value}: {meant(str(value), names)}there are {', '.join(names)}"
    return None


if __name__ == "__main__":
    main()
