"""What a trainer's process does with polarnode and nothing of a node's: import all of it, and use both clients.

    light_program.py modules NAME…     import each; prints {name: why it could not be imported, or null}
    light_program.py client URL        read groups, project, submit; prints what came

Run by tests/test_light.py in an environment that holds what `pip install polarnode` installs.
"""

import asyncio
import importlib
import json
import sys
from typing import Any

# those that need nothing beyond what the sessions of the tests have
FORMATS_USED = ("verl", "slime", "miles", "trl", "skyrl", "nemo_rl")


def modules(*names: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            found[name] = missing.name
        else:
            found[name] = None
    return found


def client(url: str) -> dict[str, Any]:
    from polarnode.client import PolarnodeClient
    from polarnode.groups import rows_of
    from polarnode.trainers import project

    node = PolarnodeClient(url, token="secret")
    groups = list(node.groups(follow=False))
    first = groups[0].trajectories[0]
    return {
        "submitted": node.submit(
            {"instruction": "do it", "harness": {"name": "pi"}, "task_id": "mine"}
        ).task_id,
        "rows": [(row.session_id, row.advantage, row.tokens) for row in rows_of(groups)],
        "formats": [name for name in FORMATS_USED if project(name, first, arrays="numpy")],
        "asynchronous": asyncio.run(asynchronous(url)),
    }


async def asynchronous(url: str) -> list[str]:
    from polarnode.client import AsyncPolarnodeClient

    async with AsyncPolarnodeClient(url, token="secret") as node:
        return [event.key async for event in node.trajectories(follow=False)]


if __name__ == "__main__":
    made = {"modules": modules, "client": client}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(made))
