"""What the handlers of every Quart app here are written with: the rows of its table, and the body of a request.

The rule for whoever edits it: nothing here knows a route, or what a body means.
"""

from collections.abc import Awaitable, Callable

from quart import Response, request

from polarnode.conversation import Json
from polarnode.wire import read_json

RouteRow = tuple[str, str, Callable[..., Awaitable[Response]]]  # method, path, handler


async def body_bytes() -> bytes:
    body = await request.get_data()
    return body if isinstance(body, bytes) else body.encode()  # Quart's annotation allows text, which only as_text=True gives


async def body_json() -> Json:
    """The request's body, or `Refused`: an empty one is no JSON."""
    return read_json(await body_bytes())


async def body_json_or(nothing: Json) -> Json:
    """The request's body; `nothing` where there is none."""
    body = await body_bytes()
    return read_json(body) if body.strip() else nothing
