"""Work in a thread that is thrown away: what it gives, how it fails, and that nobody else is changed
by it.
"""

import os
import threading

import pytest

from polarnode.containers.inside import CLONE_FS, checked, in_own_thread, libc
from polarnode.core.errors import Refused


def test_what_the_work_gives_comes_out() -> None:
    assert in_own_thread(lambda: threading.current_thread() is threading.main_thread()) is False


@pytest.mark.parametrize("error", [OSError(5, "no"), Refused("no")])
def test_its_errors_come_out_as_they_are(error: Exception) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        in_own_thread(fails)
    assert caught.value is error


def test_what_it_changes_of_itself_is_its_own() -> None:
    def elsewhere() -> str:
        checked(libc.unshare(CLONE_FS), "unshare")
        os.chdir("/")
        return os.getcwd()

    here = os.getcwd()
    assert here != "/"
    assert in_own_thread(elsewhere) == "/"
    assert os.getcwd() == here


def test_a_call_that_failed_is_an_error_with_its_name() -> None:
    with pytest.raises(OSError, match="setns"):
        checked(libc.setns(-1, 0), "setns")
