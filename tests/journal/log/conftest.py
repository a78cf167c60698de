"""One PostgreSQL for the tests of the log, and a database of its own for each test."""

from collections.abc import Iterator

import pytest
from postgres_kit import Cluster, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as found:
        yield found


@pytest.fixture
def dsn(cluster: Cluster) -> str:
    return cluster.database()
