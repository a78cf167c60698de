"""How values are spelt in the files harnesses read. JSON is JSON and YAML's subset; only TOML needs a writer of its own.

Rule for whoever edits it: what a task says (names, URLs, arguments) is data in every spelling, whatever characters it holds.
"""

import json
import re
from collections.abc import Iterator, Mapping

from polarnode.conversation import Json
from polarnode.tasks import McpServerSpec

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def json_bytes(value: Json) -> bytes:
    """A config file in JSON, which is YAML too."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def toml_bytes(table: Mapping[str, Json]) -> bytes:
    """A config file in TOML; nulls have no spelling there and are left out."""
    return ("\n".join(_table(table, ())) + "\n").encode()


def _table(table: Mapping[str, Json], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"[{'.'.join(_key(part) for part in path)}]"
    for name, value in table.items():
        if not isinstance(value, dict) and value is not None:
            yield f"{_key(name)} = {_value(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _table(value, (*path, name))


def _key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else _text(name)


def _value(value: Json) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(part) for part in value)}]"
    return json.dumps(value)


def _text(value: str) -> str:
    """A JSON string is a TOML string but for DEL, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def server_json(server: McpServerSpec, *, url: str = "url", kinds: tuple[str, str] | None = None) -> dict[str, Json]:
    """An MCP server as most harnesses read it. `url`: their word for a streamable HTTP address; `kinds`: their types (stdio, http), if they want one."""
    stdio = server.command is not None
    kind: dict[str, Json] = {} if kinds is None else {"type": kinds[0] if stdio else kinds[1]}
    if stdio:
        return {**kind, "command": server.command, "args": list(server.args), "env": dict(server.env)}
    return {**kind, url: server.url, "headers": dict(server.headers)}
