"""Flat slices: what this rank owns of a bucket, stepped as a few large tensors, not one by one.

A slice is a stretch of a bucket in which parameters live: whole parameters, and at its ends perhaps
parts of some. To the local optimizer it is one parameter with one axis.

Note [Cuts of a slice]
    The optimizer steps all of a slice or nothing of it, with one count of steps. So a slice ends
    where another param group begins; and if one day some of its parameters have no gradient, it is
    cut there, for good: their state goes on by itself. Cutting copies nothing but counters.

Note [State of a slice]
    What has the slice's shape, however deep in lists and dicts, belongs to its elements; anything
    else (a count of steps, a learning rate of its own) belongs to each of its parameters alike. The
    user sees, by parameter, views of the former in the order in which the parameter's elements lie
    in memory, and the latter as it is.
"""

import functools
import itertools
import operator
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.state_dicts import clone
from tensorplay.distributed.optim.zero.sharding_plan import is_large

_grad_of = operator.attrgetter("grad")
_stride_of = operator.attrgetter("stride")


class Piece(NamedTuple):
    """What a slice holds of one parameter: elements ``[begin, end)`` in its order of memory."""

    parameter: int
    begin: int
    end: int
    offset: int
    """Where it lies in the bucket."""

    @property
    def numel(self) -> int:
        """Its length in elements."""
        return self.end - self.begin


@dataclass
class FlatSlice:
    """A stretch of a bucket that the local optimizer steps as one parameter.

    Attributes:
        bucket: number of the bucket among the flat ones.
        group: place of its param group.
        pieces: what it holds, in order; padding may lie between.
        tensor: the local optimizer's parameter: ``(numel,)``.
    """

    bucket: int
    group: int
    pieces: tuple[Piece, ...]
    tensor: torch.nn.Parameter

    @property
    def start(self) -> int:
        """Where it begins in the bucket."""
        return self.pieces[0].offset

    @property
    def numel(self) -> int:
        """Its length in elements."""
        return _length(self.pieces)

    @functools.cached_property
    def indices(self) -> list[int]:
        """Those of the parameters that its pieces are of."""
        return [piece.parameter for piece in self.pieces]

    @functools.cached_property
    def byte_offsets(self) -> list[int]:
        """Where each piece lies in :attr:`tensor`."""
        itemsize = self.tensor.element_size()
        return [(piece.offset - self.start) * itemsize for piece in self.pieces]

    def place(self, piece: Piece) -> slice:
        """Where a piece lies in :attr:`tensor`."""
        begin = piece.offset - self.start
        return slice(begin, begin + piece.numel)


