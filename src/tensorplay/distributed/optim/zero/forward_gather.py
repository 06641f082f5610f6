"""Updated shards -> every rank while the next forward goes on: each module waits for what it needs.

Note [Who waits]
    A module's forward pre-hook waits for the module's own parameters. Not every parameter is used by
    the module that holds it: attention reads its projection's weight, and a ``ParameterList`` is
    never called. So a module waits also for those below it that have never been called themselves,
    and in evaluation mode, where fused paths read what they like, for all below it.

Note [Compiled modules]
    Inside a compiled region a hook can't wait: the graph ends there, and goes on behind it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tensorplay.distributed.optim._core.collectives import Communicator, Waitable
from tensorplay.distributed.optim.zero.gather_parameters import ParameterBuckets


class ForwardGather:
    """Gathers whose buckets are awaited when a module needs them.

    Args:
        module: the root; modules that are added to it later are noticed at :meth:`watch`.
        buckets: what is gathered.
        parameters: all parameters, by index; the list is kept and may grow.
    """

    def __init__(
        self, module: nn.Module, buckets: ParameterBuckets, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._module = module
        self._buckets = buckets
        self._parameters = parameters
        self._pending: dict[int, Waitable] = {}
        self._bucket_of: dict[torch.Tensor, int] = {}
        self._hooked: set[nn.Module] = set()
        self._called: set[nn.Module] = set()
        self._wait_outside_graph = torch.compiler.disable(self.wait)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.watch()

    def watch(self) -> None:
        """Hooks the modules that aren't yet, after parameters or modules were added."""
        self._bucket_of = {
            self._parameters[slot.parameter]: number
            for number, bucket in enumerate(self._buckets.buckets)
            for slot in bucket.layout.slots
        }
        for module in self._module.modules():
            if module not in self._hooked:
                self._hooked.add(module)
                module.register_forward_pre_hook(_Hook(self, module, self._before_forward))
                wait = _Hook(self, module, self._before_access)
                module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call] # torch leaves it untyped
                module.register_load_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call] # torch leaves it untyped

    def launch(self, communicator: Communicator, *, frozen: bool) -> None:
        """Begins to gather, in about the order in which forward needs them.

        Args:
            communicator: carries them.
            frozen: whether to gather also the buckets that were frozen when they were planned.
        """
        numbers = self._buckets.numbers(trainable=True)
        if frozen:
            numbers += self._buckets.numbers(trainable=False)
        communicator = communicator.awaited_in_any_order()  # it is the user's forward that waits
        for number in sorted(numbers, key=self._first_parameter):
            self._pending[number] = self._buckets.launch(number, communicator)
        known = {p for module in self._hooked for p in _own_parameters(module)}
        self._await({n for p, n in self._bucket_of.items() if p not in known})

    def _first_parameter(self, number: int) -> int:
        """The one of a bucket that forward needs first, if it goes by order of registration."""
        return min(slot.parameter for slot in self._buckets.buckets[number].layout.slots)

    def wait(self) -> None:
        """Waits for all. No communication is begun."""
        self._await(set(self._pending))

    def _before_forward(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling():
            self._wait_outside_graph()
            return
        self._called.add(module)
        if not self._pending:
            return
        self._await(
            {
                self._bucket_of[parameter]
                for each in module.modules()
                if each is module or not module.training or each not in self._called
                for parameter in _own_parameters(each)
                if parameter in self._bucket_of
            }
        )

    def _before_access(self, _: nn.Module) -> None:
        self.wait()

    def _await(self, numbers: set[int]) -> None:
        for number in [number for number in self._pending if number in numbers]:
            self._buckets.finish(number, self._pending.pop(number))


class _Hook:
    """Calls ``function(module)``; a copy of the module shares it, and a saved one has none."""

    def __init__(self, gather: ForwardGather, module: nn.Module, function: Any) -> None:
        self._gather = gather
        self._module = module
        self._function = function

    def __call__(self, *_: Any) -> None:
        self._function(self._module)

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return self

    def __reduce__(self) -> Any:
        self._gather.wait()
        return _nothing_to_wait_for, ()


def _nothing_to_wait_for() -> Any:
    return _ignore


def _ignore(*_: Any) -> None:
    """What is left of a hook in a module that was saved as a whole."""


def _own_parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    return module.parameters(recurse=False)


def require_module(module: nn.Module | None, *, needed: bool, gathers_early: bool) -> None:
    """Raises ``ValueError`` if a module whose forward waits is needed, and there is none to wait in.

    Args:
        module: the module, or what was given for one.
        needed: whether its forward is to wait.
        gathers_early: whether the parameters are gathered during backward already.
    """
    if needed and gathers_early:
        raise ValueError(
            "overlap_with_forward=True has nothing to overlap with overlap_with_ddp=True, which "
            "gathers the parameters during backward; leave one of them away"
        )
    if needed and not isinstance(module, nn.Module):
        raise ValueError(
            f"overlap_with_forward=True needs module=, the module whose forward is to wait for the "
            f"parameters; it is {module!r}"
        )
