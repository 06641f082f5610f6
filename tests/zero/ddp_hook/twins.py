"""Twins under DDP: the plain optimizer with all gradients, ZeRO with those that it owns."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import reduce_to_owners_hook
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tests.reference.ddp import ADAMW, make_net
from tests.reference.training import require_equal, values_of
from tests.zero.overlap.twins import MANY_BUCKETS_MB, backward


class Twins:
    """Both models and optimizers; to be made on every rank of the group.

    Args:
        make: makes the module.
        optimizer_class: of both optimizers.
        options: theirs.
        resident: whether parameters live in buckets.
        group: the process group.
        params: makes what the optimizers are given from a module.
        **ddp_options: of both models.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module] = make_net,
        optimizer_class: type[Optimizer] = torch.optim.AdamW,
        options: dict[str, Any] | None = None,
        *,
        resident: bool = False,
        group: dist.ProcessGroup | None = None,
        params: Callable[[nn.Module], Iterable[Any]] = lambda module: module.parameters(),
        **ddp_options: Any,
    ) -> None:
        options = ADAMW if options is None else options
        ddp_options = {"bucket_cap_mb": MANY_BUCKETS_MB, "process_group": group, **ddp_options}
        self.plain_model = DistributedDataParallel(make(), **ddp_options)
        self.plain = optimizer_class(params(self.plain_model), **options)
        self.model = DistributedDataParallel(make(), **ddp_options)
        self.zero = ZeroRedundancyOptimizer(
            params(self.model),
            optimizer_class,
            process_group=group,
            parameters_as_bucket_view=resident,
            **options,
        )
        static = bool(ddp_options.get("static_graph"))
        self.num_whole_passes = (
            static + 1
            if ddp_options.get("gradient_as_bucket_view")
            and (static or not ddp_options.get("find_unused_parameters"))
            else 0
        )
        self.model.register_comm_hook(None, reduce_to_owners_hook(self.model, self.zero))

    @property
    def both(self) -> tuple[tuple[nn.Module, Optimizer], tuple[nn.Module, Optimizer]]:
        """The plain pair, then the sharded one."""
        return (self.plain_model, self.plain), (self.model, self.zero)

    def train(self, steps: int = 4, first: int = 0, clip: float | None = None) -> None:
        """Both twins go on; after each iteration they must be equal."""
        for step in range(first, first + steps):
            for model, optimizer in self.both:
                optimizer.zero_grad()
                backward(model, step)
            self.require_gradients_equal(
                f"iteration {step}: ", at_first=step < self.num_whole_passes
            )
            if clip is not None:
                nn.utils.clip_grad_norm_(self.plain_model.parameters(), clip)
                self.zero.clip_grad_norm_(clip)
            for _, optimizer in self.both:
                optimizer.step()
            self.require_equal(f"iteration {step}: ")

    def require_equal(self, what: str = "") -> None:
        """Asserts that the models are equal, buffers included."""
        for (name, plain), actual in zip(
            self.plain_model.state_dict().items(), self.model.state_dict().values(), strict=True
        ):
            _require_equal(plain, actual, f"{what}{name}: ")

    def require_gradients_equal(
        self, what: str = "", *, at_first: bool = False, among: str = ""
    ) -> None:
        """Asserts that each gradient is whole on one rank, absent where it is for the plain twin.

        DDP's first passes leave it whole on all, if ``at_first``. Only parameters whose name contains
        ``among`` are looked at.
        """
        whole = []
        for (name, plain), actual in zip(
            self.plain_model.named_parameters(), self.model.parameters(), strict=True
        ):
            gradient = actual.grad
            assert (plain.grad is None) == (gradient is None), f"{what}{name}"
            is_whole = gradient is not None and not isinstance(gradient, PartialGradient)
            whole.append(int(is_whole))
            if is_whole:
                _require_equal(plain.grad, gradient, f"{what}gradient of {name}: ")
        counts = torch.tensor(whole)
        dist.all_reduce(counts, group=self.zero.process_group)
        for (name, plain), count in zip(
            self.plain_model.named_parameters(), counts.tolist(), strict=True
        ):
            if among not in name:
                continue
            wanted = dist.get_world_size(self.zero.process_group) if at_first else 1
            assert count == wanted * int(plain.grad is not None), f"{what}{name}: on {count} ranks"

    def require_state_equal(self) -> None:
        """Asserts that the sharded state, consolidated on group rank 0, is the plain one."""
        self.zero.consolidate_state_dict()
        if dist.get_rank(self.zero.process_group) == 0:
            expected, actual = self.plain.state_dict()["state"], self.zero.state_dict()["state"]
            assert sorted(expected) == sorted(actual)
            for key, state in expected.items():
                for name, value in state.items():
                    _require_equal(value, actual[key][name], f"state {name} of {key}: ")


def _require_equal(expected: Any, actual: Any, what: str) -> None:
    """To the bit for two ranks; of more, DDP sums in another order."""
    if dist.get_world_size() > 2:
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=2e-6, msg=lambda text: what + text
        )
    else:
        require_equal(*(values_of([expected, actual])), what)
