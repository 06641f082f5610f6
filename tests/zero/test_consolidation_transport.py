"""State travels to one rank: each byte once, in chunks, as it was; or nobody sends."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.distributed.optim._core.agreement import Agreement, PeerError
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.state_dicts import IndexedState, own_part, require_fit
from tensorplay.distributed.optim.zero import checkpoint
from tensorplay.distributed.optim.zero.checkpoint import (
    CHUNK_BYTES,
    MESSAGE_BYTES,
    PACK_BELOW_BYTES,
    TensorSpec,
    consolidate,
    receive_tensors_,
    send_tensors,
)
from tests.fakes import FakeCommunicator, run_fake_ranks

CPU = {"cpu": torch.device("cpu")}


def bring(
    states: list[IndexedState],
    target: int = 0,
    then: Callable[[FakeCommunicator], Any] = lambda _communicator: None,
    **options: Any,
) -> list[tuple[Any, Any]]:
    """On each rank what ``consolidate`` returned or raised, and what ``then`` made of the ledger."""

    def run(communicator: FakeCommunicator) -> tuple[Any, Any]:
        state = states[communicator.members.group_rank]
        agreement = Agreement(communicator, "Sharded")
        try:
            full = consolidate(communicator, agreement, state, GroupRank(target), CPU)
        except Exception as error:  # noqa: BLE001 - it is the result
            return error, then(communicator)
        return full, then(communicator)

    return run_fake_ranks(len(states), run, **options)


def test_the_target_gets_every_state_in_index_order_and_the_others_nothing() -> None:
    states: list[IndexedState] = [{3: {"step": 1}}, {0: {"step": 2}, 5: {"step": 3}}, {}]
    for target in range(3):
        results = [full for full, _ in bring(states, target)]
        expected = {0: {"step": 2}, 3: {"step": 1}, 5: {"step": 3}}
        assert results == [expected if rank == target else None for rank in range(3)]
        assert list(results[target]) == [0, 3, 5]


def test_one_rank_consolidates_from_itself() -> None:
    ((full, _),) = bring([{0: {"exp_avg": torch.ones(3)}}])
    assert torch.equal(full[0]["exp_avg"], torch.ones(3))


def test_plain_values_keep_their_types() -> None:
    state = {"step": 3, "betas": (0.9, -math.inf), 7: [None, True, "x"], "dtype": torch.bfloat16}
    (full, _), _ = bring([{}, {0: state}])
    assert full == {0: state}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.bool,
        torch.int64,
    ],
    ids=str,
)
def test_every_dtype_arrives(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype)
    (full, _), _ = bring([{}, {0: {"exp_avg": tensor}}])
    arrived = full[0]["exp_avg"]
    assert arrived.dtype is dtype
    assert torch.equal(arrived.view(torch.uint8), tensor.view(torch.uint8))


AWKWARD = {
    "channels_last": torch.arange(120.0)
    .view(2, 3, 4, 5)
    .contiguous(memory_format=torch.channels_last),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    "expanded": torch.ones(1).expand(4),
    "gaps": torch.arange(24.0).view(4, 6)[:, 1:3],
    "offset": torch.arange(10.0)[4:],
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "requires grad": torch.ones(2, requires_grad=True),
    "large and transposed": torch.arange(PACK_BELOW_BYTES / 2).view(2, -1).t(),
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("holder", [0, 1], ids=["own", "peer's"])
def test_values_and_strides_arrive(name: str, holder: int) -> None:
    tensor = AWKWARD[name]
    states: list[IndexedState] = [{}, {}]
    states[holder] = {0: {"exp_avg": tensor}}
    arrived = bring(states)[0][0][0]["exp_avg"]
    assert torch.equal(arrived, tensor)
    if name not in {"expanded", "gaps"}:
        assert arrived.stride() == tensor.stride()
    assert arrived.untyped_storage().nbytes() == arrived.nbytes


def test_the_targets_own_part_is_a_copy() -> None:
    state = {0: {"exp_avg": torch.zeros(3)}}
    (full, _), _ = bring([state, {}])
    state[0]["exp_avg"].fill_(7)
    assert full[0]["exp_avg"].tolist() == [0, 0, 0]


def test_tensors_arrive_on_the_targets_device_of_their_type() -> None:
    spec = TensorSpec(torch.float32, (2,), (1,), "meta")
    assert spec.allocate({"meta": torch.device("meta")}).device.type == "meta"
    assert TensorSpec(torch.float32, (2,), (1,), "cpu").allocate({}).device.type == "cpu"


def mixed_state() -> IndexedState:
    """Large tensors, and enough small ones for several chunks."""
    large = {"exp_avg": torch.ones(PACK_BELOW_BYTES), "step": torch.tensor(1.0)}
    small = {
        index: {"exp_avg": torch.full((PACK_BELOW_BYTES // 4 - 1,), float(index))}
        for index in range(1, 2 * CHUNK_BYTES // PACK_BELOW_BYTES + 3)
    }
    return {0: large, **small}


def state_bytes(state: IndexedState) -> int:
    return sum(tensor.nbytes for values in state.values() for tensor in values.values())


def ledger(communicator: FakeCommunicator) -> tuple[int, int]:
    """Bytes of tensors that this rank has sent and received."""
    return (
        sum(message.nbytes for message in communicator.sent if message.verb == "send"),
        sum(message.nbytes for message in communicator.received if message.verb == "receive_"),
    )


def test_each_byte_is_sent_once_and_received_by_the_target_only() -> None:
    state = mixed_state()
    others: IndexedState = {1000: {"exp_avg": torch.ones(10)}}
    results = bring([others, {}, state], target=1, then=ledger)
    assert [each[1] for each in results] == [
        (40, 0),
        (0, state_bytes(state) + 40),
        (state_bytes(state), 0),
    ]


def test_the_targets_own_part_is_not_sent() -> None:
    assert [each[1] for each in bring([mixed_state(), {}], then=ledger)] == [(0, 0), (0, 0)]


def test_a_rank_that_holds_nothing_sends_no_tensors() -> None:
    results = bring([{}, {}, {}], then=lambda communicator: communicator.calls["send"])
    assert [each[1] for each in results] == [0, 0, 0]


def test_small_tensors_share_messages() -> None:
    state: IndexedState = {index: {"exp_avg": torch.ones(10)} for index in range(100)}
    _, (_, sends) = bring([{}, state], then=lambda communicator: communicator.calls["send"])
    assert sends == 1


def send_pieces(tensors: list[torch.Tensor], sendable: tuple[str, ...]) -> list[int]:
    """Sizes of the messages that bring ``tensors`` from rank 1 to rank 0, which must arrive."""

    def run(communicator: FakeCommunicator) -> list[int]:
        if communicator.members.group_rank == 1:
            send_tensors(communicator, tensors, GroupRank(0))
            return [message.nbytes for message in communicator.sent]
        arriving = [torch.empty_like(tensor) for tensor in tensors]
        receive_tensors_(communicator, arriving, GroupRank(1))
        assert all(torch.equal(*pair) for pair in zip(arriving, tensors, strict=True))
        return []

    return run_fake_ranks(2, run, sendable=sendable)[1]


def test_packed_messages_are_at_most_a_chunk() -> None:
    tensors = [values["exp_avg"] for index, values in mixed_state().items() if index]
    sizes = send_pieces(tensors, ("cpu",))
    assert len(sizes) == 5
    assert max(sizes) <= MESSAGE_BYTES


def test_large_tensors_are_sent_out_of_their_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    send = FakeCommunicator.send

    def spy(self: FakeCommunicator, tensor: torch.Tensor, target: GroupRank) -> Any:
        sent.append(tensor.data_ptr())
        return send(self, tensor, target)

    monkeypatch.setattr(FakeCommunicator, "send", spy)
    tensors = [torch.ones(PACK_BELOW_BYTES), torch.ones(4 * PACK_BELOW_BYTES)]
    send_pieces(tensors, ("cpu",))
    assert sent == [tensor.data_ptr() for tensor in tensors]


def test_where_a_device_cannot_send_every_message_is_at_most_a_chunk() -> None:
    tensors = [torch.arange(CHUNK_BYTES * 2.5 // 4), torch.ones(3), torch.ones(PACK_BELOW_BYTES)]
    sizes = send_pieces(tensors, sendable=())
    assert max(sizes) <= CHUNK_BYTES
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)


def test_holding_a_chunk_at_a_time_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    live: list[int] = [0, 0]  # bytes of wires alive now, and at most
    to_wire = checkpoint._Piece.to_wire

    class Wire(torch.Tensor):
        def __del__(self) -> None:
            live[0] -= self.numel()

    def counted(piece: Any) -> torch.Tensor:
        wire = to_wire(piece)
        if piece.direct:
            return wire
        live[0] += wire.numel()
        live[1] = max(live)
        return wire.as_subclass(Wire)

    monkeypatch.setattr(checkpoint._Piece, "to_wire", counted)
    send_pieces([torch.ones(PACK_BELOW_BYTES // 4 - 1) for _ in range(400)], ("cpu",))
    assert MESSAGE_BYTES // 2 < live[1] <= CHUNK_BYTES


def test_unsendable_state_is_a_type_error_on_its_holder_and_named_elsewhere() -> None:
    states: list[IndexedState] = [{0: {"step": 1}}, {4: {"hook": object()}}, {}]
    results = [error for error, _ in bring(states)]
    assert [type(error) for error in results] == [PeerError, TypeError, PeerError]
    assert "the state of parameter 4['hook'] is a builtins.object" in str(results[1])
    assert "rank 1: TypeError: the state of parameter 4['hook']" in str(results[0])


def test_nothing_is_sent_if_some_state_cannot_be() -> None:
    results = bring([{}, {0: object()}], then=ledger)
    assert [each[1] for each in results] == [(0, 0), (0, 0)]


def test_state_that_contains_itself_is_an_error_everywhere() -> None:
    knot: dict[str, Any] = {}
    knot["self"] = knot
    results = [error for error, _ in bring([{}, {0: knot}])]
    assert [type(error) for error in results] == [PeerError, RecursionError]


def test_lack_of_memory_on_a_holder_is_an_error_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_tensor: torch.Tensor) -> bool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(checkpoint, "is_dense", fail)
    results = [error for error, _ in bring([{}, {0: torch.ones(1)}])]
    assert [type(error) for error in results] == [PeerError, RuntimeError]


def test_lack_of_memory_on_the_target_is_an_error_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_spec: TensorSpec, _devices: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TensorSpec, "allocate", fail)
    states: list[IndexedState] = [{0: torch.ones(1)}, {1: torch.ones(1)}, {2: torch.ones(1)}]
    results = [error for error, _ in bring(states, timeout_s=2.0)]
    assert [type(error) for error in results] == [RuntimeError, PeerError, PeerError]


def full_dict() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A plain optimizer's state dict and its groups."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    plain = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}])
    plain.step()
    return plain.state_dict(), plain.param_groups


def own_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a rank that owns the second and the third parameter."""
    return [{"params": groups[0]["params"][1:]}, {"params": groups[1]["params"]}]


