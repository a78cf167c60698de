"""The rules of labels: a node's own, and those that a task requires of a node."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from polarnode.core.codec.json import child

MAX_LABELS: Final = 32  # of a node: they are in each of its reports, one every 2 s
LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")  # as Kubernetes has them, with a prefix too
NAMED: Final = "needs a name of 1 to 63 letters, digits, '.', '_', '/' or '-', beginning with no sign"
LABEL_VALUE: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,256}")  # a model's name is one too


def label_faults(labels: Mapping[str, str], path: str) -> Iterator[tuple[str, str]]:
    """What is wrong with labels: the place of each fault below `path`, and a predicate for it."""
    if len(labels) > MAX_LABELS:
        yield path, f"must be at most {MAX_LABELS} labels, not {len(labels)}"
    for name, value in labels.items():
        if LABEL.fullmatch(name) is None:
            yield child(path, name), NAMED
        if LABEL_VALUE.fullmatch(value) is None:
            yield child(path, name), "must be 1 to 256 printable characters"
