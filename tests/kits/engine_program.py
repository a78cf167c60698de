"""A program that speaks the engine host's protocol without SGLang, so that the lives and deaths of a host can
be tested in milliseconds.

Run as `python engine_program.py --tag T --fd N --lifeline-fd M`; `model_path` in Start names a script: words
separated by `+` before the last slash-free part, see `serve`.
"""

import os
import signal
import socket
import sys
import threading
from array import array
from pathlib import Path

from polarnode.engine.protocol import (
    Abort,
    BeginUpdate,
    CheckUpdate,
    CommitUpdate,
    Continue,
    Done,
    FrameDecoder,
    Generate,
    HostFatal,
    LoadDisk,
    LoadTensors,
    Message,
    Pause,
    Piece,
    Ready,
    RollBack,
    Shutdown,
    Start,
    encode,
)


def main() -> None:
    said = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    lifeline = int(said["--lifeline-fd"])
    threading.Thread(target=lambda: os.read(lifeline, 1) or os.killpg(0, signal.SIGKILL), daemon=True).start()
    serve(socket.socket(fileno=int(said["--fd"])))


def serve(connection: socket.socket) -> None:
    decoder = FrameDecoder()
    version = "0"
    while data := connection.recv(65536):
        for message in decoder.feed(data):
            match message:
                case Start(arguments=arguments):
                    start(connection, str(arguments["script"]), Path(str(arguments["counter"])))
                case Generate(rid=rid, prompt=prompt):
                    generate(connection, rid, array("i", prompt).tolist(), version)
                case Abort(rid=rid):
                    say(connection, Piece(rid=rid, ids=b"", logprobs=b"", version=version, finish="abort"))
                case LoadDisk(call=call, path=path):
                    print("update", path, flush=True)
                    update(connection, call, path)
                case LoadTensors(call=call, payloads=payloads):
                    update(connection, call, payloads[0].decode())
                case CommitUpdate(call=call, version=wanted):
                    version = wanted
                    say(connection, Done(call=call, ok=True))
                case (
                    Pause(call=call)
                    | Continue(call=call)
                    | BeginUpdate(call=call)
                    | CheckUpdate(call=call)
                    | RollBack(call=call)
                ):
                    print(type(message).__name__, flush=True)
                    say(connection, Done(call=call, ok=True))
                case Shutdown():
                    print("asked to end", flush=True)
                    return


def update(connection: socket.socket, call: int, words: str) -> None:
    """Weights whose name has `bad` do not load, `deadly` ones end the program, `endless` ones never come."""
    if "deadly" in words:
        os.kill(os.getpid(), signal.SIGKILL)
    if "endless" not in words:
        say(connection, Done(call=call, ok="bad" not in words, message=words))


def start(connection: socket.socket, script: str, counter: Path) -> None:
    """`always_fail`, `port_once` (fails the first time on a taken port), `deaf` (never ready), or `serve`."""
    lives = int(counter.read_text()) + 1 if counter.exists() else 1
    written = counter.with_suffix(f".{os.getpid()}")
    written.write_text(str(lives))
    written.replace(counter)  # whole, whenever this program is killed
    if script == "always_fail":
        print("Traceback\nRuntimeError: No CUDA GPUs are available", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if script == "port_once" and lives == 1:
        say(connection, HostFatal(message="OSError: [Errno 98] Address already in use"))
        os._exit(1)
    if script != "deaf":
        say(
            connection,
            Ready(
                vocab_size=100,
                context_length=64,
                capacity=60,
                max_total_tokens=64,
                host_tokens=100,
                weight_version="0",
                sglang_version="0",
            ),
        )


def generate(connection: socket.socket, rid: str, prompt: list[int], version: str) -> None:
    """Prompt [1] is answered whole; [2] begins and hangs; [3] kills the program after its first token; [4]
    talks nonsense; [5] sends what only a node may; [6] sends a token that its vocabulary has not.
    """
    one = Piece(
        rid=rid, ids=array("i", [7]).tobytes(), logprobs=array("f", [-0.5]).tobytes(), version=version
    )
    say(connection, one)
    match prompt[0]:
        case 1:
            say(
                connection,
                Piece(rid=rid, ids=one.ids, logprobs=one.logprobs, version=version, finish="length"),
            )
        case 3:
            os.kill(os.getpid(), signal.SIGKILL)
        case 4:
            connection.sendall(b"\0\0\0\1\xc1")
        case 5:
            say(connection, Abort(rid=rid))
        case 6:
            say(
                connection,
                Piece(rid=rid, ids=array("i", [100]).tobytes(), logprobs=one.logprobs, version=version),
            )


def say(connection: socket.socket, message: Message) -> None:
    connection.sendall(encode(message))


if __name__ == "__main__":
    main()
