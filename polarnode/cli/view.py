"""`polarnode view`: the page with the trajectories of a file, on this machine or as a folder of files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from polarnode.api.app import control_plane
from polarnode.api.bundle import Bundle
from polarnode.api.page import PageFiles
from polarnode.cli.output import open_console
from polarnode.cli.remote import trajectory_lines
from polarnode.cli.stopping import StopRequest, requested, stop_on_signals
from polarnode.core.errors import Refused
from polarnode.http.asgi import BrowserGuard
from polarnode.http.server import Address, open_server
from polarnode.node.config import TINY_MODEL


def view(file: Path, *, model: Path | None, port: int, out: Path | None) -> None:
    """Serve the page over a file until SIGINT or SIGTERM, or write it into the folder `out`, which must be
    empty or new. Raises Refused.
    """
    rows = list(trajectory_lines(file))
    bundle = Bundle.of(file.name, rows, _token_bytes(model, rows))
    console = open_console()
    if out is None:
        trio.run(_serve, bundle, port, console)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is not an empty folder: name a new one")
    for name, content in bundle.items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.body)
    console.print(
        f"written to {out}: serve it with any web server, for instance python3 -m http.server -d {out}"
    )


async def _serve(bundle: Bundle, port: int, console: Console) -> None:
    guard = BrowserGuard(bound="127.0.0.1")
    app = control_plane(PageFiles(files=bundle).rows(), token=None, guard=guard)
    async with trio.open_nursery() as nursery:
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        async with open_server(app, Address(host="127.0.0.1", port=port)) as address:
            console.print(f"serving on http://127.0.0.1:{address.port}/ui/ · Ctrl-C stops", soft_wrap=True)
            await requested(stop)
        nursery.cancel_scope.cancel()


def _token_bytes(model: Path | None, rows: Iterable[Mapping[str, Any]]) -> Callable[[int], bytes]:
    """The text of tokens: by the tokenizer of the named model, else by the embedded model's if all rows are
    of that model, else as ids.
    """
    names = {(value.get("model") or {}).get("name") for value in rows}
    folder = model or (TINY_MODEL if names == {TINY_MODEL.name} else None)
    if folder is None:
        return _number
    from polarnode.tokens.tokenizer import load_tokenizer  # part of `polarnode[node]`

    return load_tokenizer(folder).token_bytes


def _number(token: int) -> bytes:
    return f" {token}".encode()
