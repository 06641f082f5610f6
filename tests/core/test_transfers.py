"""How much is under way at a time."""

from typing import Any

from tensorplay.distributed.optim._core.transfers import InFlight, Transfer, loads_of


def transfer(*loads: int) -> Transfer:
    nothing: Any = None
    return Transfer(*(nothing,) * 8, loads=loads, is_last=True)


def test_loads_are_what_each_rank_receives_and_sends() -> None:
    assert loads_of((3, 0), 4) == (12, 0, 0, 12)
    assert loads_of((1, 2, 3), 1) == (2, 4, 6, 5, 4, 3)


def test_directions_count_apart() -> None:
    in_flight = InFlight(10)
    for _ in range(2):
        in_flight.append(transfer(5, 0))
        in_flight.append(transfer(0, 5))
    assert not in_flight.is_full
    in_flight.append(transfer(1, 0))
    assert in_flight.is_full
    assert in_flight.popleft().loads == (5, 0)
    assert not in_flight.is_full
    assert len(in_flight) == 4


def test_large_ones_are_two_at_most() -> None:
    in_flight = InFlight(10)
    in_flight.append(transfer(100, 100))
    assert not in_flight.is_full
    in_flight.append(transfer(1, 1))
    assert in_flight.is_full
