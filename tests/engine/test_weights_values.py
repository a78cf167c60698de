"""What a trainer says of weights: read strictly, refused with the field's path before anything is held; and
the rows of the history.
"""

from typing import Any

import pytest

from polarnode.core import codec
from polarnode.core.errors import Refused
from polarnode.core.weights import HostReport
from polarnode.engine.weight_values import (
    BroadcastBucket,
    GroupOrder,
    Served,
    UpdateOrder,
    broadcast,
    check,
    check_group,
    digest,
    loads,
    source_record,
)
from polarnode.engine.weights import read_served, served_json
from polarnode.journal.entries import WeightsRow

DISK = {"version": "1", "source": {"kind": "disk", "path": "/w"}}


def order(body: dict[str, Any]) -> UpdateOrder:
    return codec.structure(body, UpdateOrder, forbid_extra=True)


def test_source_digest_ignores_mode() -> None:
    assert digest(order(DISK)) == digest(order(DISK | {"mode": "abort", "version": "2"}))
    assert digest(order(DISK)) != digest(order(DISK | {"source": {"kind": "disk", "path": "/v"}}))


def test_source_records_are_short() -> None:
    assert source_record(order(DISK), 1) == {"kind": "disk", "path": "/w"}
    assert source_record(order({"version": "1", "source": {"kind": "tensor"}}), 3) == {
        "kind": "tensor",
        "buckets": "3",
    }
    assert source_record(order({"version": "1", "source": {"kind": "distributed", "group": "g"}}), 2) == {
        "kind": "distributed",
        "group": "g",
        "buckets": "2",
    }


@pytest.mark.parametrize(
    ("bucket", "path"),
    [
        ({"names": ["a"], "dtypes": [], "shapes": [[1]]}, "$"),
        ({"names": ["a"], "dtypes": ["float9"], "shapes": [[1]]}, "$.dtypes[0]"),
        ({"names": ["a"], "dtypes": ["float32"], "shapes": [[1 << 30, 1 << 30]]}, "$.shapes[0]"),
    ],
)
def test_invalid_broadcast_is_refused_early(bucket: dict[str, Any], path: str) -> None:
    with pytest.raises(Refused) as caught:
        broadcast(codec.structure(bucket, BroadcastBucket), "g")
    assert caught.value.path == path


@pytest.mark.parametrize("path", ["w", "", "/w\0x"])
def test_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(Refused) as caught:
        check(order({"version": "1", "source": {"kind": "disk", "path": path}}))
    assert caught.value.path == "$.source.path"


def test_order_becomes_load_per_bucket() -> None:
    check(order(DISK))
    assert len(loads(order(DISK), hosts=2, ranks=1)) == 1
    several = {"version": "1", "source": {"kind": "tensor", "buckets": [{"payloads": ["gAQ="]}] * 3}}
    assert len(loads(order(several), hosts=2, ranks=1)) == 3


def test_group_has_room_for_gpus() -> None:
    said = GroupOrder(address="h", port=1, world_size=9)
    check_group(said, 8)
    with pytest.raises(Refused, match="world_size must be at least 10"):
        check_group(said, 9)


def test_history_row_round_trips() -> None:
    hosts = (HostReport(index=0, seconds=0.5),)
    served = Served(
        version="1",
        mode="drain",
        source={"kind": "disk", "path": "/w"},
        seconds=1.5,
        hosts=hosts,
        digest="d",
        model="/m",
        files="f",
    )
    row = WeightsRow(version="1", at=7.0, body=served_json(served))
    assert read_served(row) == codec.structure({**served_json(served), "at": 7.0}, Served)
