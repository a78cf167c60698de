"""A chat-completions endpoint on loopback for recording and evaluating real harnesses.

It answers every request with the result of one function, whole or streamed as requested. It is a test
instrument of this example, not a server.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One tool call as a model writes it; `arguments` is text, because models write text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """The model's output in one turn."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thinking: str = field(default="", compare=False)


Respond = Callable[[Json], Answer]


def message(answer: Answer, turn: int) -> Json:
    """The answer as an OpenAI assistant message."""
    body: Json = {"role": "assistant", "content": answer.text}
    if answer.calls:
        body["tool_calls"] = [
            {
                "index": i,
                "id": f"call_{turn}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(answer.calls)
        ]
    return body


def completion(answer: Answer, turn: int, key: str) -> Json:
    """A chat completion (`key` message) or its only chunk (`key` delta)."""
    finish = "tool_calls" if answer.calls else "stop"
    kind = "chat.completion" if key == "message" else "chat.completion.chunk"
    choice = {"index": 0, key: message(answer, turn), "finish_reason": finish}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": f"turn-{turn}",
        "object": kind,
        "created": 0,
        "model": "local-model",
        "choices": [choice],
        "usage": usage,
    }


class _Handler(BaseHTTPRequestHandler):
    """Reads one JSON request, asks the server's `respond`, writes the answer."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer one chat request."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        assert isinstance(server, _Server)
        answer, turn = server.ask(request)
        if request.get("stream"):
            self._stream(completion(answer, turn, "delta"))
        else:
            self._send("application/json", json.dumps(completion(answer, turn, "message")))

    def _stream(self, chunk: Json) -> None:
        self._send("text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that only the harness's own output is shown."""


class _Server(ThreadingHTTPServer):
    """Keeps the requests it saw, and answers them one at a time."""

    daemon_threads = True

    def __init__(self, respond: Respond) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Json] = []
        self._respond = respond
        self._lock = threading.Lock()

    def ask(self, request: Json) -> tuple[Answer, int]:
        """Record the request and return the answer with its turn number."""
        with self._lock:
            self.requests.append(request)
            return self._respond(request), len(self.requests)


@contextmanager
def endpoint(respond: Respond) -> Iterator[tuple[str, list[Json]]]:
    """Serve `respond` on loopback; yields the base URL and the growing list of requests."""
    server = _Server(respond)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", server.requests
    finally:
        server.shutdown()
        server.server_close()
