"""The plan by which a bucket travels to the owners of its stretches."""

from hypothesis import given
from hypothesis import strategies as st

from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim.zero.bucket_messages import (
    LEAST_DIRECT_NUMEL,
    Message,
    Stretch,
    plan_rounds,
)


@st.composite
def buckets(draw: st.DrawFn) -> list[Stretch]:
    """Ascending stretches, some adjacent, some empty, short and long ones, with gaps."""
    stretches, end = [], 0
    for _ in range(draw(st.integers(0, 12))):
        start = end + draw(st.sampled_from([0, 0, 0, 5]))
        numel = draw(
            st.sampled_from([0, 1, 7, 300, LEAST_DIRECT_NUMEL, 3 * LEAST_DIRECT_NUMEL + 1])
        )
        end = start + numel
        stretches.append(Stretch(start, end, GroupRank(draw(st.integers(0, 3)))))
    return stretches


def elements(extents: list[tuple[int, int]]) -> list[int]:
    return [element for start, end in extents for element in range(start, end)]


@given(buckets(), st.sampled_from([1000, LEAST_DIRECT_NUMEL, 10 * LEAST_DIRECT_NUMEL]))
def test_each_owner_gets_each_of_its_elements_once_in_order(
    stretches: list[Stretch], longest: int
) -> None:
    rounds = plan_rounds(stretches, longest)
    for owner in range(4):
        wanted = elements([(s.start, s.end) for s in stretches if s.owner == owner])
        sent = [
            extent
            for messages in rounds
            for message in messages
            if message.owner == owner
            for extent in message.extents
        ]
        assert sorted(elements(sent)) == wanted
        for messages in rounds:
            assert sum(m.numel for m in messages if m.owner == owner) <= longest


@given(buckets())
def test_short_stretches_of_an_owner_share_a_message(stretches: list[Stretch]) -> None:
    for messages in plan_rounds(stretches, 1 << 40):
        for owner in range(4):
            own = [message for message in messages if message.owner == owner]
            short = [m for m in own if all(e - s < LEAST_DIRECT_NUMEL for s, e in m.extents)]
            assert len(short) <= 1
            assert all(len(message.extents) == 1 for message in own if message not in short)


def test_adjacent_stretches_of_one_owner_are_one() -> None:
    own, other = GroupRank(1), GroupRank(0)
    rounds = plan_rounds(
        [Stretch(0, 4, own), Stretch(4, 4, other), Stretch(4, 6, own), Stretch(6, 9, other)], 100
    )
    assert rounds == ((Message(other, ((6, 9),)), Message(own, ((0, 6),))),)
