"""Gradients averaged by ``DistributedDataParallel``: its communication hook passes on each bucket.

Note [Restored gradients]
    When backward ends, DDP copies each averaged bucket into ``.grad``, and allocates one where there
    is none. So each gradient becomes a view of its bucket for the step, which makes that copy
    nothing, and is freed by a callback that is queued when DDP's has been.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.optim._core.collectives import start_all_reduce_
from tensorplay.distributed.optim._core.ddp_buckets import elements_of, views_of
from tensorplay.distributed.optim.in_backward.local_gradients import Consumer, call_at_end

_gradients_of: "weakref.WeakKeyDictionary[DistributedDataParallel, DDPGradients]" = (
    weakref.WeakKeyDictionary()
)


class DDPGradients:
    """Passes a bucket's parameters on when their gradients have been averaged.

    A parameter that nobody has asked for keeps its averaged gradient, as under DDP alone.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._process_group = ddp.process_group
        # DDP leaves alone what no rank has used, and tells its hook nothing of that.
        self._finds_unused = ddp.find_unused_parameters or ddp.static_graph
        self._consumers: dict[int, Callable[[], Consumer | None]] = {}
        self._used: set[int] = set()
        self._taken: list[torch.Tensor] = []
        self._active: dict[int, Consumer] = {}
        self._task = -1

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> "DDPGradients":
        """The one object for ``ddp``, which gets its communication hook at the first call.

        Raises:
            ValueError: if ``ddp`` has another communication hook.
        """
        if ddp not in _gradients_of:
            if ddp._comm_hooks:  # noqa: SLF001 - torch has no public name for it
                hook = ddp._comm_hooks[0][0]  # noqa: SLF001 - as above
                raise ValueError(
                    "apply_optimizer_in_backward steps in a communication hook of "
                    f"DistributedDataParallel, which has one already: {hook.__qualname__}. Wrap "
                    "the module anew, without it"
                )
            gradients = cls(ddp)
            ddp.register_comm_hook(gradients, _average_and_step)
            _gradients_of[ddp] = gradients
        return _gradients_of[ddp]

    def pass_to(
        self, parameter: torch.Tensor, find_consumer: Callable[[], Consumer | None]
    ) -> None:
        """Passes ``parameter`` on to whom ``find_consumer`` returns."""
        if id(parameter) not in self._consumers and self._finds_unused:
            used = self._used  # must not hold the parameter
            parameter.register_post_accumulate_grad_hook(lambda p: used.add(id(p)))  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._consumers[id(parameter)] = find_consumer

    def forget(self, parameter: torch.Tensor) -> None:
        """DDP alone sees to ``parameter`` from now on."""
        self._consumers.pop(id(parameter), None)

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """What DDP's hook does: average the bucket, step, return the bucket."""
        buffer = bucket.buffer()
        takers: dict[int, tuple[Consumer, list[int]]] = {}
        parameters = bucket.parameters()
        gradients = (
            views_of(elements_of(buffer, parameters), parameters)
            if buffer.layout is torch.strided
            else bucket.gradients()
        )
        for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            consumer = self._consumers.get(id(parameter), _nobody)()
            if consumer is not None and not consumer.is_accumulating:
                parameter.grad = gradient  # Note [Restored gradients]
                self._taken.append(parameter)
                takers.setdefault(id(consumer), (consumer, []))[1].append(place)
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public name for it
        if takers and task != self._task:  # another than that of a backward that has raised
            self._task = task
            call_at_end(lambda: call_at_end(self._end))
        self._active.update({key: consumer for key, (consumer, _) in takers.items()})

        buffer.mul_(1 / dist.get_world_size(self._process_group))  # as DDP does it, to the bit
        launched = [start_all_reduce_(buffer, self._process_group)]
        used = None
        if takers and self._finds_unused:
            used = torch.tensor([id(p) in self._used for p in parameters], dtype=torch.int32)
            used = used.to(buffer.device)
            launched.append(start_all_reduce_(used, self._process_group))

        def step(_: object) -> Any:
            is_used = [True] * len(parameters) if used is None else used.bool().tolist()
            for consumer, places in takers.values():
                ready = [parameters[place] for place in places if is_used[place]]
                if ready:
                    consumer.step_bucket(ready)
            return buffer

        done: torch.futures.Future[torch.Tensor] = torch.futures.collect_all(launched).then(step)
        if task == -1:  # no backward: this rank has joined, and follows that of the others
            done.wait()
            if bucket.is_last():
                self._end()
        return done

    def _end(self) -> None:
        self._task = -1
        active, self._active = self._active, {}
        taken, self._taken = self._taken, []
        self._used.clear()
        for parameter in taken:
            parameter.grad = None
        for consumer in active.values():
            consumer.end_backward()


def _average_and_step(
    state: DDPGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # torch's stubs lack the name
) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


def _nobody() -> None:
    return None
