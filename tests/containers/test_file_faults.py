"""Errors at a container's files: what the machine has to answer for, and what its content."""

import errno
import os

import pytest

from polarnode.containers.file_faults import explained
from polarnode.core.errors import ContentFault, RuntimeFault


@pytest.mark.parametrize(
    ("number", "of_content"),
    [
        (errno.ENOSPC, False),
        (errno.EIO, False),
        (errno.EMFILE, False),
        (errno.ELOOP, True),
        (errno.ENOTDIR, True),
        (errno.EISDIR, True),
        (errno.EXDEV, True),
        (errno.ENAMETOOLONG, True),
        (errno.EDQUOT, True),
    ],
)
def test_errors_are_content_or_machine_faults(number: int, of_content: bool) -> None:
    with pytest.raises(RuntimeFault, match=r"^writing /x: ") as caught, explained("writing /x"):
        raise OSError(number, os.strerror(number))
    assert isinstance(caught.value, ContentFault) == of_content
