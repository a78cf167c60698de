"""Programs a node starts do not hold it up until they run."""

import subprocess

from polarnode.node.opening import without_vfork


def test_node_forks_programs_while_running() -> None:
    usual = vars(subprocess)["_USE_VFORK"]
    with without_vfork():
        assert vars(subprocess)["_USE_VFORK"] is False
        assert subprocess.run(["true"], check=False).returncode == 0
    assert vars(subprocess)["_USE_VFORK"] is usual
