"""What Polar's face needs of the node: the same service trainers have, and a look at what is under way.

The rule for whoever edits it: the face decides nothing that the node does not decide for its own routes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from attrs import field, frozen

from polarnode.records import Trajectory
from polarnode.shell.captures.capture import CaptureStatus, Opened
from polarnode.shell.glances import SessionStatus
from polarnode.shell.journal import Journal
from polarnode.shell.journal.recent import Recent
from polarnode.shell.weights import PauseOrder
from polarnode.tasks import CaptureEnd, CaptureSpec
from polarnode.web.control_plane.service import Service


class CapturesService(Protocol):
    """`shell.captures.Captures`, as the gateway's sessions see it."""

    async def begin(self, spec: CaptureSpec) -> Opened: ...

    async def end(self, session_id: str, said: CaptureEnd) -> Trajectory | None: ...

    def list(self) -> tuple[CaptureStatus, ...]: ...


class Generation(Protocol):
    """Of `shell.weights.Weights`: generation held and let go."""

    async def pause(self, order: PauseOrder) -> object: ...

    async def resume(self) -> object: ...


@frozen(kw_only=True)
class PolarHouse:
    """`sessions` are those that are not over, `end_session` ends one with what it has, `volumes` the folders of this machine that tasks may see."""

    service: Service
    journal: Journal
    generation: Generation
    captures: CapturesService
    sessions: Callable[[], Iterable[SessionStatus]]
    end_session: Callable[[str], bool]
    node_id: str
    model: str
    volumes: tuple[str, ...] = ()
    recent: Recent = field(factory=Recent)  # SessionResults that were made lately
    called_off: dict[str, str] = field(factory=dict)  # tasks that were cancelled before they came

    def live(self) -> Mapping[str, SessionStatus]:
        """Sessions that are not over, by id."""
        return {status.session_id: status for status in self.sessions() if status.outcome is None}