def test_the_own_part_is_numbered_for_the_local_optimizer() -> None:
    state_dict, groups = full_dict()
    part = own_part(state_dict, groups, own_groups(groups))
    assert list(part["state"]) == [0, 1]
    assert [group["params"] for group in part["param_groups"]] == [[0], [1]]
    assert [group["lr"] for group in part["param_groups"]] == [0.001, 0.5]


def test_the_own_part_is_a_copy_without_the_rest_of_a_storage() -> None:
    state_dict, groups = full_dict()
    storage = torch.arange(100.0)
    state_dict["state"][1]["exp_avg"] = storage[10:12]
    copied = own_part(state_dict, groups, own_groups(groups))["state"][0]["exp_avg"]
    storage.zero_()
    assert copied.tolist() == [10, 11]
    assert copied.untyped_storage().nbytes() == 8


def test_state_of_no_parameter_comes_along() -> None:
    state_dict, groups = full_dict()
    state_dict["state"]["global_step"] = 7
    assert own_part(state_dict, groups, own_groups(groups))["state"]["global_step"] == 7


def test_parameters_without_state_have_none_in_their_part() -> None:
    state_dict, groups = full_dict()
    del state_dict["state"][1]
    assert list(own_part(state_dict, groups, own_groups(groups))["state"]) == [1]


