"""The bodies of /v1/fleet: what a front writes, a node reads, and the other way round."""

from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.fleet import Adoption, AdoptOrder, CopyOrder, Epoch, NodeReport, Peer, TaskCopy, TermOrder
from polarnode.core.task import HarnessSpec, TaskSpec

EPOCHS = st.builds(Epoch, st.integers(0, 1 << 40), st.integers(0, 1 << 40))


@given(EPOCHS, EPOCHS)
def test_a_later_term_beats_every_count(a: Epoch, b: Epoch) -> None:
    assert (a < b) == ((a.term, a.number) < (b.term, b.number))


@given(EPOCHS)
def test_bodies_are_read_back(epoch: Epoch) -> None:
    spec = TaskSpec(instruction="x", harness=HarnessSpec(command=("true",)), num_samples=3)
    copy = TaskCopy(task_id="t", epoch=epoch, home="j1", second="j2", spec=spec)
    for body in (
        CopyOrder(term=epoch.term, role="second", copy=copy),
        AdoptOrder(term=3, tasks=(Adoption(task_id="t", epoch=epoch),)),
        TermOrder(term=1, front="f", peers=(Peer(journal="j1", url="http://127.0.0.1:1"),)),
        NodeReport(node="n", journal="j1", model="m"),
    ):
        assert structure(read_json(dump_json(plain(body))), type(body), forbid_extra=True) == body
