"""Snapshots of sessions as values: what is written beside a snapshot's files, and which rules ask for it.

Pure. A snapshot is taken while a call waits, so the rules that need the turn's own tokens are decided later:
`asked_for` decides before a turn, `passes` after it.
"""

from collections.abc import Iterable, Sequence

from attrs import field, frozen

from polarnode.core.conversation import Conversation
from polarnode.core.task import SnapshotSpec
from polarnode.core.trajectory import Turn


@frozen(kw_only=True)
class LivingProcess:
    """A process of a container: its id on the node's machine, its name, and the program it was started as."""

    pid: int
    comm: str
    program: str

    def named(self) -> str:
        """The name of the process in a sentence."""
        return self.comm if self.program in ("", self.comm) else f"{self.comm} ({self.program})"


@frozen(kw_only=True)
class ReferenceKey:
    """What signs the references in a session's answers: the session's id, and its secret in hex."""

    session_id: str
    secret: str = field(repr=False)


@frozen(kw_only=True)
class FrozenProcess:
    """A process of a frozen container: its id there, its name, and whether it was stopped by a signal."""

    number: int
    comm: str
    stopped: bool = False


@frozen(kw_only=True)
class FrozenMount:
    """A mount of a frozen container that its seal made read-only, with its flags."""

    place: str
    flags: int


@frozen(kw_only=True)
class FrozenImage:
    """What is kept beside the files of a frozen container. `bytes`: the size of its memory and its layer.
    `number`: the id of the harness's shell in the container. `shift`: the offset of its user ids.
    `container`, `name`, `root`: its id, its name and the path of its root, as in its configuration.
    `machine`: the kernel that it ran on. `closed`, `opened`: what undoes its seal. `key`: the session's key,
    which the harness has in its memory.
    """

    bytes: int
    number: int
    shift: int
    container: str
    name: str
    root: str
    image_id: str
    machine: str
    processes: tuple[FrozenProcess, ...]
    closed: tuple[FrozenMount, ...] = ()
    opened: tuple[str, ...] = ()
    key: str = field(default="", repr=False)


@frozen(kw_only=True)
class Snapshot:
    """What is kept beside a snapshot's archive: the state before turn `turn` of a session. Only the node's
    user can read the file, because it holds the session's secret.

    `before_key` and `conversation` are the waiting request's: a fork's first request must have the same path.
    `image_id` is of the image the session's container was made of; `places` are the folders in the archive.
    `obstacles`: sentences why no harness may be resumed from it; none where it may. `taken`: seconds since
    1970. `seconds`: how long the call was held. `run_s`: seconds of its RUN that the session had spent,
    without those in which its calls were held. `frozen`: the processes too, where the task asks for them;
    `not_frozen`: why there are none.
    """

    session_id: str
    turn: int
    taken: float
    before_key: str
    conversation: Conversation
    references: ReferenceKey
    image: str
    image_id: str
    places: tuple[str, ...]
    files: int
    bytes: int
    seconds: float
    processes: tuple[LivingProcess, ...] = ()
    left_out: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    run_s: float = 0.0
    frozen: FrozenImage | None = None
    not_frozen: str | None = None

    @property
    def stored_bytes(self) -> int:
        """Of its files, and of its processes where it has them."""
        return self.bytes + (0 if self.frozen is None else self.frozen.bytes)


@frozen(kw_only=True)
class SnapshotStatus:
    """A snapshot as it is listed. `why_not`: why no harness may be resumed from it. `frozen`: whether it has
    the processes too; `not_frozen`: why it has none though its task asks for them.
    """

    turn: int
    taken: float
    files: int
    bytes: int
    seconds: float
    resumable: bool
    why_not: str | None = None
    frozen: bool = False
    not_frozen: str | None = None


@frozen(kw_only=True)
class SnapshotList:
    """The snapshots of a session, by turn."""

    session_id: str
    snapshots: tuple[SnapshotStatus, ...]


def status_of(snapshot: Snapshot) -> SnapshotStatus:
    """A snapshot as it is listed."""
    return SnapshotStatus(
        turn=snapshot.turn,
        taken=snapshot.taken,
        files=snapshot.files,
        bytes=snapshot.stored_bytes,
        seconds=snapshot.seconds,
        resumable=not snapshot.obstacles,
        why_not="; ".join(snapshot.obstacles) or None,
        frozen=snapshot.frozen is not None,
        not_frozen=snapshot.not_frozen,
    )


# ── rules ─────────────────────────────────────────────────────────────────────


def asked_for(spec: SnapshotSpec, turn: int, *, last: int) -> bool:
    """Whether a snapshot before this turn is asked for, whatever the turn will be. `last`: the turn of the
    last snapshot, 0 where there is none.
    """
    return turn in spec.turns or (spec.every is not None and turn - last >= spec.every)


def has_pending_rules(spec: SnapshotSpec, turns: Iterable[Turn]) -> bool:
    """Whether a turn after these may pass a rule that is decided once it has ended."""
    return spec.entropy is not None or any(call > _calls(turns) for call in spec.tool_calls)


def passes(spec: SnapshotSpec, turns: Sequence[Turn], index: int) -> bool:
    """Whether turn `index` of a session's turns passes a rule that is decided once it has ended; a turn that
    was not recorded passes none.
    """
    turn = next((each for each in turns if each.index == index), None)
    if turn is None:
        return False
    before = _calls(each for each in turns if each.index < index)
    made = range(before + 1, before + _calls([turn]) + 1)
    uncertain = spec.entropy is not None and len(turn.logprobs) > 0
    return any(call in made for call in spec.tool_calls) or (
        uncertain and spec.entropy is not None and -sum(turn.logprobs) / len(turn.logprobs) >= spec.entropy
    )


def _calls(turns: Iterable[Turn]) -> int:
    """The tool calls of the main agent in these turns."""
    return sum(
        len(turn.answer.calls)
        for turn in turns
        if turn.role == "main" and turn.state == "complete" and turn.answer is not None
    )
