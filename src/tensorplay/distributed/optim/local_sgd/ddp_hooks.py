"""The DDP hook of post-local SGD: gradients are averaged over all ranks first, later in subgroups."""

import logging
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tensorplay.distributed.optim._core.collectives import connect

logger = logging.getLogger(__name__)


class PostLocalSGDState:
    """What :func:`post_localSGD_hook` needs to know, and its counter.

    Follows torch's class of the same name; the counter can be saved, and ``subgroup=None`` works
    without GPUs too.

    Args:
        process_group: the ranks that average gradients during the warm-up (default: the default
            group).
        subgroup: the ranks that average them from then on (default: those on the same host, made in
            the first iteration after the warm-up).
        start_localSGD_iter: number of warm-up iterations; the averager's ``warmup_steps``.
        post_local_gradient_allreduce: false for no averaging of gradients after the warm-up.

    Attributes:
        iter: how many warm-up iterations have been made.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,  # noqa: N803 - torch's name
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Counts an iteration when its last bucket comes."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("local SGD starts after %s iterations", self.iter)

    def gradient_group(self) -> dist.ProcessGroup | None:
        """The ranks that average gradients after the warm-up; ``None`` if none do.

        If the subgroup is to be made, every rank of the default group must call it.
        """
        if not self.post_local_gradient_allreduce:
            return None
        if self.subgroup is None:
            self.subgroup = _group_of_this_host()
        return self.subgroup

    def state_dict(self) -> dict[str, Any]:
        """The counter, under ``"iter"``."""
        return {"iter": self.iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned."""
        self.iter = state_dict["iter"]

    def __deepcopy__(self, memo: dict[int, Any]) -> "PostLocalSGDState":
        """A copy with the same process groups."""
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __reduce__(self) -> Any:
        if self.process_group is not None or self.subgroup is not None:
            raise TypeError(
                "this PostLocalSGDState can't be pickled: it holds a process group. Save its "
                "state_dict(), and construct it anew"
            )
        arguments = (None, None, self.start_localSGD_iter, self.post_local_gradient_allreduce)
        return type(self), arguments, {"iter": self.iter}


def post_localSGD_hook(  # noqa: N802 - torch's name
    state: PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients over all ranks in the first iterations, then in subgroups, or not at all.

    For ``DistributedDataParallel.register_comm_hook``, together with an averager of the parameters.
    Follows torch's hook of the same name, with the same result as ``allreduce_hook``, bit for bit,
    as long as the same ranks average.

    Args:
        state: groups and counter.
        bucket: the gradients that DDP hands over.

    Returns:
        The averaged gradients, to come.

    Example:
        >>> subgroup, _ = torch.distributed.new_subgroups(group_size=8)
        >>> state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        >>> model.register_comm_hook(state, post_localSGD_hook)
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return _allreduce(state.process_group, bucket)
    group = state.gradient_group()
    if group is None:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    return _allreduce(group, bucket)


def _allreduce(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    everyone: Any = dist.group.WORLD
    return allreduce_hook(everyone if group is None else group, bucket)


def _group_of_this_host() -> dist.ProcessGroup:
    communicator = connect(None, "PostLocalSGDState(subgroup=None)")
    hosts = communicator.all_gather_bytes(socket.gethostname().encode())
    here = hosts[communicator.members.group_rank]
    ranks = [rank for rank, host in enumerate(hosts) if host == here]
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group
