"""Advantages and weighted training rows of groups, for a policy-gradient loss.

Pure. The loss of a batch is the plain sum, over all rows and their trained tokens, of `weight` times the loss
of that token; the batch may be cut into micro-batches anywhere. Invariants: how a session was cut into rows
and slices changes no token's weight; equal rewards, and a single reward, give advantages of exactly 0.

Sources. `leave_one_out`: Kool, van Hoof, Welling, "Buy 4 REINFORCE samples, get a baseline for free" (2019),
and for language models Ahmadian et al., "Back to basics" (RLOO, arXiv 2402.14740). `grpo`: Shao et al.,
"DeepSeekMath" (arXiv 2402.03300). `grpo_without_std`: Liu et al., "Understanding R1-Zero-like training" (Dr.
GRPO, arXiv 2503.20783), because a division by the spread favours tasks that are nearly always or nearly never
solved. `token_mean`: Yu et al., "DAPO" (arXiv 2503.14476). `session_mean`: GRPO's mean over samples of the
mean over tokens, where a sample is a session. `fixed_length`: Dr. GRPO. Rewards of turns: DeepSeekMath's
process supervision. `teacher_advantages`: Lu and Thinking Machines Lab, "On-policy distillation" (2025).
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum, sqrt
from typing import Final, Literal, assert_never

from attrs import field, frozen

from polarnode.core.arrays import floats
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trace, Trajectory
from polarnode.groups.group import Group, check_flat, judged_again

# ── advantages ────────────────────────────────────────────────────────────────────────────────────

Estimator = Literal["leave_one_out", "grpo", "grpo_without_std"]
# This is added to the spread, as verl does, so that advantages stay near 0 where rewards differ by rounding
# alone.
SPREAD_EPSILON: Final = 1e-6


@frozen(kw_only=True)
class Scale:
    """The baseline and the spread with which a session's rewards are compared."""

    baseline: float
    spread: float = 1.0

    def of(self, reward: float) -> float:
        return (reward - self.baseline) / self.spread


