"""What the front decides, from values alone: where a task goes, who owns it, who is up."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.errors import ConfigError, Refused
from polarnode.core.fleet import Adoption, CopyRow, Epoch, NodeLoad, NodeReport
from polarnode.core.task import HarnessSpec, RuntimeSpec, TaskSpec
from polarnode.fleet.config import FleetConfig
from polarnode.fleet.link import Link
from polarnode.fleet.members import GONE_S, SUSPECT_S, FleetMember, Roster
from polarnode.fleet.ownership import KnownHomes, Seen, majority, owner_of, plans
from polarnode.fleet.placement import (
    Candidate,
    able_of,
    home_of,
    insist_possible,
    one_model,
    queue_s,
    second_of,
    why_none,
)

A, B, C = ("j" + letter * 16 for letter in "abc")


def report(journal: str, **load: object) -> NodeReport:
    more = {"slots": 4, "pending_limit": 100, "session_s": 10.0} | load
    return NodeReport(node=journal[:2], journal=journal, model="m", ready=True, load=NodeLoad(**more))  # type: ignore[arg-type]


def task(samples: int = 4, **more: object) -> TaskSpec:
    return TaskSpec(instruction="x", harness=HarnessSpec(), num_samples=samples, **more)  # type: ignore[arg-type]


def row(task_id: str, role: str, number: int, home: str, second: str, **more: object) -> CopyRow:
    return CopyRow(task_id=task_id, role=role, epoch=Epoch(1, number), home=home, second=second, **more)  # type: ignore[arg-type]


# ── placement ─────────────────────────────────────────────────────────────────


def test_a_group_goes_where_it_is_over_first() -> None:
    slow, fast = Candidate(report=report(A, session_s=40.0)), Candidate(report=report(B, live=8))
    assert home_of(task(), [slow, fast]) == B  # 4 sessions of 40 s, against 12 of 10 s
    assert home_of(task(), [slow, Candidate(report=report(B, live=8), placed=8)]) == A
    assert home_of(task(), [Candidate(report=report(A, slots=1)), fast]) == B


def test_sessions_of_a_lower_priority_wait_behind() -> None:
    """But those that run keep their slots: 4 here."""
    low = Candidate(report=report(A, live=40, by_priority={"10": 36, "50": 4}))
    full = Candidate(report=report(B, live=12, by_priority={"50": 12}))
    assert home_of(task(priority=50), [low, full]) == A
    assert home_of(task(priority=10), [low, full]) == B
    assert low.expected_s(4, 100) == low.expected_s(4, 50) == (4 + 4) * 10.0 / 4
    assert low.expected_s(4, 0) == (40 + 4) * 10.0 / 4
    assert Candidate(report=report(A, live=2, by_priority={"10": 2})).expected_s(2, 50) == 4 * 10.0 / 4


@given(
    st.dictionaries(st.integers(0, 100).map(str), st.integers(1, 50)),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_a_higher_priority_never_waits_longer(counts: dict[str, int], low: int, high: int) -> None:
    found = Candidate(report=report(A, live=sum(counts.values()), by_priority=counts))
    low, high = sorted((low, high))
    assert found.expected_s(1, high) <= found.expected_s(1, low) <= found.expected_s(1)


def test_a_task_that_waits_is_given_the_reason() -> None:
    assert why_none({}, [report(A, busy="the disk is full")], []) == "the disk is full"
    assert (
        why_none({}, [report(A)], ["http://b"])
        == "all nodes that could, 1, are full; http://b never answered"
    )
    assert why_none({"gpu": "h100"}, [report(A)], []) == "no node that has gpu=h100 is up"
    assert why_none({}, [], []) == "no node is up"


def test_a_prepared_image_breaks_a_tie_alone() -> None:
    spec = task(runtime=RuntimeSpec(image="swe"))
    warm, cold = Candidate(report=report(B, images=("swe",))), Candidate(report=report(A))
    assert home_of(spec, [cold, warm]) == B
    assert home_of(spec, [cold, Candidate(report=report(B, images=("swe",), live=1))]) == A


def test_nobody_with_room_is_nobody() -> None:
    assert home_of(task(), [Candidate(report=report(A, busy="the disk is full"))]) is None
    assert home_of(task(5), [Candidate(report=report(A, pending_limit=4))]) is None
    assert home_of(task(4), [Candidate(report=report(A, pending_limit=4), placed=1)]) is None
    assert home_of(task(), []) is None


@given(st.text(min_size=1), st.sets(st.sampled_from([A, B, C]), min_size=1))
def test_a_second_home_is_another_and_moves_only_when_it_goes(task_id: str, journals: set[str]) -> None:
    chosen = second_of(task_id, A, journals)
    assert chosen != A
    assert (chosen == "") == (journals <= {A})
    for other in journals - {A, chosen}:
        assert second_of(task_id, A, journals - {other}) == chosen


LABELS = st.dictionaries(st.sampled_from(["gpu", "site"]), st.sampled_from(["1", "2"]))
MIXED = st.builds(
    lambda labels, model: evolve(report(A), labels=labels, model=model), LABELS, st.sampled_from(["m", "n"])
)


def numbered(found: list[NodeReport]) -> list[NodeReport]:
    return [evolve(each, journal=f"j{at}", node=f"n{at}") for at, each in enumerate(found)]


@given(st.lists(MIXED, min_size=1, max_size=5), LABELS | st.just({"model": "m"}), st.booleans())
def test_a_task_is_refused_only_where_no_node_could_ever_take_it(
    found: list[NodeReport], requires: dict[str, str], complete: bool
) -> None:
    """Else it has a home and a second home that meet what it requires, of one model; or it waits."""
    reports = numbered(found)
    able = [each for each in reports if all(each.all_labels.get(n) == v for n, v in requires.items())]
    if len({each.model for each in able}) > 1 or (complete and not able):
        with pytest.raises(Refused, match="requires"):
            insist_possible(requires, reports, complete=complete)
        return
    insist_possible(requires, reports, complete=complete)
    home = home_of(task(requires=requires), [Candidate(report=each) for each in reports])
    assert (home is None) == (not able)
    if home is not None:
        keepers = able_of(requires, home, reports)
        assert home in keepers
        assert {each.model for each in reports if each.journal in keepers} == {able[0].model}
        assert {*keepers} == {each.journal for each in able}


def test_a_refusal_names_the_field_and_what_there_is() -> None:
    reports = numbered([evolve(report(A), labels={"gpu": "h100"}), evolve(report(B), labels={"site": "a"})])
    for requires, path, words in (
        ({"gpu": "b200"}, "$.requires.gpu", "they have h100"),
        ({"disk": "1"}, "$.requires.disk", "their labels are gpu, model, node, site"),
        ({"gpu": "h100", "site": "a"}, "$.requires", "gpu=h100, model=m, node=n0; model=m, node=n1, site=a"),
    ):
        with pytest.raises(Refused, match=words) as caught:
            insist_possible(requires, reports, complete=True)
        assert caught.value.path == path
        insist_possible(requires, reports, complete=False)  # a node that never answered may have it
    two = [evolve(reports[0], model="a"), evolve(reports[1], model="b")]
    with pytest.raises(Refused, match="serves a, b") as caught:
        insist_possible({}, two, complete=True)
    assert caught.value.path == "$.requires.model"
    assert one_model(None, reports, complete=True) == "m"
    assert one_model("b", two, complete=True) == "b"
    assert one_model("c", two, complete=False) == "c"
    for asked in (None, "c"):
        with pytest.raises(Refused, match="serves a, b") as caught:
            one_model(asked, two, complete=True)
        assert caught.value.path == "?model"


def test_labels_and_the_queue() -> None:
    found = report(A, live=12)
    assert found.meets({"model": "m", "node": A[:2]})
    assert not found.meets({"gpu": "h100"})
    assert evolve(found, labels={"gpu": "h100", "model": "x"}).meets({"gpu": "h100", "model": "m"})
    assert queue_s([Candidate(report=found), Candidate(report=report(B))]) == pytest.approx(8 * 10.0 / 8)
    assert queue_s([]) == 0.0


# ── ownership ─────────────────────────────────────────────────────────────────


def seen(rows: dict[str, list[CopyRow]], gone: set[str] | None = None, **more: object) -> Seen:
    return Seen(
        rows=rows,
        gone=lambda journal: journal in (gone or {""}) or journal == "",
        choose=lambda task_id, home: second_of(task_id, home, rows),
        term=3,
        **more,  # type: ignore[arg-type]
    )


def test_a_task_whose_home_and_second_home_live_is_left_alone() -> None:
    rows = {A: [row("t", "home", 0, A, B)], B: [row("t", "second", 0, A, B)]}
    assert plans(seen(rows)) == {}


def test_the_second_home_of_a_dead_one_adopts_with_a_later_epoch() -> None:
    rows = {B: [row("t", "second", 0, A, B)], C: []}
    (adoption,) = plans(seen(rows, {A}))[B].adopt
    assert (adoption.epoch, adoption.second) == (Epoch(3, 1), C)
    assert plans(seen(rows, {A}, busy={"t"})) == {}
    assert plans(seen(rows, set())) == {}, "a home that nobody has heard of yet is waited for"


def test_a_dead_second_home_is_replaced_and_one_that_leaves_too() -> None:
    rows = {A: [row("t", "home", 0, A, B)], C: []}
    assert plans(seen(rows, {B}))[A].seconds[0].second == C
    with_b = rows | {B: [row("t", "second", 0, A, B)]}
    found = plans(Seen(rows=with_b, gone=lambda j: not j, choose=lambda *_: C, term=1, leaving={B}))
    assert found[A].seconds[0].second == C
    assert plans(seen({A: [row("t", "home", 0, A, "")], C: []}))[A].seconds[0].second == C


def test_who_comes_back_resumes_what_nobody_adopted_and_gives_up_the_rest() -> None:
    own, moved = row("own", "home", 0, A, B, waiting=True), row("moved", "home", 0, A, B, waiting=True)
    rows = {
        A: [own, moved],
        B: [row("own", "second", 0, A, B), row("moved", "home", 1, B, C)],
        C: [row("moved", "second", 1, B, C)],
    }
    found = plans(seen(rows))
    assert found[A].own == ["own"]
    (gone,) = found[A].moved
    assert (gone.task_id, gone.home, gone.epoch) == ("moved", B, Epoch(1, 1))
    assert set(found) == {A}


def test_copies_that_nobody_needs_are_dropped() -> None:
    never_begun = {A: [], B: [row("t", "second", 0, A, B)]}
    assert [each.task_id for each in plans(seen(never_begun))[B].drop] == ["t"]
    replaced = {
        A: [row("t", "home", 1, A, C)],
        B: [row("t", "second", 0, A, B)],
        C: [row("t", "second", 1, A, C)],
    }
    assert set(plans(seen(replaced))) == {B}
    former = {
        A: [row("t", "former", 1, B, "")],
        B: [row("t", "home", 1, B, C, finished=True)],
        C: [row("t", "second", 1, B, C)],
    }
    assert set(plans(seen(former))) == {A}


EPOCHS = st.builds(Epoch, st.integers(1, 3), st.integers(0, 3))
ROWS = st.builds(
    CopyRow,
    task_id=st.just("t"),
    role=st.sampled_from(["home", "second", "former"]),
    epoch=EPOCHS,
    home=st.sampled_from([A, B, C]),
    second=st.sampled_from(["", A, B, C]),
    waiting=st.booleans(),
)


@given(st.dictionaries(st.sampled_from([A, B, C]), ROWS, min_size=1), st.sets(st.sampled_from([A, B, C])))
def test_a_task_is_given_to_one_node_at_most_and_always_by_a_later_epoch(
    rows: dict[str, CopyRow], gone: set[str]
) -> None:
    living = {journal: [found] for journal, found in rows.items() if journal not in gone}
    found = plans(seen(living, gone | {""}))
    adopters = [journal for journal, plan in found.items() if plan.adopt]
    assert len(adopters) <= 1
    owner = owner_of({journal: each[0] for journal, each in living.items()})
    for journal, plan in found.items():
        for each in (*plan.adopt, *plan.seconds):
            assert each.epoch > rows[journal].epoch
            assert each.second not in gone
            assert each.second != journal
        if plan.adopt and owner is not None:
            assert rows[owner].epoch < rows[journal].epoch
        assert not plan.own or journal == owner


@pytest.mark.parametrize(
    ("granted", "rostered", "own", "office"),
    [
        (1, 1, True, True),
        (0, 1, True, False),
        (1, 2, True, True),
        (1, 2, False, False),
        (0, 2, True, False),
        (2, 3, True, True),
        (1, 3, True, False),
        (2, 4, True, False),
        (33, 64, False, True),
        (32, 64, True, False),
    ],
)
def test_a_majority(granted: int, rostered: int, own: bool, office: bool) -> None:
    assert majority(granted, rostered, own) is office


# ── members and settings ──────────────────────────────────────────────────────


def test_silence_makes_a_member_suspect_and_then_gone() -> None:
    member = FleetMember(link=Link(url="http://127.0.0.1:1"), last_byte=0.0)
    member.reported(report(A), 100.0)
    member.rows = {}
    assert member.look(100.0) == "joining"
    member.become("up", 100.0)
    assert [member.look(100.0 + s) for s in (0, SUSPECT_S - 0.1, SUSPECT_S, GONE_S)] == [
        "up",
        "up",
        "suspect",
        "gone",
    ]
    assert member.become("gone", 112.0)
    assert (member.rows, member.answers, member.look(112.0)) == (None, False, "gone")


def test_nothing_is_decided_before_everybody_answered_or_is_gone() -> None:
    first, second = (FleetMember(link=Link(url=f"http://127.0.0.1:{n}"), last_byte=0.0) for n in (1, 2))
    roster = Roster({"1": first, "2": second})
    first.reported(report(A), 0.0)
    first.rows = {}
    assert not roster.settled
    assert not roster.gone(B)
    second.become("gone", 0.0)
    assert roster.settled
    assert roster.gone(B)
    assert not roster.gone(A)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "name the nodes"),
        ({"nodes": ("10.0.0.5",)}, "give addresses such as"),
        ({"nodes": ("@n",), "host": "0.0.0.0"}, "set POLARNODE_TOKEN"),
        ({"nodes": ("@n",), "host": "0.0.0.0", "token": "t"}, "--tls-cert"),
        ({"nodes": ("@n",), "tls_cert": "c"}, "belong together"),
        ({"nodes": ("@n",), "min_nodes": 0.0}, "min_nodes"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        FleetConfig(**settings).check()  # type: ignore[arg-type]


def test_an_old_home_waits_for_those_that_know_more() -> None:
    """A is back; B adopted its task and C is the new second home, and both are away for a moment."""
    known = KnownHomes()
    known.listed(A, [row("t", "home", 0, A, B)])
    known.ordered(B, Adoption(task_id="t", epoch=Epoch(1, 1), second=C))
    old = row("t", "home", 0, A, B, waiting=True)
    assert plans(seen({A: [old]}, {B, C}, known=known.known)) == {}
    assert known.later(old)
    # C answers and has nothing: B told nobody anything
    resumed = plans(seen({A: [old], C: []}, {B}, known=known.known))
    assert resumed[A].own == ["t"]
    # and C, whoever else is there, is asked first: B, when it goes on, finds the later epoch at C
    others = {f"j{number:016x}": list[CopyRow]() for number in range(9)}
    mine = row("t", "home", 0, A, B)
    seconds = plans(seen({A: [mine], C: [], **others}, {B}, known=known.known))
    assert seconds[A].seconds == [Adoption(task_id="t", epoch=Epoch(3, 2), second=C)]
    # A stands alone with a copy that B never took over: the next epoch is above the one that was ordered
    kept = row("t", "second", 0, B, A)
    adopted = plans(seen({A: [kept], C: []}, {B}, known=known.known))
    assert adopted[A].adopt == [Adoption(task_id="t", epoch=Epoch(3, 2), second=C)]
    # B is back, and has the task
    mine = row("t", "home", 1, B, C)
    assert plans(seen({A: [old], B: [mine]}, {C}, known=known.known))[A].moved[0].home == B


def test_a_task_that_its_readers_have_is_not_begun_again() -> None:
    known = KnownHomes()
    known.listed(B, [row("t", "home", 1, B, C)])
    known.listed(B, [])  # dropped: acknowledged by all
    old = row("t", "home", 0, A, B, waiting=True)
    found = plans(seen({A: [old], C: []}, {B}, known=known.known, ended=known.ended))
    assert (found[A].own, found[A].seconds) == ([], [])
    assert found[A].moved[0].epoch == Epoch(1, 1)
    stale = row("t", "second", 0, B, C)
    assert plans(seen({C: [stale]}, {A, B}, known=known.known, ended=known.ended))[C].drop


def test_an_adopted_task_is_remembered_while_its_first_home_is_away() -> None:
    adopted = row("t", "home", 1, B, C, finished=True, acknowledged=True)
    rows = {B: [adopted], C: [row("t", "second", 1, B, C)]}
    assert plans(seen(rows, {A})) == {}
    assert plans(seen(rows, {A, C} | {""})) == {}, "nothing more is copied of it"
    back = rows | {A: [row("t", "home", 0, A, B, waiting=True)]}
    assert set(plans(seen(back, complete=True))) == {A}
    told = rows | {A: []}
    assert set(plans(seen(told, complete=True))) == {B, C}
