"""Server-sent events as bytes.

The rule: an event's data is JSON on one line (JSON escapes its line breaks), in UTF-8, and every event ends with an empty line. Comments
are not offered: Codex, Qwen Code and OpenClaw do not count them as life, and Gemini CLI throws the answer away when it sees one.
"""

from polarnode.conversation import Json
from polarnode.wire import dump_json

DONE = b"data: [DONE]\n\n"


def event(data: Json, *, name: str | None = None) -> bytes:
    """One event. `name` becomes its `event:` line, which Anthropic's clients need and OpenAI's do not have."""
    line = b"data: " + dump_json(data) + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line
