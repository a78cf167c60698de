"""`polarnode` whose nodes are hollow: the real commands, settings and sockets, with containers and engines in
memory. A model's folder is the embedded one's.

    python tests/kits/hollow_cli.py --gpus 0-7 --model /models/Qwen3-8B
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fakes_runtime
from hollow_node import HollowEngine, HollowImages, HollowRuntimes, hollow

from polarnode.cli.main import main
from polarnode.fleet import local_nodes
from polarnode.gateway.live_sessions import LiveSessions
from polarnode.node import checks, opening
from polarnode.node.config import TINY_MODEL

MADE: list[LiveSessions] = []


@asynccontextmanager
async def engines(*_: Any) -> AsyncIterator[HollowEngine]:
    yield HollowEngine(context_length=1 << 20)


@asynccontextmanager
async def runtimes(settings: Any) -> AsyncIterator[HollowRuntimes]:
    async def program(call: fakes_runtime.Call) -> int:
        return await hollow(MADE[0])(call)

    found = HollowRuntimes(settings=settings)
    found.programs["hollow"] = found.programs["bash"] = program
    yield found


def live_sessions() -> LiveSessions:
    MADE.append(LiveSessions())
    return MADE[-1]


if __name__ == "__main__":
    patched: dict[str, Any] = {
        "_open_engines": engines,
        "open_runtimes": runtimes,
        "Images": lambda **_: HollowImages(),
        "LiveSessions": live_sessions,
    }
    vars(opening).update(patched)
    vars(checks)["refuse_unfit"] = lambda config: None  # no GPU and no Podman is needed
    vars(local_nodes)["NODE_COMMAND"] = (str(Path(__file__)),)  # those that it starts are hollow too
    arguments = [str(TINY_MODEL) if each.startswith("/models/") else each for each in sys.argv[1:]]
    main(arguments)
