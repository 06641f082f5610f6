"""All parameters of a sharded optimizer: who owns which, and where they live.

The user's param groups stay the optimizer's; each method gets them as they are now.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.bucket_layout import BucketLayout
from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.local_shard import local_memory
from tensorplay.distributed.optim._core.parameter_checks import (
    CURE,
    MetadataWatch,
    describe_options,
    describe_parameters,
    name_of,
    refuse_unsendable,
    same_members,
)
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.wrapped_optimizer import all_parameters
from tensorplay.distributed.optim.zero.flat_slices import FlatSlice, FlatSlices
from tensorplay.distributed.optim.zero.gather_parameters import ParameterBuckets
from tensorplay.distributed.optim.zero.sharding_plan import ShardingPlan
from tensorplay.distributed.optim.zero.sharding_policy import ShardingPolicy

Groups = Sequence[dict[str, Any]]


class Extent(NamedTuple):
    """How far the parameters had been planned: what :meth:`ShardedParameters.go_back` needs."""

    num_groups: int
    num_parameters: int
    plan: ShardingPlan
    num_flat_buckets: int
    slices: tuple[FlatSlice, ...]


class ShardedParameters:
    """The parameters by index, with their plan, flat slices and buckets.

    Args:
        communicator: knows which rank this is of how many, and what can be sent.
        policy: how they are to be divided.

    Attributes:
        parameters: all of them, by index; the list grows with :meth:`extend`.
        partitions: of each group, whether its parameters are owned whole or cut.
        plan: who owns what, and in which buckets it travels.
        slices: the flat slices that this rank steps.
        buckets: those in which parameters are gathered, as far as :meth:`move_in` has filled them.
    """

    def __init__(self, communicator: Communicator, policy: ShardingPolicy) -> None:
        self._communicator = communicator
        self._policy = policy
        members = communicator.members
        self.parameters: list[torch.Tensor] = []
        self._memories: list[torch.Tensor] = []
        self.partitions: list[str] = []
        self._members: list[tuple[torch.Tensor, ...]] = []
        self.plan = ShardingPlan.of((), members.world_size)
        self.slices = FlatSlices(self.parameters, members.group_rank)
        self.buckets = ParameterBuckets(self._memories, members.group_rank)
        self._watch = MetadataWatch(())

    def extend(
        self,
        groups: Groups,
        partitions: Sequence[str],
        optimizer_class: type[Optimizer],
        refuse: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        """Plans for the parameters of further groups. If it raises, :meth:`go_back`.

        Args:
            groups: all groups, of which the last ``len(partitions)`` are new.
            partitions: the choice of each new one.
            optimizer_class: which is to step them.
            refuse: raises for parameters whose gradients can't be had.

        Raises:
            TypeError, ValueError: for parameters that can't be sent, planned or stepped.
        """
        self.partitions.extend(partitions)
        added_groups = groups[-len(partitions) :]
        known = set(self.parameters)
        added = [p for p in dict.fromkeys(all_parameters(added_groups)) if p not in known]
        refuse_unsendable(added, groups, self._communicator)
        refuse(added)
        start, before = len(self.parameters), self.plan
        self.parameters.extend(added)
        self._memories.extend(map(local_memory, added))
        self._members.extend(tuple(group["params"]) for group in added_groups)
        flat, in_parts = self._policy.choose(self.parameters, groups, self.partitions, start)
        self.plan = ShardingPlan.of(
            self.parameters,
            before.partition.num_ranks,
            resident=self._policy.resident,
            flat=flat,
            in_parts=in_parts,
            steps_in_backward=self._policy.shares_buckets,
            sends_in_backward=self._policy.sends_in_backward,
            before=before,
        )
        if isinstance(optimizer_class, type):  # a function that makes one is looked at later
            self.require_elementwise(optimizer_class)
        index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        group_of = {
            index_of[parameter]: place
            for place, group in enumerate(groups)
            for parameter in group["params"]
        }
        added_layouts = self.plan.flat_layouts[len(before.flat_layouts) :]
        self.slices.plan(added_layouts, self.plan.specs, group_of)

    def require_elementwise(self, optimizer_class: type[Optimizer]) -> None:
        """Raises ``ValueError`` for a class that can't step flat slices, if there are to be some."""
        self._policy.require_elementwise(optimizer_class, self.partitions)

    @property
    def extent(self) -> Extent:
        """How far they are planned now."""
        slices = self.slices
        return Extent(
            len(self.partitions),
            len(self.parameters),
            self.plan,
            slices.num_buckets,
            tuple(slices.slices),
        )

    def go_back(self, extent: Extent) -> None:
        """Forgets what :meth:`extend` has added since, before it was moved in."""
        del self.parameters[extent.num_parameters :], self._memories[extent.num_parameters :]
        del self.partitions[extent.num_groups :], self._members[extent.num_groups :]
        self.slices.drop(extent.num_flat_buckets, extent.slices)
        self.plan = extent.plan

    def move_in(self, agreement: Agreement, call: str, layouts: Sequence[BucketLayout]) -> None:
        """Makes the buckets of these ``layouts`` of the plan. Every rank must call it.

        Raises:
            Exception: if a rank lacks the memory; on every rank.
        """
        error = None
        try:
            for layout in layouts:
                self.buckets.add(layout, self.plan.specs)
            self.slices.move_in(self.buckets.flats_of(layouts, self.plan.flat_layouts))
        except Exception as problem:  # noqa: BLE001 - most likely a lack of memory, on one rank
            error = problem
        agreement.settle(f"{call} (buckets)", error=error)
        resident = self.buckets.resident  # these are watched in their buckets
        self._watch = MetadataWatch(
            [p for index, p in enumerate(self.parameters) if index not in resident]
        )

    def find_replaced(self, groups: Groups) -> RuntimeError | None:
        """An error if the parameters, or their storages, are no longer those that were planned."""
        if not same_members(groups, self._members):
            return RuntimeError(
                "the parameters in param_groups are no longer those that the optimizer was built "
                "with; add some with add_param_group(), and build a new optimizer to take some away"
            )
        replaced = self._watch.find_replaced(groups)
        strayed = self.buckets.strayed() if replaced is None else None
        if strayed is None:
            return replaced
        return RuntimeError(
            f"the storage of parameter {name_of(self.parameters[strayed], groups)} was replaced after "
            "parameters_as_bucket_view=True, partition='elements' or flat_step=True had moved it into "
            f"a bucket, so that updates would not reach it; {CURE}"
        )

    def describe_misfit(
        self, misfit: torch.Tensor, optimizer: Optimizer, groups: Groups
    ) -> RuntimeError:
        """An error for what ``optimizer`` steps and has given other metadata."""
        index = self.slices.first_in(misfit)
        parameter = misfit if index is None else self.parameters[index]
        return RuntimeError(
            f"the step of {type(optimizer).__name__} gave parameter {name_of(parameter, groups)} "
            "another shape, dtype or device; it must keep them, so that every rank can receive "
            "the new values"
        )

    def index_of(self, parameter: torch.Tensor) -> int | None:
        """The index of a parameter, ``None`` if it isn't one of these."""
        return next((i for i, p in enumerate(self.parameters) if p is parameter), None)

    @property
    def is_flat(self) -> bool:
        """Whether some are to be stepped as flat slices, if they can be."""
        return self._policy.is_flat(self.partitions)

    @property
    def device_of_type(self) -> dict[str, torch.device]:
        """This rank's device of each type, for tensors that it receives."""
        return {parameter.device.type: parameter.device for parameter in self.parameters}

    def describe_partitions(self) -> str:
        """Which kinds of partition there are."""
        return ", ".join(sorted(set(self.partitions)))

    def describe(self, groups: Groups, start: int = 0) -> dict[str, Json]:
        """What the ranks must agree on: parameters from index ``start`` on, and all groups."""
        return {
            **describe_parameters(
                groups,
                self.parameters,
                self.plan.specs[start:],
                resident=self._policy.resident or self.is_flat,
            ),
            **describe_options(groups),
            "partition of each group": list(self.partitions),
        }
