"""Trees of sessions and forks: the advantage and weight of each turn in numbers, and that neither depends on which
continuation of a state was called the session and which its fork.
"""

from collections.abc import Mapping, Sequence
from math import fsum, sqrt
from random import Random
from typing import Any, get_args

import pytest
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.arrays import floats, ids
from polarnode.core.errors import Refused
from polarnode.core.trajectory import ForkedFrom, Outcome, Trace, Trajectory, TurnSpan
from polarnode.groups import Estimator, Group, LossMean, Member, Row, forests_of, rows_of, tree_rows_of
from polarnode.groups.training_rows import SPREAD_EPSILON
from polarnode.groups.trees import TreeCredit

CREDITS: tuple[TreeCredit, ...] = get_args(TreeCredit)
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
LOSSES: tuple[LossMean, ...] = get_args(LossMean)


# ── sessions and forks ────────────────────────────────────────────────────────


def row(counts: Sequence[int], *, inherited: int = 0, reward: float | None = None) -> Trace:
    """A row with a turn of so many sampled tokens for each of `counts`, and a token of a prompt before each."""
    spans, mask = [], b""
    for turn, sampled in enumerate(counts):
        start = len(mask) + 1
        mask += b"\0" + (b"\0" if turn < inherited else b"\1") * sampled
        spans.append(TurnSpan(turn=turn, start=start, end=start + sampled))
    return Trace(
        lineage=0,
        token_ids=ids(range(len(mask))),
        loss_mask=mask,
        logprobs=floats([-0.5 * trained for trained in mask]),
        prompt_length=1,
        turn_spans=tuple(spans),
        version_spans=(),
        reward=reward,
    )


def session(
    name: str,
    reward: float,
    counts: Sequence[int],
    *,
    of: str | None = None,
    at: int = 0,
    own: float | None = None,
) -> Trajectory:
    """A session, or a fork of `of` at turn `at`; `counts` has the tokens of all turns of its path, `own` is
    the reward of its row.
    """
    fork = None if of is None else ForkedFrom(session_id=of, turn=at, got=at, by="replay")
    return Trajectory(
        session_id=name,
        task_id="t",
        group_id="g",
        sample_index=0,
        outcome=Outcome(status="completed"),
        reward=reward,
        traces=(row(counts, inherited=at if of is not None else 0, reward=own),),
        turns=(),
        forked_from=fork,
    )


def group(*sessions: Trajectory, unusable: tuple[str, ...] = (), **more: Any) -> Group:
    members = tuple(
        Member(
            session_id=each.session_id,
            sample_index=index,
            status="completed",
            reward=each.reward,
            usable=each.session_id not in unusable,
        )
        for index, each in enumerate(sessions)
    )
    made = Group(task_id="t", group_id="g", state="complete", members=members, trajectories=sessions)
    return evolve(made, **more)


