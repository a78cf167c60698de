"""The benchmark of a fleet's stream: what its stubs answer is what a node's routes answer."""

import json
import sys
from pathlib import Path

from polarnode.core.codec.json import structure
from polarnode.core.fleet import CopyRows, NodeReport
from polarnode.core.positions import JOURNAL

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import fleet_streams


def test_a_stub_answers_as_a_node_does() -> None:
    stub = fleet_streams.Stub(3)
    report = structure(json.loads(stub.report()), NodeReport)
    assert (report.ready, report.load.slots, report.journal) == (True, 128, fleet_streams.journal(3))
    assert JOURNAL.fullmatch(report.journal)
    rows = structure(json.loads(stub.rows()), CopyRows).tasks
    assert [row.role for row in rows] == ["home"] * fleet_streams.TASKS + ["second"] * fleet_streams.TASKS
    assert {row.second for row in rows} == {fleet_streams.journal(4), fleet_streams.journal(3)}
