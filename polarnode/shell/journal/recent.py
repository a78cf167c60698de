"""The JSON of events that was written last, kept for the next reader: sixteen readers of one stream ask for the same bytes.

The rules for whoever edits it. It is bounded in bytes, whoever reads. It is asked from several threads at once: what one makes another waits
for, and no two wait for each other. An event never changes, so what is kept is never wrong.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from attrs import define, field

KEPT_BYTES = 64 << 20  # a few seconds of a busy node, which is how far readers that keep up are apart; or a few of its longest sessions


@define(eq=False)
class Recent:
    """Bytes by key, the least lately used dropped first."""

    limit: int = KEPT_BYTES
    held: int = field(default=0, init=False)
    _kept: OrderedDict[Hashable, bytes] = field(factory=OrderedDict, init=False)
    _making: dict[Hashable, threading.Lock] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """What is kept under `key`, else what `make` gives, which is called once while several ask."""
        with self._lock:
            if (found := self._found(key)) is not None:
                return found
            making = self._making.setdefault(key, threading.Lock())
        with making:
            try:
                return self._found_or_made(key, make)
            finally:
                with self._lock:
                    self._making.pop(key, None)  # who waits on this lock holds it himself

    def _found_or_made(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            if (found := self._found(key)) is not None:
                return found
        made = make()
        with self._lock:
            self._keep(key, made)
        return made

    def _found(self, key: Hashable) -> bytes | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _keep(self, key: Hashable, value: bytes) -> None:
        """One larger than half of all is not kept: it would push out what others read."""
        if len(value) > self.limit // 2 or key in self._kept:
            return
        self._kept[key] = value
        self.held += len(value)
        while self.held > self.limit:
            _, dropped = self._kept.popitem(last=False)
            self.held -= len(dropped)
