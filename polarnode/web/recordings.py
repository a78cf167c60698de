"""Requests as harnesses sent them, one file each, for `polarnode replay` and for whoever wonders what a harness says.

Off unless a setting names a folder. The rule for whoever edits it: what is written is the request as it came, but for its key, which opens
a session; nothing of it is ever read back by the node.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final, cast

import orjson
import trio
from attrs import define, field

from polarnode.conversation import Json
from polarnode.providers.dialect import session_keys
from polarnode.web.stream import header_map

logger = logging.getLogger(__name__)

MASK: Final = "key-of-this-session"  # stands wherever the key stood, so that a target with the key in its path keeps its shape


@define(eq=False)
class Recordings:
    """The requests of each session in a folder of its own, `01-request.json` and on, in the order they were whole."""

    folder: Path
    _count: Counter[str] = field(factory=Counter, init=False)

    async def keep(self, session_id: str, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Write one request. What can not be written is logged: a full disk must not end the sessions that are looked at."""
        self._count[session_id] += 1
        file = self.folder / session_id / f"{self._count[session_id]:02}-request.json"
        try:
            await trio.to_thread.run_sync(lambda: _write(file, recorded(method, target, list(headers), body)))
        except OSError as error:
            logger.error("request %s was not recorded: %s", file, error)


def recorded(method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """The file's content: headers in wire order, a JSON body as the very text that came, any other body as text."""
    keys = session_keys(target, header_map(headers))
    pairs: list[Json] = [[name.decode("latin1"), _masked(value.decode("latin1"), keys)] for name, value in headers]
    said: dict[str, Json] = {"method": method, "target": _masked(target, keys), "headers": pairs, "body": _body(body)}
    return orjson.dumps(said, option=orjson.OPT_APPEND_NEWLINE)


def _masked(text: str, keys: tuple[str, ...]) -> str:
    for key in keys:
        text = text.replace(key, MASK)
    return text


def _body(body: bytes) -> Json:
    if not body:
        return None
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")
    return cast(Json, orjson.Fragment(body))


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