@pytest.mark.parametrize("call", ["own_part", "require_fit"])
def test_the_callers_dict_stays_as_it_is(call: str) -> None:
    state_dict, groups = full_dict()
    kept = copy.deepcopy(state_dict)
    tensors = [id(tensor) for state in state_dict["state"].values() for tensor in state.values()]
    if call == "own_part":
        part = own_part(state_dict, groups, own_groups(groups))
        part["param_groups"][0]["lr"] = 7
        part["state"][0]["exp_avg"].zero_()
    else:
        require_fit(state_dict, groups)
    assert state_dict["param_groups"] == kept["param_groups"]
    assert tensors == [
        id(tensor) for state in state_dict["state"].values() for tensor in state.values()
    ]
    assert torch.equal(state_dict["state"][1]["exp_avg"], kept["state"][1]["exp_avg"])


def test_a_dict_that_lacks_a_part_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"lacks \['state'\]"):
        require_fit({"param_groups": []}, [])


def test_another_number_of_groups_does_not_fit() -> None:
    state_dict, groups = full_dict()
    with pytest.raises(ValueError, match="different number of parameter groups: 2 instead of 1"):
        require_fit(state_dict, groups[:1])


def test_another_size_of_a_group_does_not_fit() -> None:
    state_dict, groups = full_dict()
    with pytest.raises(ValueError, match="group 1 has 1 parameters instead of 2"):
        require_fit(state_dict, [groups[0], {"params": groups[0]["params"]}])
