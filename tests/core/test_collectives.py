"""The verbs over real process groups: every dtype, any cuts, and subgroups of other ranks."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim._core.collectives import GroupCommunicator, connect
from tensorplay.distributed.optim._core.ranks import GroupRank
from tests.launch import run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int64,
]


def world() -> GroupCommunicator:
    return connect(None, "Test")


def _run_all(functions: list[Callable[[], Any]]) -> dict[str, Any]:
    return {function.__name__: function() for function in functions}


def results_of(function: Callable[[], Any], launched: list[dict[str, Any]]) -> list[Any]:
    """What ``function`` returned on each rank of a launch that ran several."""
    return [results[function.__name__] for results in launched]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    functions: list[Callable[[], Any]] = [
        _gather_several_in_flight,
        _gather_beyond_the_cuts,
        _gather_a_parameter,
        _pass_every_dtype,
        _pass_bytes,
        _maximum,
        _average_every_dtype,
        _average_of_some,
        _average_several_in_flight,
        _connect_as_a_stranger,
    ]
    return run_ranks(2, _run_all, functions)


@pytest.fixture(scope="module")
def three_ranks() -> list[dict[str, Any]]:
    functions: list[Callable[[], Any]] = [
        _gather_every_dtype,
        _gather_several,
        _gather_bytes,
        _average_every_dtype,
        _average_of_some,
        _average_several_in_flight,
        _without_a_cpu_backend,
    ]
    return run_ranks(3, _run_all, functions)


def own_value(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A value that every dtype can tell from those of two other ranks, if not of three."""
    return torch.tensor(rank % 2 if dtype is torch.bool else rank + 1).to(dtype)


def gather_slices(
    communicator: GroupCommunicator, lengths: list[int], dtype: torch.dtype
) -> list[Any]:
    """Each rank fills its slice with its value; what the whole holds after the gather."""
    cuts = list(accumulate(lengths, initial=0))
    flat = torch.zeros(cuts[-1], dtype=dtype)
    rank = communicator.members.group_rank
    flat[cuts[rank] : cuts[rank + 1]] = own_value(rank, dtype)
    communicator.gather_from_owners(flat, cuts).wait()
    return flat.to(torch.complex64).real.tolist()


def _gather_every_dtype() -> dict[str, list[Any]]:
    return {str(dtype): gather_slices(world(), [1, 2, 3], dtype) for dtype in DTYPES}


def test_gathering_works_for_every_dtype(three_ranks: list[dict[str, Any]]) -> None:
    for result in results_of(_gather_every_dtype, three_ranks):
        for dtype in DTYPES:
            expected = [0, 1, 1, 0, 0, 0] if dtype is torch.bool else [1, 2, 2, 3, 3, 3]
            assert result[str(dtype)] == expected, dtype


def _gather_several() -> list[list[Any]]:
    communicator = world()
    return [
        gather_slices(communicator, lengths, torch.float32)
        for lengths in ([2, 2, 2], [0, 3, 1], [0, 0, 2], [0, 0, 0], [4, 0, 0])
    ]


def test_slices_may_be_even_uneven_or_empty(three_ranks: list[dict[str, Any]]) -> None:
    expected = [[1, 1, 2, 2, 3, 3], [2, 2, 2, 3], [3, 3], [], [1, 1, 1, 1]]
    assert results_of(_gather_several, three_ranks) == [expected] * 3


def _gather_several_in_flight() -> list[list[float]]:
    communicator = world()
    rank = communicator.members.group_rank
    flats = [torch.full((4,), float(rank + 10 * number)) for number in range(3)]
    launched = [communicator.gather_from_owners(flat, [0, 1, 4]) for flat in flats]
    for gathering in reversed(launched):
        gathering.wait()
    return [flat.tolist() for flat in flats]


def test_gathers_may_be_in_flight_together(two_ranks: list[dict[str, Any]]) -> None:
    expected = [[0.0 + n, 1.0 + n, 1.0 + n, 1.0 + n] for n in (0, 10, 20)]
    assert results_of(_gather_several_in_flight, two_ranks) == [expected] * 2


def _gather_beyond_the_cuts() -> list[float]:
    flat = torch.full((5,), float(dist.get_rank()))
    world().gather_from_owners(flat, [0, 1, 3]).wait()
    return flat.tolist()


def test_what_lies_beyond_the_cuts_stays(two_ranks: list[dict[str, Any]]) -> None:
    assert results_of(_gather_beyond_the_cuts, two_ranks) == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]


