"""`polarnode doctor --log`: what it says of a PostgreSQL that nodes share."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from postgres_kit import Cluster, running_cluster

from polarnode.cli import doctor_log
from polarnode.cli.main import main


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as found:
        yield found


def found(dsn: str) -> dict[str, Any]:
    return {each.name: each for each in doctor_log.log_findings(dsn)}


def test_good_log_suggests_only_standby(cluster: Cluster) -> None:
    every = found(cluster.database())
    assert all(each.ok for each in every.values())
    assert [each.name for each in every.values() if each.remedy] == ["log standby"]
    assert "300: enough for 95 nodes" in every["log connections"].what
    assert "of this version" in every["log tables"].what


def test_doctor_of_log_alone(cluster: Cluster, tmp_path: Path) -> None:
    secret = tmp_path / "dsn"
    secret.write_text(f"{cluster.database(())} password=very-secret")
    arguments = ["doctor", "--engine", "none", "--log", f"@{secret}", "--json"]
    done = CliRunner().invoke(main, arguments)
    report = json.loads(done.stdout)
    names = [each["name"] for each in report["findings"]]
    assert report["ready"], report
    assert "log tables" in names
    assert not {"sglang", "gpus", "disk"} & set(names)
    assert "very-secret" not in done.output


def test_missing_server_features_are_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = cluster.database()
    with psycopg.connect(dsn, autocommit=True) as db:
        name = db.info.dbname
        db.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
        db.execute("INSERT INTO polarnode.nodes (name) SELECT 'n' || g FROM generate_series(1, 96) g")
        db.execute("CREATE ROLE stranger LOGIN")
    monkeypatch.setattr(doctor_log, "MAX_CLOCK_SKEW_S", -1.0)
    monkeypatch.setattr(doctor_log, "MAX_ROUND_TRIP_S", -1.0)
    every = found(dsn)
    assert "a crash of the server loses events" in every["log commits"].remedy
    assert "set max_connections to 304" in every["log connections"].remedy
    assert "NTP" in every["log clock"].remedy
    assert "nearer" in every["log round trip"].remedy
    stranger = found(dsn.replace("user=postgres", "user=stranger"))
    assert not stranger["log tables"].ok
    assert "GRANT polarnode_node" in stranger["log tables"].what


def test_other_tables_or_no_server(cluster: Cluster) -> None:
    dsn = cluster.database()
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("INSERT INTO polarnode.migrations (number, name) VALUES (99, '0099_later.sql')")
    later = found(dsn)["log tables"]
    assert not later.ok
    assert "has migration 0099" in later.what
    away = found("host=/nowhere dbname=x")["log"]
    assert away.ok, "a node waits for it"
    assert "cannot be reached" in away.what
    assert not found("no dsn")["log"].ok


def test_standbys_are_reported(cluster: Cluster) -> None:
    with cluster.standby():
        assert "1 asynchronous" in found(cluster.database())["log standby"].what
