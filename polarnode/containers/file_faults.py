"""The meaning of an error at a container's files: a fault of the machine, or of the container's content."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from polarnode.core.errors import ContentFault, RuntimeFault

REASONS = {
    errno.ELOOP: "a link is in the way",
    errno.EROFS: "it is read-only, as all but the writable places is while a harness runs",
    errno.EXDEV: "another file system is mounted there",
}
# These mean a full or broken disk, or no descriptors or memory left. They do not come from a container's
# content.
MACHINE_ERRNOS = frozenset({errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError inside into a RuntimeFault that names the operation."""
    try:
        yield
    except OSError as error:
        raise fault(what, error) from error


def fault(what: str, error: OSError) -> RuntimeFault:
    """The fault for an error: RuntimeFault if the machine fails or lacks room, else ContentFault."""
    kind = RuntimeFault if error.errno in MACHINE_ERRNOS else ContentFault
    return kind(f"{what}: {reason_of(error)}")


def reason_of(error: OSError) -> str:
    """Why something in a container could not be opened, read or written."""
    return REASONS.get(error.errno or 0, error.strerror or str(error))
