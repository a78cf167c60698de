"""The limit of open files, raised in a process of its own: the test's stays what it is."""

import subprocess
import sys

PROGRAM = """
import os, resource, select
from polarnode.support.metrics import lift_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
assert lift_descriptor_limit() == hard
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
print(len([os.dup(0) for _ in range(min(hard - 50, 1500))]) > 256 or hard < 400)
"""


def test_process_raises_open_file_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