class FlatSlices:
    """All slices of this rank.

    Args:
        parameters: all parameters, by index; the list is kept and may grow.
        group_rank: this rank.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group_rank: GroupRank) -> None:
        self._parameters = parameters
        self._group_rank = group_rank
        self._specs: Sequence[ParameterSpec] = ()
        self._flats: list[torch.Tensor] = []
        self._num_buckets = 0
        self.num_formed = 0
        """How often other slices were formed."""
        self.slices: list[FlatSlice] = []

    def plan(
        self,
        layouts: Sequence[BucketLayout],
        specs: Sequence[ParameterSpec],
        group_of: Mapping[int, int],
    ) -> None:
        """Adds the slices of further buckets, as parameters of the right shape without memory.

        Args:
            layouts: the buckets.
            specs: all parameters' specs, by index.
            group_of: the place of each parameter's group.
        """
        self._specs = specs
        for number, layout in enumerate(layouts, self._num_buckets):
            start, end = layout.cuts[self._group_rank], layout.cuts[self._group_rank + 1]
            pieces = [
                Piece(
                    slot.parameter,
                    *slot.overlap(start, end, slot.offset),
                    offset=max(start, slot.offset),
                )
                for slot in layout.slots
                if slot.meets(start, end)
            ]
            like = torch.empty(1, dtype=layout.dtype, device=layout.device)
            for members in _runs(
                pieces, lambda piece: (group_of[piece.parameter], self._alone(piece))
            ):
                tensor = torch.nn.Parameter(like.expand(_length(members)))
                group = group_of[members[0].parameter]
                self.slices.append(FlatSlice(number, group, tuple(members), tensor))
        self._num_buckets += len(layouts)

    def _alone(self, piece: Piece) -> int | None:
        """Which large parameter it is: its gradient doesn't lie beside others'."""
        return piece.parameter if is_large(self._specs[piece.parameter]) else None

    def move_in(self, flats: Sequence[torch.Tensor]) -> None:
        """Gives the slices of the buckets added last their memory, which lies in ``flats``."""
        first = len(self._flats)
        self._flats.extend(flats)
        for each in self.slices:
            if each.bucket >= first:
                each.tensor.data = self._memory(each.bucket, each.pieces)

    def drop(self, num_buckets: int, slices: Sequence[FlatSlice]) -> None:
        """Goes back to ``slices`` of the first ``num_buckets`` buckets."""
        self.slices = list(slices)
        self._num_buckets = num_buckets
        self.num_formed += 1

    @property
    def num_buckets(self) -> int:
        """How many buckets there are."""
        return self._num_buckets

    def first_in(self, tensor: torch.Tensor) -> int | None:
        """The first parameter of the slice that the local optimizer knows as ``tensor``, if it's one."""
        return next(
            (each.pieces[0].parameter for each in self.slices if each.tensor is tensor), None
        )

    def in_group(self, group: int) -> list[torch.Tensor]:
        """The local optimizer's parameters for one group."""
        return [each.tensor for each in self.slices if each.group == group]

    def take_gradients_(self, optimizer: Optimizer) -> None:
        """Sets the slices' ``.grad`` to what is in their parameters' ``.grad``, as far as there is any.

        Slices of which only a part has a gradient are cut (Note [Cuts of a slice]).
        """
        is_cut = False
        for each in list(self.slices):
            gradients = list(map(_grad_of, map(self._parameters.__getitem__, each.indices)))
            num_present = sum(map(operator.is_not, gradients, itertools.repeat(None)))
            if not num_present:
                each.tensor.grad = None
            elif num_present == len(gradients):
                each.tensor.grad = self._joined(each, gradients)
            else:
                self._cut(each, _runs(each.pieces, self._has_gradient), optimizer)
                is_cut = True
        if is_cut:
            self.take_gradients_(optimizer)

    def _has_gradient(self, piece: Piece) -> bool:
        return self._parameters[piece.parameter].grad is not None

    def drop_gradients_(self) -> None:
        """Lets go of them: those that the user sees are in the parameters' ``.grad``."""
        for each in self.slices:
            each.tensor.grad = None

    def _joined(self, each: FlatSlice, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradient of a slice: as it lies in memory if it is in one stretch, else a copy."""
        stretches = list(gradients)
        for place in {0, len(stretches) - 1}:
            stretches[place] = self._stretch(each.pieces[place], gradients[place])
        first, itemsize = stretches[0], each.tensor.element_size()
        inner = slice(1, len(stretches) - 1)
        strides = map(_stride_of, map(self._specs.__getitem__, each.indices[inner]))
        try:  # of thousands, so the loops aren't Python's
            addresses = map(torch.Tensor.data_ptr, stretches)
            offsets = map(operator.sub, addresses, itertools.repeat(first.data_ptr()))
            is_whole = all(map(operator.eq, offsets, each.byte_offsets)) and all(
                map(operator.eq, map(torch.Tensor.stride, stretches[inner]), strides)
            )
        except RuntimeError:  # a partial gradient has no memory of its own
            is_whole = False
        end = (first.storage_offset() + each.numel) * itemsize
        if is_whole and end <= first.untyped_storage().nbytes():
            return first.as_strided((each.numel,), (1,))
        copy = first.new_zeros(each.numel)
        for piece, gradient in zip(each.pieces, gradients, strict=True):
            copy[each.place(piece)] = self._stretch(piece, gradient)
        return copy

    def _stretch(self, piece: Piece, gradient: torch.Tensor) -> torch.Tensor:
        """``(numel,)``: a piece's elements of its parameter's gradient, of which this rank has a part or all."""
        if isinstance(gradient, PartialGradient):
            own = gradient.own
            if own is None or own.numel() != piece.numel:
                raise RuntimeError(
                    f"the gradient of parameter {piece.parameter} isn't the one that this optimizer "
                    "reduced: it lacks what this rank owns of it; leave .grad as it is, or set it to "
                    "None or to a whole gradient"
                )
            return own
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of parameter {piece.parameter} has layout {gradient.layout}, of which "
                "no stretch can be stepped; build the embedding with sparse=False, or give it a param "
                'group with "partition": "parameters" and leave flat_step False'
            )
        return in_memory_order(gradient, self._specs[piece.parameter])[piece.begin : piece.end]

    def _cut(self, each: FlatSlice, parts: Sequence[Sequence[Piece]], optimizer: Optimizer) -> None:
        cut = [self._slice(each, part) for part in parts]
        place = next(i for i, candidate in enumerate(self.slices) if candidate is each)
        self.slices[place : place + 1] = cut
        self.num_formed += 1
        if each.tensor in optimizer.state:
            state = optimizer.state.pop(each.tensor)
            for part in cut:
                begin = part.start - each.start
                stretch = slice(begin, begin + part.numel)
                optimizer.state[part.tensor] = tree_map(
                    functools.partial(_part_of, shape=(each.numel,), stretch=stretch), state
                )
        self._put_into(optimizer, each.group, {each.tensor: [part.tensor for part in cut]})

    def _slice(self, origin: FlatSlice, pieces: Sequence[Piece]) -> FlatSlice:
        memory = self._memory(origin.bucket, pieces)
        return FlatSlice(origin.bucket, origin.group, tuple(pieces), torch.nn.Parameter(memory))

    def _memory(self, bucket: int, pieces: Sequence[Piece]) -> torch.Tensor:
        start = pieces[0].offset
        return self._flats[bucket][start : start + _length(pieces)]

    @staticmethod
    def _put_into(
        optimizer: Optimizer, group: int, parts: Mapping[torch.Tensor, Sequence[torch.Tensor]]
    ) -> None:
        """Replaces parameters of the local optimizer's group by others; its lists are new ones."""
        entry = optimizer.param_groups[group]
        names = entry.get("param_names", [""] * len(entry["params"]))
        replaced = [
            (name, new)
            for name, old in zip(names, entry["params"], strict=True)
            for new in parts.get(old, (old,))
        ]
        entry["params"] = [new for _, new in replaced]
        if "param_names" in entry:
            entry["param_names"] = [name for name, _ in replaced]

    # State by parameter

    def states(self, state: Mapping[Any, Any]) -> "dict[int, SlicedState]":
        """The state of each parameter of which this rank holds a part, where there is one.

        Args:
            state: the local optimizer's, by its parameters; nothing is copied.
        """
        return {
            piece.parameter: SlicedState.of(each, piece, state[each.tensor])
            for each in self.slices
            if each.tensor in state
            for piece in each.pieces
        }

    def load(self, optimizer: Optimizer, saved: Mapping[int, Any]) -> dict[torch.Tensor, Any]:
        """Forms slices anew, as the state of their parameters allows, and returns the slices' state.

        Args:
            optimizer: gets the new slices into its groups, in new lists; its state is left alone.
            saved: each parameter's state in the plain optimizer's format, if it has one.
        """
        old: dict[int, list[FlatSlice]] = {}
        for each in self.slices:
            old.setdefault(each.bucket, []).append(each)
        states: dict[torch.Tensor, Any] = {}
        formed: list[FlatSlice] = []
        for slices in old.values():
            new = self._form(slices, saved)
            formed += new
            for group in dict.fromkeys(each.group for each in slices):
                first, *others = [each.tensor for each in slices if each.group == group]
                parts: dict[torch.Tensor, list[torch.Tensor]] = {other: [] for other in others}
                parts[first] = [each.tensor for each in new if each.group == group]
                self._put_into(optimizer, group, parts)
            for each in new:
                state = self._assemble(each, saved)
                if state is not None:
                    states[each.tensor] = state
        self.slices = formed
        self.num_formed += 1
        return states

    def _form(self, slices: Sequence[FlatSlice], saved: Mapping[int, Any]) -> list[FlatSlice]:
        owner = {piece: each for each in slices for piece in each.pieces}
        kind: dict[Piece, Any] = {}
        last: Any = None
        for piece, each in owner.items():
            this = (each.group, self._alone(piece), self._common(piece, saved))
            last = kind[piece] = last if last is not None and _same(last, this) else this
        return [
            self._slice(owner[members[0]], members)
            for members in _runs(list(owner), lambda piece: id(kind[piece]))
        ]

    def _common(self, piece: Piece, saved: Mapping[int, Any]) -> Any:
        """What all parameters of a slice must have alike; tensors of the elements as ``...``."""
        if piece.parameter not in saved:
            return None
        shape = self._specs[piece.parameter].shape
        leaves, structure = tree_flatten(saved[piece.parameter])
        return [... if _has_shape(leaf, shape) else leaf for leaf in leaves], structure

    def _assemble(self, each: FlatSlice, saved: Mapping[int, Any]) -> Any:
        """The state of a slice from that of its parameters; ``None`` if they have none."""
        common = self._common(each.pieces[0], saved)
        if common is None:
            return None
        leaves, structure = common
        of_parameters = [tree_flatten(saved[piece.parameter])[0] for piece in each.pieces]
        assembled = []
        for place, leaf in enumerate(leaves):
            if leaf is not ...:
                assembled.append(clone(leaf))
                continue
            whole = of_parameters[0][place].new_zeros(each.numel)
            for piece, values in zip(each.pieces, of_parameters, strict=True):
                stretch = in_memory_order(values[place], self._specs[piece.parameter])
                whole[each.place(piece)] = stretch[piece.begin : piece.end]
            assembled.append(whole)
        return tree_unflatten(assembled, structure)


class SlicedState(NamedTuple):
    """This rank's part of one parameter's state.

    Attributes:
        begin: where the part begins, in elements in the parameter's order of memory.
        of_elements: which of the state's leaves are divided, by number.
        state: the state, those leaves ``(numel of the part,)`` each.
    """

    begin: int
    of_elements: list[int]
    state: Any

    @classmethod
    def of(cls, each: FlatSlice, piece: Piece, state: Any) -> "SlicedState":
        """A piece's part of a slice's state; views."""
        leaves, structure = tree_flatten(state)
        shape, stretch = (each.numel,), each.place(piece)
        of_elements = [place for place, leaf in enumerate(leaves) if _has_shape(leaf, shape)]
        for place in of_elements:
            leaves[place] = leaves[place][stretch]
        return cls(piece.begin, of_elements, tree_unflatten(leaves, structure))


class StateByParameter(Mapping[torch.Tensor, Any]):
    """The local optimizer's state under the user's parameters, live; of some this rank has a part.

    Args:
        optimizer: the local optimizer.
        slices: those among its parameters.
        parameters: all parameters, by index.
    """

    def __init__(
        self, optimizer: Optimizer, slices: FlatSlices, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._slices = slices
        self._parameters = parameters

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        state = self._optimizer.state
        for each in self._slices.slices:
            for piece in each.pieces:
                if self._parameters[piece.parameter] is parameter:
                    if each.tensor not in state:  # asking for it would make a new entry
                        raise KeyError(parameter)
                    return _read_only(SlicedState.of(each, piece, state[each.tensor]).state)
        if parameter not in state:
            raise KeyError(parameter)
        return state[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._by_parameter())

    def __len__(self) -> int:
        return len(self._by_parameter())

    def items(self) -> ItemsView[torch.Tensor, Any]:
        """All at once, which is much faster than one by one."""
        return self._by_parameter().items()

    def values(self) -> ValuesView[Any]:
        """Likewise."""
        return self._by_parameter().values()

    def _by_parameter(self) -> dict[Any, Any]:
        state = self._optimizer.state
        inner = {each.tensor for each in self._slices.slices}
        sliced = self._slices.states(state)
        return {
            **{key: value for key, value in state.items() if key not in inner},
            **{self._parameters[index]: _read_only(part.state) for index, part in sliced.items()},
        }


def _read_only(state: Any) -> Any:
    """An assignment to what was put together for the user would be lost: it raises."""
    return MappingProxyType(state) if isinstance(state, dict) else state


def in_memory_order(tensor: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """``(numel,)``: the elements in the order in which the parameter's lie; a copy if they lie otherwise."""
    tensor = tensor.detach()
    if tensor.stride() != spec.stride:
        planned = torch.empty_strided(
            spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device
        )
        tensor = planned.copy_(tensor)
    return tensor.as_strided((spec.numel,), (1,))


def merge(parts: Sequence[SlicedState], spec: ParameterSpec) -> Any:
    """The whole state of a parameter from the parts that the ranks hold."""
    leaves, structure = tree_flatten(parts[0].state)
    of_parts = [(part.begin, tree_flatten(part.state)[0]) for part in parts]
    for place in parts[0].of_elements:
        example = leaves[place]
        whole = torch.empty_strided(
            spec.shape, spec.stride, dtype=example.dtype, device=example.device
        )
        flat = whole.as_strided((spec.numel,), (1,))
        for begin, values in of_parts:
            flat[begin : begin + values[place].numel()] = values[place]
        leaves[place] = whole
    return tree_unflatten(leaves, structure)


def _part_of(value: Any, shape: Sequence[int], stretch: slice) -> Any:
    """A stretch of what has that shape, a copy of anything else."""
    return value[stretch] if _has_shape(value, shape) else clone(value)


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors by their elements."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _length(pieces: Sequence[Piece]) -> int:
    last = pieces[-1]
    return last.offset + last.numel - pieces[0].offset


def _runs(pieces: Sequence[Piece], kind: Callable[[Piece], Any]) -> list[list[Piece]]:
    """Stretches of pieces of the same kind."""
    runs: list[list[Piece]] = []
    before: Any = None
    for piece in pieces:
        this = kind(piece)
        if not runs or this != before:
            runs.append([])
        runs[-1].append(piece)
        before = this
    return runs