def advantages(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    return _by_turn(rows, [list(each.advantages) for each in rows])


def weights(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    return _by_turn(rows, [list(each.weights) for each in rows])


def _by_turn(rows: Sequence[Row], values: Sequence[Sequence[float]]) -> dict[tuple[str, int], float]:
    """The value of each trained turn, which all its tokens have."""
    found = {}
    for each, tokens in zip(rows, values, strict=True):
        for span in each.trace.turn_spans:
            if 1 in each.trace.loss_mask[span.start : span.end]:
                (found[each.session_id, span.turn],) = set(tokens[span.start : span.end])
    return found


# ── the formulas in numbers ───────────────────────────────────────────────────

# a forks into b and c before turn 2, and c into d before turn 3; e stands alone
A = session("a", 1.0, [1, 1, 1, 1])
B = session("b", 0.0, [1, 1, 1], of="a", at=2)
C = session("c", 1.0, [1, 1, 1, 1], of="a", at=2)
D = session("d", 0.0, [1, 1, 1, 1], of="c", at=3)
E = session("e", 0.0, [1, 1])
TREE = group(A, B, C, D, E)


def test_segment_compares_with_its_start_state() -> None:
    """A run of turns is compared with the others of the state where it began."""
    found = advantages(tree_rows_of([[TREE]], estimator="grpo_without_std"))
    root, forked = 2 / 5, 2 / 4  # the mean of all five leaves; of the four of a's tree
    expected = {
        **dict.fromkeys([("a", 0), ("a", 1)], forked - root),
        **dict.fromkeys([("a", 2), ("a", 3)], 1 - forked),
        ("b", 2): 0 - forked,
        ("c", 2): 1 / 2 - forked,  # c and d go on from it
        ("c", 3): 1 - 1 / 2,
        ("d", 3): 0 - 1 / 2,
        **dict.fromkeys([("e", 0), ("e", 1)], 0 - root),
    }
    assert found == pytest.approx(expected, abs=1e-6)
    out = advantages(tree_rows_of([[TREE]]))
    # leave_one_out: each leaf against the others of its comparison, then the mean over the leaves of the run
    assert out["a", 2] == pytest.approx(1 - 1 / 3, abs=1e-6)
    assert out["c", 2] == pytest.approx(((1 - 1 / 3) + (0 - 2 / 3)) / 2, abs=1e-6)
    assert out["d", 3] == pytest.approx(-1.0)


def test_all_leaves_subtracts_problem_value() -> None:
    """`all_leaves` is the value of a turn less that of the problem."""
    found = advantages(tree_rows_of([[TREE]], credit="all_leaves", estimator="grpo_without_std"))
    expected = {
        **dict.fromkeys([("a", 0), ("a", 1)], 1 / 2 - 2 / 5),
        **dict.fromkeys([("a", 2), ("a", 3), ("c", 3)], 1 - 2 / 5),
        **dict.fromkeys([("b", 2), ("d", 3), ("e", 0), ("e", 1)], 0 - 2 / 5),
        ("c", 2): 1 / 2 - 2 / 5,
    }
    assert found == pytest.approx(expected, abs=1e-6)


def test_tree_grpo_adds_both_advantages() -> None:
    """`tree_grpo` adds the advantage in the tree to that among all."""
    found = advantages(tree_rows_of([[TREE]], credit="tree_grpo", estimator="grpo"))
    every, tree = sqrt((2 * 0.36 + 3 * 0.16) / 4) + SPREAD_EPSILON, sqrt(4 * 0.25 / 3) + SPREAD_EPSILON
    assert found["a", 3] == pytest.approx(0.6 / every + 0.5 / tree, abs=1e-6)
    assert found["b", 2] == pytest.approx(-0.4 / every - 0.5 / tree, abs=1e-6)
    assert found["a", 0] == pytest.approx(0.1 / every, abs=1e-6), "every leaf of its tree has it"
    assert found["e", 0] == pytest.approx(-0.4 / every, abs=1e-6), "alone in its tree"
    alone = advantages(tree_rows_of([[group(A, B)]], credit="tree_grpo"))
    assert (alone["a", 2], alone["b", 2]) == (1.0, -1.0), "one tree is one comparison, not two"


def test_shared_turns_sum_leaf_weights() -> None:
    """Turns that leaves share have the weight of each leaf."""
    rows = tree_rows_of([[TREE]], loss="session_mean")
    found = weights(rows)
    # five leaves, on whose paths four tokens are trained, three of b and two of e
    assert found["a", 0] == pytest.approx((3 / 4 + 1 / 3) / 5)
    assert found["a", 2] == pytest.approx(1 / 20)
    assert found["b", 2] == pytest.approx(1 / 15)
    assert found["c", 2] == pytest.approx(2 / 20)
    assert found["e", 1] == pytest.approx(1 / 10)
    assert fsum(found.values()) == pytest.approx(1.0)
    assert weights(tree_rows_of([[TREE]], loss="fixed_length", length=8))["a", 1] == pytest.approx(4 / 40)
    assert {round(each, 6) for each in weights(tree_rows_of([[TREE]])).values()} == {0.1}
    first = rows[0]
    assert first.weight * first.tokens == pytest.approx(fsum(first.weights)), "for a loss that is a mean"


# ── without forks ─────────────────────────────────────────────────────────────


@given(
    st.lists(
        st.tuples(
            st.integers(-4, 4).map(float),
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.sampled_from([None, 0.5]),
        ),
        min_size=1,
        max_size=6,
    ),
    *map(st.sampled_from, (CREDITS, ESTIMATORS, LOSSES)),
    st.integers(0, 6),
)
def test_unforked_tree_rows_equal_group_rows(
    shapes: Sequence[tuple[float, list[int], float | None]],
    credit: TreeCredit,
    estimator: Estimator,
    loss: LossMean,
    half: int,
) -> None:
    """Sessions without forks have exactly the rows of their groups."""
    every = [
        session(f"s{index}", reward, counts, own=own) for index, (reward, counts, own) in enumerate(shapes)
    ]
    groups = [group(*part) for part in (every[:half], every[half:]) if part]
    how: dict[str, Any] = {"estimator": estimator, "loss": loss}
    how |= {"length": 50} if loss == "fixed_length" else {}
    assert forests_of(groups) == tuple((each,) for each in groups)
    assert tree_rows_of(forests_of(groups), credit=credit, **how) == rows_of(groups, **how)


# ── however it was cut ────────────────────────────────────────────────────────


@define(eq=False)
class Node:
    """A turn of a tree. A path ends where a node has no child."""

    name: int
    tokens: int
    reward: float
    children: "list[Node]" = field(factory=list)


@st.composite
def problems(draw: st.DrawFn) -> list[Node]:
    """Roots: the first turns of the trees of one problem."""
    count = draw(st.integers(1, 12))
    nodes: list[Node] = []
    roots: list[Node] = []
    for name in range(count):
        node = Node(name=name, tokens=draw(st.integers(1, 3)), reward=float(draw(st.integers(-3, 3))))
        above = draw(st.sampled_from([None, *nodes])) if nodes else None
        (roots if above is None else above.children).append(node)
        nodes.append(node)
    return roots


def cut(roots: Sequence[Node], random: Random) -> tuple[list[Trajectory], dict[tuple[str, int], int]]:
    """The trees as sessions and forks: at each turn any child goes on as the session, and the others are forks
    of it, or of a fork that was made before. Returns also which node each trained turn is.
    """
    made: list[Trajectory] = []
    names: dict[tuple[str, int], int] = {}

    def grow(path: list[Node], node: Node, fork_of: list[str]) -> None:
        name = f"s{len(made)}-{random.random():.6f}"
        at, own = len(path), [*path, node]
        below: list[tuple[list[Node], Node]] = []
        while own[-1].children:
            children = list(own[-1].children)
            random.shuffle(children)
            below += [(list(own), each) for each in children[1:]]
            own.append(children[0])
        for turn in range(at, len(own)):
            names[name, turn] = own[turn].name
        counts = [each.tokens for each in own]
        parent = random.choice(fork_of) if fork_of else None
        made.append(session(name, own[-1].reward, counts, of=parent, at=at))
        # forks at the same state may be made of the session or of each other
        siblings: dict[int, list[str]] = {}
        for before, child in below:
            known = siblings.setdefault(len(before), [name])
            first = len(made)
            grow(before, child, known)
            known.append(made[first].session_id)

    for root in roots:
        grow([], root, [])
    random.shuffle(made)
    return made, names


def by_node(
    values: Mapping[tuple[str, int], float], names: Mapping[tuple[str, int], int]
) -> dict[int, float]:
    assert values.keys() == names.keys(), "each sampled turn has exactly one value"
    return {names[turn]: value for turn, value in values.items()}


@given(
    problems(),
    st.integers(0, 1000),
    st.integers(0, 1000),
    *map(st.sampled_from, (CREDITS, ESTIMATORS, LOSSES)),
)
def test_tree_cut_moves_no_advantage(
    roots: list[Node], one: int, two: int, credit: TreeCredit, estimator: Estimator, loss: LossMean
) -> None:
    """How a tree was cut moves no tokens advantage and no weight."""
    how: dict[str, Any] = {"credit": credit, "estimator": estimator, "loss": loss}
    how |= {"length": 40} if loss == "fixed_length" else {}
    found = []
    for seed in (one, two):
        sessions, names = cut(roots, Random(seed))
        rows = tree_rows_of([[group(*sessions)]], **how)
        sampled = sum(each.trainable_tokens for each in sessions)
        assert sum(row.tokens for row in rows) == sampled
        found.append((by_node(advantages(rows), names), by_node(weights(rows), names)))
        if loss != "fixed_length":
            assert fsum(weight for row in rows for weight in row.weights) == pytest.approx(1.0, abs=1e-5)
    (advantage, weight), (others, other) = found
    assert advantage == pytest.approx(others, abs=1e-5)
    assert weight == pytest.approx(other, abs=1e-6)


# ── which groups are one forest ───────────────────────────────────────────────


def test_forks_join_their_sessions_forest() -> None:
    roots, others = group(A, E), group(session("x", 1.0, [1]))
    forks, later = group(B, C), group(D)
    assert forests_of([roots, others, later, forks]) == ((roots, later, forks), (others,))
    together = tree_rows_of(forests_of([roots, others, later, forks]))
    alone = tree_rows_of([[roots, later, forks], [others]])
    assert together == alone
    assert advantages(together).items() >= advantages(tree_rows_of([[TREE]])).items()


def test_orphan_forks_are_own_group() -> None:
    """Forks whose session is not at hand are a group of their own."""
    forks = group(B, C)
    assert forests_of([forks]) == ((forks,),)
    assert tree_rows_of([[forks]]) == rows_of([forks])
    assert advantages(tree_rows_of([[forks]]))["c", 2] == 1.0


def test_fork_without_inheritance_is_root() -> None:
    fork = session("f", 1.0, [1, 1], of="e", at=0)
    flat = evolve(fork, forked_from=None)
    assert tree_rows_of([[group(E, fork)]]) == tree_rows_of([[group(E, flat)]])


def test_unusable_session_with_usable_forks() -> None:
    """A session that is not usable is no leaf, and its forks are."""
    rows = tree_rows_of([[group(A, E, unusable=("a",)), group(B, C)]], estimator="grpo_without_std")
    found = advantages(rows)
    assert set(found) == {("b", 2), ("c", 2), ("c", 3), ("e", 0), ("e", 1)}
    assert found["c", 3] == pytest.approx(0.5), "against b, from the state that both inherited"
    assert found["e", 0] == pytest.approx(0 - 1 / 3)
    (dropped,) = {row.session_id for row in tree_rows_of([[group(E), group(B, C, state="dropped")]])}
    assert dropped == "e"


def test_lineage_reward_belongs_to_leaf() -> None:
    """A lineage's own reward is that of its session's leaf."""
    own = evolve(A, traces=(row([1, 1, 1, 1], reward=3.0),))
    found = advantages(tree_rows_of([[group(own, B)]], credit="all_leaves", estimator="grpo_without_std"))
    assert found["a", 3] == pytest.approx(2.5)
    assert found["a", 0] == pytest.approx(((3 - 0.5) + (0 - 0.5)) / 2)


def test_circle_or_lossless_length_is_refused() -> None:
    """A circle, and a length without its loss, are refused."""
    one, two = session("one", 1.0, [1, 1], of="two", at=1), session("two", 1.0, [1, 1], of="one", at=1)
    with pytest.raises(Refused, match="session one descends from itself"):
        tree_rows_of([[group(one, two)]])
    with pytest.raises(Refused, match="length is for fixed_length"):
        tree_rows_of([], loss="fixed_length")
