"""Work in a thread that is thrown away: what it gives, how it fails, and that nobody else is changed
by it.
"""

import os
import threading

import pytest

from polarnode.containers.inside import CLONE_FS, checked, in_own_thread, libc
from polarnode.core.errors import Refused


def test_result_of_work_is_returned() -> None:
    assert in_own_thread(lambda: threading.current_thread() is threading.main_thread()) is False


@pytest.mark.parametrize("error", [OSError(5, "no"), Refused("no")])
def test_errors_are_raised_unchanged(error: Exception) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        in_own_thread(fails)
    assert caught.value is error


def test_process_changes_stay_inside() -> None:
    """What the work changes of its own process stays in it."""

    def elsewhere() -> str:
        checked(libc.unshare(CLONE_FS), "unshare")
        os.chdir("/")
        return os.getcwd()

    here = os.getcwd()
    assert here != "/"
    assert in_own_thread(elsewhere) == "/"
    assert os.getcwd() == here


def test_failed_call_names_itself() -> None:
    with pytest.raises(OSError, match="setns"):
        checked(libc.setns(-1, 0), "setns")
