"""`python -m polarnode.engine.embedded`: the child process around one SGLang engine. `engine/host.py` starts
it.

`multiprocessing` imports this module again in each of SGLang's own children. So nothing but definitions may
happen on import, and neither torch nor sglang may be imported at the top of this module or of those it
imports.
"""

import asyncio
import os
import socket
import sys
import tempfile
import traceback
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

from polarnode.core.conversation import Json
from polarnode.engine.embedded import lifeline
from polarnode.engine.embedded.building import build, describe
from polarnode.engine.embedded.control import Control
from polarnode.engine.embedded.serving import Serving
from polarnode.engine.protocol import FrameDecoder, HostFatal, Start, encode


class Options:
    """The command line: two inherited descriptors, and the tag that names all semaphores and shared memory of
    this host.
    """

    fd: int
    lifeline_fd: int
    tag: str


def main() -> None:
    """Read the settings, build the engine, and serve until ordered to stop. The process leaves by `_exit`,
    because SGLang's exit hooks kill whatever they find.
    """
    options = _parse_options()
    if os.getsid(0) != os.getpid():
        sys.exit(
            "polarnode.engine.embedded must lead a session of its own: start it with `polarnode --cpu` or"
            " `polarnode --gpus 0`"
        )
    for inherited in (options.fd, options.lifeline_fd):
        os.set_inheritable(inherited, False)  # SGLang's children must not keep our end open
    scratch = Path(tempfile.gettempdir())
    lifeline.watch(options.lifeline_fd, tag=options.tag, scratch=scratch)
    try:
        _serve(socket.socket(fileno=options.fd), options.tag)
    # The edge of the process: the node has been informed, and the traceback belongs in the log.
    except Exception:
        traceback.print_exc()
        lifeline.end_session(tag=options.tag, scratch=scratch)
    lifeline.remove_leftovers(tag=options.tag, scratch=scratch)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _parse_options() -> Options:
    parser = ArgumentParser(prog="polarnode.engine.embedded")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--tag", required=True)
    return parser.parse_args(namespace=Options())


def _serve(connection: socket.socket, tag: str) -> None:
    decoder = FrameDecoder()
    try:
        engine = build(_arguments(connection, decoder), tag=tag)
        ready = describe(engine)
    except Exception as error:
        connection.sendall(encode(HostFatal(message=f"{type(error).__name__}: {error}")))
        raise

    async def run() -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        control = Control(engine=engine, version=ready.weight_version)
        serving = Serving(
            engine=engine,
            reader=reader,
            writer=writer,
            decoder=decoder,
            control=control,
            experts=ready.experts,
        )
        serving.send(ready)
        await serving.run()

    engine.loop.run_until_complete(run())


def _arguments(connection: socket.socket, decoder: FrameDecoder) -> Mapping[str, Json]:
    while data := connection.recv(1 << 16):
        for message in decoder.feed(data):
            if not isinstance(message, Start):
                raise ValueError(f"expected Start first, got {type(message).__name__}")
            return message.arguments
    raise EOFError("the node closed the connection before it sent what to start")


if __name__ == "__main__":
    main()
