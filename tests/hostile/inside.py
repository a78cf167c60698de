"""What every script of the suite has in its container, with nothing but Python's standard library: a call of
the model, and a report.

`turn()` makes one captured turn, so that each test can see that it was kept. `tell(name=...)` adds facts to a
report that the session's evaluator hands on, and says them in the log.
"""

import http.client
import json
import os
import socket
from typing import Any

PORT = 8080
REPORT = "/work/report.json"
_told: "dict[str, Any]" = {"reward": 1}


def turn(text: str = "hello") -> int:
    """One call of the model with the session's own key; its status."""
    return ask(
        "POST",
        "/v1/chat/completions",
        call(text),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )[0]


def call(text: str = "hello") -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    ).encode()


def ask(
    method: str, path: str, body: bytes = b"", headers: "dict[str, str] | None" = None
) -> "tuple[int, bytes]":
    """A request through the door; its status and body."""
    asking = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    try:
        asking.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        answer = asking.getresponse()
        return answer.status, answer.read()
    finally:
        asking.close()


def raw(data: bytes, *, wait_s: float = 20.0) -> bytes:
    """Bytes through the door as they are; what came back until it closed or was silent."""
    with socket.create_connection(("127.0.0.1", PORT), timeout=wait_s) as asking:
        got = b""
        try:
            asking.sendall(data)
            while piece := asking.recv(65536):
                got += piece
        except OSError:
            pass
        return got


def tell(**facts: Any) -> None:
    """Add facts to the report."""
    _told.update(facts)
    print(json.dumps(facts), flush=True)
    with open(REPORT, "w") as file:
        json.dump(_told, file)


def outcome(work: Any) -> str:
    """What became of something that should fail: the error's name, or DONE."""
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return "DONE"
