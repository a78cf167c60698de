"""What an error at a container's files means: the machine's fault, or of what the container holds."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from polarnode.core.errors import ContentFault, RuntimeFault

REASONS = {
    errno.ELOOP: "a link is in the way",
    errno.EROFS: "it is read-only, as all but the writable places is while a harness runs",
    errno.EXDEV: "another file system is mounted there",
}
# a full disk, a broken one, no descriptors and no memory left: not what a container holds
OF_MACHINE = frozenset({errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError inside into a RuntimeFault that names the operation."""
    try:
        yield
    except OSError as error:
        raise fault(what, error) from error


def fault(what: str, error: OSError) -> RuntimeFault:
    """The machine's where it lacks room or fails; all else is of what the container holds."""
    kind = RuntimeFault if error.errno in OF_MACHINE else ContentFault
    return kind(f"{what}: {reason_of(error)}")


def reason_of(error: OSError) -> str:
    """Why something in a container could not be opened, read or written."""
    return REASONS.get(error.errno or 0, error.strerror or str(error))
