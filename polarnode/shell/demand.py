"""How many containers are about to be asked for, told to the warm pool as it changes.

The rule for whoever edits it: what was expected of a session is taken back once, whatever becomes of it, so that all numbers end at zero. A
session whose evaluator has a container of its own asks twice: for the second while its harness runs. Tasks that need the same container with
the same workspace in it share the warm ones, so they are counted together.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from attrs import define, field

from polarnode.shell.podman.container import Shape, shape_of
from polarnode.shell.podman.prepared import Workspace, workspace_of
from polarnode.tasks import RuntimeSpec

Kind = tuple[Shape, Workspace | None]


@define(eq=False)
class Demand:
    """`want` is the pool's; of each kind at most `warm` are asked of it."""

    want: Callable[[RuntimeSpec, int], None]
    warm: int
    _waiting: dict[str, tuple[RuntimeSpec, int]] = field(factory=dict, init=False)  # by session: how many containers it has yet to get
    _coming: "Counter[Kind]" = field(factory=Counter, init=False)
    _told: dict[Kind, int] = field(factory=dict, init=False)

    def expect(self, session_ids: Iterable[str], spec: RuntimeSpec, *, each: int = 1) -> None:
        """These sessions will need so many containers each."""
        for session_id in session_ids:
            self._waiting[session_id] = spec, each
            self._coming[_kind(spec)] += each
        self._tell(spec)

    def served(self, session_id: str, *, left: int = 0) -> None:
        """This session will need at most so many more. Later calls say nothing new."""
        spec, waiting = self._waiting.pop(session_id, (None, 0))
        if spec is None:
            return
        left = min(left, waiting)
        if left:
            self._waiting[session_id] = spec, left
        self._coming[_kind(spec)] -= waiting - left
        self._tell(spec)

    def _tell(self, spec: RuntimeSpec) -> None:
        kind = _kind(spec)
        count = min(self.warm, self._coming[kind])
        if self._told.get(kind, 0) != count:
            self.want(spec, count)
        self._told[kind] = count
        if not self._coming[kind]:
            del self._told[kind], self._coming[kind]


def _kind(spec: RuntimeSpec) -> Kind:
    return shape_of(spec, spec.image), workspace_of(spec, spec.image)
