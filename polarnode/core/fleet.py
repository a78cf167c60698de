"""Values that the front of a fleet and its nodes exchange: they are the bodies of the routes /v1/fleet/….

Invariant: a task that a fleet keeps has one owner, the journal that holds its row with the highest epoch and
the role `home`. Every finished place is in the second home's journal before home gives its event a number.
Times are seconds since the epoch.
"""

from collections.abc import Mapping
from typing import Final, Literal
from urllib.parse import quote, urlencode

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.task import TaskSpec

Role = Literal["home", "second", "former"]
FLEET: Final = "/v1/fleet/tasks"


@frozen(order=True)
class Epoch:
    """Which decision about a task's homes is the later one: the term of the front that made it, then a count.
    A front's term is written by a majority of the roster before it decides anything.
    """

    term: int
    number: int


def place_path(task_id: str, place: int, epoch: Epoch, *, of: str = "", **query: object) -> str:
    """The path of PUT /v1/fleet/tasks/{task_id}/places/{place}, `of` what of it."""
    at = {**query, "epoch_term": epoch.term, "epoch_number": epoch.number}
    return f"{FLEET}/{quote(task_id)}/places/{place}{of}?{urlencode(at)}"


@frozen(kw_only=True)
class Peer:
    """How nodes of a fleet reach one another: by journal id, with the fleet's own token. `certificate`: the
    SHA-256 of a self-signed one, in hexadecimal; "" where a CA has signed it, or for plain HTTP.
    """

    journal: str
    url: str
    certificate: str = ""


@frozen(kw_only=True)
class TermOrder:
    """Body of POST /v1/fleet/term: a front takes office, or names the nodes again. `front` is its random
    id.
    """

    term: int
    front: str
    peers: tuple[Peer, ...] = ()


@frozen(kw_only=True)
class TaskCopy:
    """A task as two journals hold it. `second` is "" where there is none: then nothing is committed."""

    task_id: str
    epoch: Epoch
    home: str
    second: str
    spec: TaskSpec
    idempotency_key: str | None = None
    submitted: float = 0.0
    cancelled: float | None = None


@frozen(kw_only=True)
class CopyOrder:
    """Body of POST /v1/fleet/tasks: begin a task as its home, or keep its copy as its second home. `places`:
    finished ones that its home has staged for the copy.
    """

    term: int
    role: Role
    copy: TaskCopy
    places: int = 0


@frozen(kw_only=True)
class CopyRow:
    """A line of GET /v1/fleet/tasks. `finished`: every place has ended here, with its event; `open_places`
    have neither a commit nor an end here. `acknowledged`: of a home that is not the task's first one, all
    that is waited for has its `task` event. It keeps its row until the front knows that no earlier home is
    left, which would begin the task again. `ended`: a former second home remembers that the task ended at
    `home`; it has no copy any more.
    """

    task_id: str
    role: Role
    epoch: Epoch
    home: str
    second: str
    finished: bool = False
    acknowledged: bool = False
    ended: bool = False
    cancelled: bool = False
    waiting: bool = False  # home of an earlier run of its node: POST /v1/fleet/resume confirms or retires it
    open_places: int = 0
    requires: Mapping[str, str] = field(factory=dict)  # of the task: what its homes must have


@frozen(kw_only=True)
class CopyRows:
    tasks: tuple[CopyRow, ...]


@frozen(kw_only=True)
class Adoption:
    """One task that changes hands. `second`: the journal of its new second home, "" for none."""

    task_id: str
    epoch: Epoch
    second: str = ""


@frozen(kw_only=True)
class AdoptOrder:
    """Body of POST /v1/fleet/adopt, to a second home: become home, deliver the places that are committed,
    begin sessions for the others. Of POST /v1/fleet/seconds, to a home: give the tasks another second home.
    """

    term: int
    tasks: tuple[Adoption, ...]


@frozen(kw_only=True)
class Moved:
    """A task that another journal owns now."""

    task_id: str
    epoch: Epoch
    home: str


@frozen(kw_only=True)
class ResumeOrder:
    """Body of POST /v1/fleet/resume, to a node that came back: the tasks that are still its own, and those
    that moved, whose sessions end as attempts.
    """

    term: int
    own: tuple[str, ...] = ()
    moved: tuple[Moved, ...] = ()


@frozen(kw_only=True)
class Committed:
    """Answer to a commit (PUT /v1/fleet/tasks/<task_id>/places/<place>): the session that holds the place,
    and the epoch of the task at the second home. The commit took place if `session_id` is the one that was
    sent and `accepted` is true.
    """

    accepted: bool
    session_id: str
    epoch: Epoch
    home: str


@frozen(kw_only=True)
class NodeLoad:
    """What placement needs to know of a node. Counts are of sessions; `session_s` is the moving average of a
    session's seconds, 0 where none has ended.
    """

    slots: int = 0
    live: int = 0
    pending_limit: int = 0
    session_s: float = 0.0
    by_priority: Mapping[str, int] = field(factory=dict)  # of `live`; empty where that is not known
    images: tuple[str, ...] = ()  # of prepared workspaces
    busy: str | None = None  # why no task is taken now, a sentence


@frozen(kw_only=True)
class NodeReport:
    """A node as its front sees it: pushed on GET /v1/fleet/feed every 2 s, and at once when it changes."""

    node: str
    journal: str
    model: str
    ready: bool = False
    draining: bool = False
    term: int = 0
    front: str = ""
    challenged: bool = False  # another front asks for a term: the one in office gives its own again
    version: str | None = None  # of the weights that are served
    labels: Mapping[str, str] = field(factory=dict)
    load: NodeLoad = field(factory=NodeLoad)
    last_seq: int = 0
    held: int = 0  # results that wait for their second home
    tasks_digest: str = ""  # changes when GET /v1/fleet/tasks does
    status: Mapping[str, Json] = field(factory=dict)  # figures for people: of GET /v1/status

    def meets(self, requires: Mapping[str, str]) -> bool:
        """Whether the node has all labels that a task requires."""
        return unmet(requires, self.all_labels) is None

    @property
    def all_labels(self) -> Mapping[str, str]:
        """Its own labels, and those that every node has."""
        return every_label(self.labels, node=self.node, model=self.model)


def every_label(labels: Mapping[str, str], *, node: str, model: str) -> dict[str, str]:
    """The labels of a node, with those that every node has: no setting can give these another value."""
    return {**labels, "model": model, "node": node}


def unmet(requires: Mapping[str, str], labels: Mapping[str, str]) -> str | None:
    """The name of the first label that a task requires and a node has not, or has with another value."""
    return next((name for name, value in requires.items() if labels.get(name) != value), None)


def label_texts(labels: Mapping[str, str]) -> str:
    """Labels as people write them, in one order."""
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