def _gather_a_parameter() -> tuple[list[float], bool]:
    parameter = torch.nn.Parameter(torch.full((2,), float(dist.get_rank())))
    world().gather_from_owners(parameter.detach(), [0, 1, 2]).wait()
    return parameter.tolist(), parameter.requires_grad


def test_a_parameter_can_be_gathered_in_its_own_storage(two_ranks: list[dict[str, Any]]) -> None:
    assert results_of(_gather_a_parameter, two_ranks) == [([0, 1], True)] * 2


def average(
    communicator: GroupCommunicator, flat: torch.Tensor, contributors: list[int] | None = None
) -> list[Any]:
    ranks = communicator.members if contributors is None else contributors
    communicator.average_(flat, [GroupRank(rank) for rank in ranks]).wait()
    return flat.tolist()


def _average_every_dtype() -> list[list[float]]:
    return [
        average(world(), torch.full((3,), 3.0 * dist.get_rank(), dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    ]


def test_averaging_wide_numbers(
    two_ranks: list[dict[str, Any]], three_ranks: list[dict[str, Any]]
) -> None:
    for launched, mean in ((two_ranks, 1.5), (three_ranks, 3.0)):
        for result in results_of(_average_every_dtype, launched):
            assert result == [[mean] * 3] * 2


def _average_of_some() -> list[list[float]]:
    rank = dist.get_rank()
    return [
        average(world(), torch.full((4,), 2.0 + rank), contributors)
        for contributors in ([0], [1], [0, dist.get_world_size() - 1])
    ]


def test_every_rank_gets_the_mean_of_some(
    two_ranks: list[dict[str, Any]], three_ranks: list[dict[str, Any]]
) -> None:
    for launched, mean in ((two_ranks, 2.5), (three_ranks, 3.0)):
        for result in results_of(_average_of_some, launched):
            assert result == [[2.0] * 4, [3.0] * 4, [mean] * 4]


def _average_several_in_flight() -> list[list[float]]:
    communicator = world()
    ranks = list(communicator.members)
    flats = [torch.full((5,), float(dist.get_rank() + 10 * number)) for number in range(4)]
    launched = [communicator.average_(flat, ranks) for flat in flats]
    for averaging in launched:
        averaging.wait()
    return [flat.tolist() for flat in flats]


def test_averages_may_be_in_flight_together(
    two_ranks: list[dict[str, Any]], three_ranks: list[dict[str, Any]]
) -> None:
    for launched, mean in ((two_ranks, 0.5), (three_ranks, 1.0)):
        for result in results_of(_average_several_in_flight, launched):
            assert result == [[mean + 10 * number] * 5 for number in range(4)]


def _pass_every_dtype() -> dict[str, list[Any]]:
    communicator = world()
    received = {}
    for dtype in DTYPES:
        tensor = torch.arange(6).view(2, 3).to(dtype)
        if communicator.members.group_rank == 0:
            communicator.send(tensor, GroupRank(1)).wait()
        else:
            arriving = torch.zeros(2, 3, dtype=dtype)
            communicator.receive_(arriving, GroupRank(0)).wait()
            received[str(dtype)] = arriving.to(torch.complex64).real.tolist()
    return received


def test_sending_works_for_every_dtype(two_ranks: list[dict[str, Any]]) -> None:
    received = results_of(_pass_every_dtype, two_ranks)[1]
    for dtype in DTYPES:
        expected = [[0, 1, 1], [1, 1, 1]] if dtype is torch.bool else [[0, 1, 2], [3, 4, 5]]
        assert received[str(dtype)] == expected, dtype


PAYLOADS = [b"", b"a", b"\0\0", bytes(range(256)) * 10, b""]


def _pass_bytes() -> list[bytes]:
    communicator = world()
    if communicator.members.group_rank == 0:
        for payload in PAYLOADS:
            communicator.send_bytes(payload, GroupRank(1))
        return []
    return [communicator.receive_bytes(GroupRank(0)) for _ in PAYLOADS]


def test_bytes_of_any_length_can_be_sent(two_ranks: list[dict[str, Any]]) -> None:
    assert results_of(_pass_bytes, two_ranks) == [[], PAYLOADS]


def _gather_bytes() -> list[list[bytes]]:
    communicator = world()
    rank = communicator.members.group_rank
    own = [b"", b"x" * rank, b"\0" * (3 - rank)]
    return [communicator.all_gather_bytes(payload) for payload in own]


def test_every_rank_gets_every_payload_of_any_length(three_ranks: list[dict[str, Any]]) -> None:
    expected = [[b"", b"", b""], [b"", b"x", b"xx"], [b"\0\0\0", b"\0\0", b"\0"]]
    assert results_of(_gather_bytes, three_ranks) == [expected] * 3


def _maximum() -> list[int]:
    rank = dist.get_rank()
    return world().max_([rank, -rank, 2**55 + rank, -(2**55) - rank]).wait()


def test_the_maximum_is_element_wise_and_exact(two_ranks: list[dict[str, Any]]) -> None:
    assert results_of(_maximum, two_ranks) == [[1, 0, 2**55 + 1, -(2**55)]] * 2


def _on_a_subgroup() -> dict[str, Any] | None:
    group = dist.new_group([3, 1], sort_ranks=False)
    if dist.get_rank() not in {1, 3}:
        return None
    communicator = connect(group, "Test")
    rank = communicator.members.group_rank
    result: dict[str, Any] = {
        "members": (communicator.members.global_ranks, rank),
        "gathered": gather_slices(communicator, [1, 2], torch.float32),
        "maximum": communicator.max_([rank, -rank]).wait(),
        "bytes": communicator.all_gather_bytes(b"from %d" % dist.get_rank()),
    }
    tensor = torch.tensor([7.0 if rank == 0 else 0.0])
    if rank == 0:
        communicator.send(tensor, GroupRank(1)).wait()
        communicator.send_bytes(b"hello", GroupRank(1))
    else:
        communicator.receive_(tensor, GroupRank(0)).wait()
        result["hello"] = communicator.receive_bytes(GroupRank(0))
    return {**result, "tensor": tensor.tolist()}


def test_on_a_subgroup_every_verb_speaks_of_group_ranks() -> None:
    results = run_ranks(4, _on_a_subgroup)
    common = {
        "gathered": [1, 2, 2],
        "maximum": [1, 0],
        "bytes": [b"from 3", b"from 1"],
        "tensor": [7],
    }
    assert results == [
        None,
        {**common, "members": ((3, 1), 1), "hello": b"hello"},
        None,
        {**common, "members": ((3, 1), 0)},
    ]


def _without_a_cpu_backend() -> dict[str, Any] | None:
    group = dist.new_group([2, 0], backend="cuda:gloo", sort_ranks=False)
    if dist.get_rank() == 1:
        return None
    communicator = connect(group, "Test")
    rank = communicator.members.group_rank
    result = {
        "backend": communicator.describe_backend(),
        "sends": [communicator.can_send(torch.device(kind)) for kind in ("cpu", "cuda")],
        "maximum": communicator.max_([rank]).wait(),
        "payloads": communicator.all_gather_bytes(b"%d" % rank),
    }
    if rank == 0:
        communicator.send_bytes(b"hello", GroupRank(1))
    else:
        result["hello"] = communicator.receive_bytes(GroupRank(0))
    return result


def test_a_group_without_a_cpu_backend_settles_over_a_companion(
    three_ranks: list[dict[str, Any]],
) -> None:
    common = {
        "backend": "cuda:gloo",
        "sends": [False, True],
        "maximum": [1],
        "payloads": [b"0", b"1"],
    }
    assert results_of(_without_a_cpu_backend, three_ranks) == [
        {**common, "hello": b"hello"},
        None,
        common,
    ]


def _describe() -> tuple[str, bool, str, bool]:
    communicator = world()
    return (
        communicator.describe_backend(),
        communicator.can_send(torch.device("meta")),
        communicator.transport_device().type,
        communicator.process_group is dist.group.WORLD,
    )


def test_the_default_group_is_used_and_its_backends_known() -> None:
    ((backend, sends_meta, transport, is_world),) = run_ranks(1, _describe)
    assert "cpu:gloo" in backend
    assert (sends_meta, transport, is_world) == (False, "cpu", True)


def test_without_a_process_group_the_message_says_how_to_get_one() -> None:
    with pytest.raises(RuntimeError, match=r"^Test needs a process group.*init_process_group"):
        connect(None, "Test")


def _connect_as_a_stranger() -> str:
    group = dist.new_group([1])
    try:
        connect(group, "Test")
    except ValueError as error:
        return str(error)
    return "connected"


def test_a_rank_outside_the_group_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    first, second = results_of(_connect_as_a_stranger, two_ranks)
    assert first.startswith("global rank 0 is not a member of the process_group given to Test")
    assert second == "connected"


def _alone() -> list[Any]:
    communicator = world()
    return [
        gather_slices(communicator, [3], torch.float32),
        average(communicator, torch.ones(3)),
        communicator.max_([4]).wait(),
        communicator.all_gather_bytes(b"me"),
    ]


def test_one_rank_gathers_from_itself() -> None:
    assert run_ranks(1, _alone) == [[[1, 1, 1], [1, 1, 1], [4], [b"me"]]]
