"""Real engine, real Podman, real harnesses: one node that serves for all tests that leave it alive, and a
folder for those that do not.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from live_kit import STEERED, ServingNode, meaning_folder, serving, short_temporary
from podman_parts import LIMITS

from polarnode.containers.probe import default_state_dir, probe


@pytest.fixture(scope="session")
def podman_works() -> None:
    findings = trio.run(probe, default_state_dir(), LIMITS)
    if not findings.ok:
        pytest.skip(f"Podman can not start containers here: {findings.faults()}")


@pytest.fixture(scope="session")
def node(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingNode]:
    """A node shared by every test that leaves it as it was; warm runtimes and images are had once."""
    with (
        short_temporary() as temporary,
        serving(tmp_path_factory.mktemp("node") / "state", temporary) as shared,
    ):
        yield shared


@pytest.fixture(scope="session")
def steered(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingNode]:
    """A node whose real engine says the scripts of `matrix_cases.py`. Two harnesses at once: as many as CI
    has cores.
    """
    folder = tmp_path_factory.mktemp("steered")
    requests = (meaning_folder() or folder) / "requests"
    settings = folder / "node.toml"
    settings.write_text(
        "run_limit = 2\nready_limit = 1\ninit_limit = 2\nwarm = 0\nrecord_requests ="
        f" {json.dumps(str(requests))}\n"
    )
    with (
        short_temporary() as temporary,
        serving(folder / "state", temporary, program=(*STEERED, "--config", str(settings))) as node,
    ):
        yield node


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder of a node's own, so that what is left in it is that node's."""
    with short_temporary() as folder:
        yield folder
