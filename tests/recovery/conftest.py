"""Real Podman and real processes; the engine is the simulated one, so that its starts fit."""

import pytest
import trio
from podman_parts import LIMITS

from polarnode.containers.probe import default_state_dir, probe


@pytest.fixture(scope="session")
def podman_works() -> None:
    findings = trio.run(probe, default_state_dir(), LIMITS)
    if not findings.ok:
        pytest.skip(f"Podman can not start containers here: {findings.faults()}")
