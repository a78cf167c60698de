"""Random ids."""

from polarnode.support.ids import ID_BYTES, new_id


def test_ids_are_never_equal() -> None:
    found = {new_id() for _ in range(10_000)}
    assert len(found) == 10_000
    assert {len(bytes.fromhex(each)) for each in found} == {ID_BYTES}