def leave_one_out(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean of the others. The baseline does not depend on what session i did, so the gradient has
    no bias.
    """
    return advantages_of(rewards, "leave_one_out")


def group_normalised(rewards: Sequence[float], *, std: bool = True) -> tuple[float, ...]:
    """A_i = (r_i - mean) / (std + EPSILON) with the sample's std (n - 1), as TRL and verl take it;
    `std=False` leaves the division out.
    """
    return advantages_of(rewards, "grpo" if std else "grpo_without_std")


def advantages_of(rewards: Sequence[float], estimator: Estimator) -> tuple[float, ...]:
    """One advantage for each reward, in their order. They sum to 0."""
    return tuple(scale.of(reward) for scale, reward in zip(scales(rewards, estimator), rewards, strict=True))


def scales(rewards: Sequence[float], estimator: Estimator) -> tuple[Scale, ...]:
    """The baseline and spread for each session's rewards. Rewards of its lineages use the same ones."""
    mean = exact_mean(rewards)
    match estimator:
        case "leave_one_out":
            others = max(len(rewards) - 1, 1)
            return tuple(Scale(baseline=mean - (reward - mean) / others) for reward in rewards)
        case "grpo":
            return tuple(Scale(baseline=mean, spread=reward_spread(rewards)) for _ in rewards)
        case "grpo_without_std":
            return tuple(Scale(baseline=mean) for _ in rewards)
    assert_never(estimator)


def exact_mean(rewards: Sequence[float]) -> float:
    """The mean. It is 0 for no values, and exactly the value if all are equal."""
    if not rewards or min(rewards) == max(rewards):
        return rewards[0] if rewards else 0.0
    return fsum(rewards) / len(rewards)


def reward_spread(rewards: Sequence[float]) -> float:
    """The sample's standard deviation plus EPSILON, or 1 if the rewards are equal."""
    mean = exact_mean(rewards)
    squares = fsum((reward - mean) ** 2 for reward in rewards)
    return sqrt(squares / (len(rewards) - 1)) + SPREAD_EPSILON if squares > 0 else 1.0


# ── training rows ─────────────────────────────────────────────────────────────────────────────────

LossMean = Literal["token_mean", "session_mean", "fixed_length"]


@frozen(kw_only=True)
class Row:
    """One trace with something to train. `weight` applies to each of its trained tokens. `turns` maps turns
    that have their own advantage to it. `turn_weights` maps turns to their weights if these differ, as in
    trees; `weight` is then the mean over the row's trained tokens.
    """

    session_id: str
    trace: Trace
    advantage: float
    weight: float
    turns: Mapping[int, float] = field(factory=dict)
    turn_weights: Mapping[int, float] = field(factory=dict)

    @property
    def tokens(self) -> int:
        """The number of trained tokens. A trainer whose loss is a mean over a row's tokens multiplies that
        loss by `weight * tokens`.
        """
        return self.trace.loss_mask.count(1)

    @property
    def advantages(self) -> "array[float]":
        """The advantage of each token: float32[T], 0 where the mask is 0."""
        return self._by_turn(self.advantage, self.turns)

    @property
    def weights(self) -> "array[float]":
        """The factor of each token's loss: float32[T], 0 where the mask is 0."""
        return self._by_turn(self.weight, self.turn_weights)

    def _by_turn(self, value: float, turns: Mapping[int, float]) -> "array[float]":
        """`value` at each trained token, or the value of the token's turn: float32[T], 0 elsewhere."""
        mask = self.trace.loss_mask
        found = floats(value if trained else 0.0 for trained in mask)
        for span in self.trace.turn_spans:
            if span.turn in turns:
                own = turns[span.turn]
                found[span.start : span.end] = floats(
                    own if trained else 0.0 for trained in mask[span.start : span.end]
                )
        return found

    @property
    def teacher_advantages(self) -> "array[float]":
        """The teacher's logprob of each trained token minus the policy's: float32[T], 0 where the mask is 0.
        It is the advantage of on-policy distillation, which descends the reverse KL from the policy to its
        teacher. Add it to `advantages` to train both. Raises Refused for a row without its teacher's
        logprobs.
        """
        trace = self.trace
        if trace.teacher_logprobs is None:
            raise Refused(
                f"a row of session {self.session_id} has no teacher's logprobs: set carry.teacher in its"
                " task, and leave the session out if missing_extras says why its teacher has none"
            )
        pairs = zip(trace.teacher_logprobs, trace.logprobs, trace.loss_mask, strict=True)
        return floats(teacher - own if trained else 0.0 for teacher, own, trained in pairs)


def rows_of(
    groups: Iterable[Group],
    *,
    estimator: Estimator = "leave_one_out",
    loss: LossMean = "token_mean",
    length: int | None = None,
    process: bool = False,
    served: Sequence[str] | None = None,
) -> tuple[Row, ...]:
    """The training rows of a batch of groups, without dropped ones. `length` is for `fixed_length`: the most
    tokens that a session may have, a constant. `served` is for groups that were kept since they were read:
    the versions that the node has served, the oldest first (`client.weights().versions`), by which the groups
    are judged again (`judged_again`).

    A row's own reward, if it has one, is compared with its session's baseline. With `process`, turns with
    rewards of their own are compared with all such turns of the group, and a token's advantage is the sum
    over its turn and the later ones of its session. Raises Refused for a group that is a tree, whose rows are
    those of `tree_rows_of`.
    """
    groups = tuple(groups if served is None else (judged_again(each, [served]) for each in groups))
    for group in groups:
        check_flat(group)
    batch = [(group, group.usable) for group in groups]
    weights = _token_weights([each for _, sessions in batch for each in sessions], loss, length)
    return tuple(
        row
        for group, sessions in batch
        for row in _rows(group, sessions, estimator, weights, process=process)
    )


def _rows(
    group: Group,
    sessions: Sequence[Trajectory],
    estimator: Estimator,
    weights: Mapping[str, float],
    *,
    process: bool,
) -> Iterator[Row]:
    """The rows of one group. Rewards are compared with those of all usable members, including members whose
    trajectory the reader does not have.
    """
    rewards = {
        member.session_id: member.reward
        for member in group.members
        if member.usable and member.reward is not None
    }
    of = dict(zip(rewards, scales(tuple(rewards.values()), estimator), strict=True))
    turns = _returns_to_go(sessions, estimator) if process else {}
    for session in sessions:
        whose = session.session_id
        for trace in session.traces:
            if 1 in trace.loss_mask:
                reward = rewards[whose] if trace.reward is None else trace.reward
                advantage = of[whose].of(reward)
                yield Row(
                    session_id=whose,
                    trace=trace,
                    advantage=advantage,
                    weight=weights[whose],
                    turns=turns.get(whose, {}),
                )


def check_length(loss: LossMean, length: int | None) -> None:
    """Raise Refused for a length without `fixed_length`, and for `fixed_length` without a length."""
    if (loss == "fixed_length") != (length is not None and length > 0):
        raise Refused(
            "length is for fixed_length, which needs it: the tokens that a session may have at most, as a"
            " constant",
            path="$.length",
        )


def _token_weights(sessions: Sequence[Trajectory], loss: LossMean, length: int | None) -> dict[str, float]:
    """The weight of each trained token of a session, by session id, in a batch of these sessions."""
    check_length(loss, length)
    tokens = {session.session_id: session.trainable_tokens for session in sessions}
    match loss:
        case "token_mean":
            return dict.fromkeys(tokens, 1 / max(sum(tokens.values()), 1))
        case "session_mean":
            return {session_id: 1 / (len(tokens) * max(count, 1)) for session_id, count in tokens.items()}
        case "fixed_length":
            return dict.fromkeys(tokens, 1 / (len(tokens) * (length or 1)) if tokens else 0.0)
    assert_never(loss)


# ── turn rewards ──────────────────────────────────────────────────────────────────────────────────


def _returns_to_go(sessions: Sequence[Trajectory], estimator: Estimator) -> dict[str, dict[int, float]]:
    """The sum of the normalised rewards of a turn and the turns after it, by session and turn. Only sessions
    with such rewards are included.
    """
    every = {session.session_id: turn_rewards(session) for session in sessions}
    found: dict[str, dict[int, float]] = {}
    for session in sessions:
        if rewards := every[session.session_id]:
            scale = _turn_scale(session.session_id, every, estimator)
            turns = {span.turn for trace in session.traces for span in trace.turn_spans}
            found[session.session_id] = {
                turn: fsum(scale.of(each) for later, each in rewards.items() if later >= turn)
                for turn in turns
            }
    return found


def turn_rewards(session: Trajectory) -> dict[int, float]:
    """The rewards of the turns that have their own in a trace. Each turn occurs once, however many rows it is
    in. Turns that a fork inherited count in its parent.
    """
    return {
        span.turn: span.reward
        for trace in session.traces
        for span in trace.turn_spans
        if span.reward is not None and span.turn >= session.inherited
    }


def _turn_scale(session_id: str, every: Mapping[str, Mapping[int, float]], estimator: Estimator) -> Scale:
    together = [reward for rewards in every.values() for reward in rewards.values()]
    match estimator:
        case "leave_one_out":
            others = [
                reward for name, rewards in every.items() if name != session_id for reward in rewards.values()
            ]
            return Scale(baseline=exact_mean(others or together))
        case "grpo":
            return Scale(baseline=exact_mean(together), spread=reward_spread(together))
        case "grpo_without_std":
            return Scale(baseline=exact_mean(together))
    assert_never(estimator)
