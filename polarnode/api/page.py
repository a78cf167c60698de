"""The page at `/ui/`, and the routes that only the page needs.

The page consists of files of the package, which are served as they are. It has no rights of its own: it reads
the API as any client does, with the token that its user gives it. Because it shows text that agents and
models wrote, browsers are told to run only these files, to connect only to this server, and to let no script
write HTML (Trusted Types).
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

import trio
from attrs import field, frozen
from quart import Response, request

from polarnode.api.query import read_query
from polarnode.api.service import NotFound, json_response
from polarnode.http.asgi import RouteRow
from polarnode.journal.log.port import Log

FILES: Final = Path(__file__).parents[1] / "web" / "ui"
PAGE: Final = "/ui/"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",  # the licences
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser asks each time and gets 304, so that it sees a new release at once.
    "Cache-Control": "no-cache",
}


@frozen(kw_only=True)
class PageFile:
    """One file of the page, in memory; all of them take 0.2 MB."""

    body: bytes
    content_type: str
    tag: str


def read_page_files(folder: Path = FILES) -> dict[str, PageFile]:
    """The files of the page by their path below `/ui/`. Only files of types that a browser needs are read."""
    return {
        path.relative_to(folder).as_posix(): PageFile(
            body=body, content_type=TYPES[path.suffix], tag=sha256(body).hexdigest()[:32]
        )
        for path in sorted(folder.rglob("*"))
        if path.suffix in TYPES
        for body in (path.read_bytes(),)
    }


@frozen(kw_only=True)
class PageFiles:
    """The handlers of the page's files."""

    files: Mapping[str, PageFile] = field(factory=read_page_files)

    def rows(self) -> Iterator[RouteRow]:
        yield ("GET", PAGE, self.index)
        yield ("GET", f"{PAGE}<path:name>", self.file)

    async def index(self) -> Response:
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        # This function is async although it waits for nothing, because Quart would run a plain function in a
        # thread.
        await trio.lowlevel.checkpoint()
        read_query(request.args)
        found = self.files.get(name)
        if found is None:
            raise NotFound(f"the page has no file {name[:100]!r}: it begins at {PAGE}")
        headers = {**HEADERS, "ETag": f'"{found.tag}"'}
        if request.if_none_match.contains_weak(found.tag):
            return Response(b"", 304, headers)
        return Response(found.body, 200, headers, content_type=found.content_type)


@frozen(kw_only=True)
class PageRoutes:
    """The handlers of a node: the page's files, and finished groups."""

    log: Log

    def rows(self) -> Iterator[RouteRow]:
        yield from PageFiles().rows()
        yield ("GET", "/v1/groups", self.groups)

    async def groups(self) -> Response:
        query = read_query(request.args, "limit", "until", "state", "task_id")
        found = await self.log.finished_groups(
            query.limit, until=query.until, state=query.state, task_id=query.task_id
        )
        return json_response({"groups": [dict(each) for each in found]})
