"""`python -m polarnode.engine.simulated`: an engine host whose answers are random. `engine/host.py` starts
it.

It starts in less than a second: nothing of torch, transformers or sglang is imported here or in what it
imports.
"""

import asyncio
import os
import socket
import sys
import tempfile
import traceback
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path
from typing import Any

from polarnode.engine.checkpoints import manifest
from polarnode.engine.embedded import lifeline
from polarnode.engine.protocol import FamilyMarks, FrameDecoder, HostFatal, Ready, Simulation, Start, encode
from polarnode.engine.simulated.answers import AnswerMaker, load_vocabulary
from polarnode.engine.simulated.cache import RESERVED_TOKENS, SimulatedCache
from polarnode.engine.simulated.serving import Serving, SimulatedWeights


class Options:
    """The command line of every engine host."""

    fd: int
    lifeline_fd: int
    tag: str


def main() -> None:
    """Read the settings, and serve until ordered to stop."""
    parser = ArgumentParser(prog="polarnode.engine.simulated")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--tag", required=True)
    options = parser.parse_args(namespace=Options())
    if os.getsid(0) != os.getpid():
        sys.exit(
            "polarnode.engine.simulated must lead a session of its own: start it with `polarnode --engine"
            " simulated`"
        )
    scratch = Path(tempfile.gettempdir())
    lifeline.watch(options.lifeline_fd, tag=options.tag, scratch=scratch)
    try:
        asyncio.run(_converse(socket.socket(fileno=options.fd)))
    finally:
        lifeline.remove_leftovers(tag=options.tag, scratch=scratch)


async def _converse(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await (await _started(reader, writer)).run()
    except Exception as error:
        # The edge of the process: the node is informed, and the traceback belongs in the log.
        traceback.print_exc()
        writer.write(encode(HostFatal(message=f"{type(error).__name__}: {error}")))
    with suppress(ConnectionError):  # the node may be gone
        writer.close()
        await writer.wait_closed()


async def _started(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Serving:
    decoder = FrameDecoder()
    while not (messages := decoder.feed(await reader.read(1 << 16))):
        if reader.at_eof():
            raise EOFError("the node closed the connection before it sent what to start")
    start = messages[0]
    if not isinstance(start, Start):
        raise ValueError(f"expected Start first, got {type(start).__name__}")
    arguments: dict[str, Any] = dict(start.arguments)
    settings, marks = Simulation(**arguments["simulation"]), FamilyMarks(**arguments["marks"])
    answers = AnswerMaker(
        vocabulary=load_vocabulary(Path(arguments["model_path"])), marks=marks, settings=settings
    )
    context, most = arguments["context_length"], settings.kv_tokens
    ready = Ready(
        vocab_size=arguments["vocab_size"],
        context_length=context,
        capacity=min(context, most - RESERVED_TOKENS) if most else context,
        max_total_tokens=most or context * settings.max_running,
        weight_version=arguments["weight_version"],
        sglang_version="simulated",
        drafts=arguments["drafts"],
    )
    updates = SimulatedWeights(version=ready.weight_version, model=manifest(Path(arguments["model_path"])))
    return Serving(
        reader=reader,
        writer=writer,
        decoder=decoder,
        answers=answers,
        settings=settings,
        ready=ready,
        updates=updates,
        cache=SimulatedCache(settings) if most else None,
        session_cache=arguments["session_cache"],
    )


if __name__ == "__main__":
    main()
