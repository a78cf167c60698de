"""Programs a node starts do not hold it up until they run."""

import subprocess

from polarnode.node.opening import without_vfork


def test_programs_are_forked_while_a_node_runs_and_as_ever_after_it() -> None:
    usual = vars(subprocess)["_USE_VFORK"]
    with without_vfork():
        assert vars(subprocess)["_USE_VFORK"] is False
        assert subprocess.run(["true"], check=False).returncode == 0
    assert vars(subprocess)["_USE_VFORK"] is usual
