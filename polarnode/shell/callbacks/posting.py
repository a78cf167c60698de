"""One attempt: an event read, made a body, POSTed; taken, or what went wrong as a sentence.

The rule for whoever edits it: an attempt always ends, and never as an exception; nothing of the node's environment leads it elsewhere, and
neither does the receiver: it goes to the task's URL or it fails.
"""

from contextlib import aclosing
from urllib.parse import urlsplit

import httpx2
import trio
from attrs import frozen

from polarnode.errors import PolarnodeError, boundary
from polarnode.shell.callbacks.bodies import body_of
from polarnode.shell.journal import USUAL_KINDS, Filters, Journal, StoredEvent
from polarnode.shell.journal.outgoing import Owed

ATTEMPT_S = 60.0  # for one POST and its answer: a whole group of long sessions is some hundred megabytes, which a loopback takes in seconds
REPLY_BYTES = 64 << 10  # of an answer's body that is read, so that its connection can be used again; of others only the status is


class CallbackFailed(PolarnodeError):
    """An event was not taken, and why."""

    boundary = "client"


@frozen(kw_only=True)
class Poster:
    """Tells receivers. `node` is what results call this node."""

    journal: Journal
    node: str
    client: httpx2.AsyncClient

    async def told(self, owed: Owed) -> bool:
        """Whether it was taken; False where the event is not kept any more. Raises CallbackFailed when it is to be tried again."""
        event = await self._event(owed.seq)
        if event is None:
            return False
        with trio.move_on_after(ATTEMPT_S):
            with boundary(CallbackFailed, "it could not be told"):
                status = await self._posted(owed, event)
            if 200 <= status < 300:
                return True
            raise CallbackFailed(f"it answered {status}" + (", and redirects are not followed" if 300 <= status < 400 else ""))
        raise CallbackFailed(f"it gave no answer within {ATTEMPT_S:g} s")

    async def _event(self, seq: int) -> StoredEvent | None:
        page = await self.journal.events(seq - 1, filters=Filters(kinds=USUAL_KINDS), limit=1)
        return page.events[0] if page.events and page.events[0].seq == seq else None

    async def _posted(self, owed: Owed, event: StoredEvent) -> int:
        """The status of the answer."""
        body = await body_of(self.journal, event, await self.journal.task(owed.task_id), node=self.node)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(body.size),
            "Idempotency-Key": event.key,  # the same however often it comes
            "Polarnode-Event": event.kind,
            "Polarnode-Seq": str(event.seq),
        }
        async with aclosing(body.pieces()) as pieces:
            content = pieces if body.held is None else body.held
            async with self.client.stream("POST", owed.url, content=content, headers=headers) as response:
                if int(response.headers.get("content-length", REPLY_BYTES + 1)) <= REPLY_BYTES:
                    await response.aread()
                return response.status_code


def shown(url: str) -> str:
    """A URL as others may see it: what stands in a query may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"
