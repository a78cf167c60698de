"""How many containers of each shape are about to be asked for, told to the warm pool as it changes.

The rule for whoever edits it: every session that was expected is served once, whatever becomes of it, so that all numbers end at zero.
Tasks that differ only in what comes later (files, steps, environment) share the warm ones, so they are counted together.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from attrs import define, field

from polarnode.shell.podman.container import Shape, shape_of
from polarnode.tasks import RuntimeSpec


@define(eq=False)
class Demand:
    """`want` is the pool's; of each shape at most `warm` are asked of it."""

    want: Callable[[RuntimeSpec, int], None]
    warm: int
    _waiting: dict[str, RuntimeSpec] = field(factory=dict, init=False)  # by session, until it has its container or needs none
    _coming: "Counter[Shape]" = field(factory=Counter, init=False)
    _told: dict[Shape, int] = field(factory=dict, init=False)

    def expect(self, session_ids: Iterable[str], spec: RuntimeSpec) -> None:
        """These sessions will need a container each."""
        for session_id in session_ids:
            self._waiting[session_id] = spec
            self._coming[_shape(spec)] += 1
        self._tell(spec)

    def served(self, session_id: str) -> None:
        """This session has its container, or will never need one. Later calls say nothing new."""
        spec = self._waiting.pop(session_id, None)
        if spec is not None:
            self._coming[_shape(spec)] -= 1
            self._tell(spec)

    def _tell(self, spec: RuntimeSpec) -> None:
        shape = _shape(spec)
        count = min(self.warm, self._coming[shape])
        if self._told.get(shape, 0) != count:
            self.want(spec, count)
        self._told[shape] = count
        if not self._coming[shape]:
            del self._told[shape], self._coming[shape]


def _shape(spec: RuntimeSpec) -> Shape:
    return shape_of(spec, spec.image)
