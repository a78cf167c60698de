"""One node for the whole suite: what a hostile session does to it, the next test meets."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

# its kit starts whole nodes, and looks at them from outside
sys.path.append(str(Path(__file__).parent.parent / "live"))

from hostile_kit import Arena, open_arena
from live_kit import short_temporary
from podman_parts import LIMITS

from polarnode.containers.probe import default_state_dir, probe


@pytest.fixture(scope="session")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A node with an engine that only simulates, and a peaceful session that makes turns all along."""
    findings = trio.run(probe, default_state_dir(), LIMITS)
    if not findings.ok:
        pytest.skip(f"Podman can not start containers here: {findings.faults()}")
    with short_temporary() as temporary, open_arena(tmp_path_factory.mktemp("hostile"), temporary) as opened:
        yield opened


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used the arena: the node answers within its bounds, its peaceful session goes on,
    nothing of the attack is left.
    """
    yield
    if "arena" in request.fixturenames:
        request.getfixturevalue("arena").check_unharmed()
