"""What this process sends, counted where it is handed over."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tensorplay.distributed.optim._core.host_messages import HostMessages

VERBS = ("broadcast", "all_reduce", "all_gather", "send", "recv", "isend", "irecv")
SCALAR_BYTES = 64
"""All-reduces up to this size are agreements."""


@contextmanager
def counting() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Calls and payload bytes by name of the collective.

    Messages through memory of the host count as the sends and receives that they stand for.
    """
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()

    under_way: set[str] = set()

    def count(name: str, payload: torch.Tensor, times: int = 1) -> None:
        calls[name] += times
        nbytes[name] += payload.nbytes * times

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(distributed_c10d, name)

        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if under_way:  # torch's send calls its isend
                return original(tensor, *args, **kwargs)
            count(name, tensor if isinstance(tensor, torch.Tensor) else tensor[0])
            under_way.add(name)
            try:
                return original(tensor, *args, **kwargs)
            finally:
                under_way.clear()

        return call

    send, receive, reduce_ = HostMessages.send, HostMessages.receive, HostMessages.all_reduce_

    def counted_send(self: HostMessages, payload: torch.Tensor, targets: Any) -> Any:
        count("isend", payload, len(targets))
        return send(self, payload, targets)

    def counted_receive(self: HostMessages, target: torch.Tensor, source: Any) -> Any:
        count("irecv", target)
        return receive(self, target, source)

    def counted_reduce(self: HostMessages, tensor: torch.Tensor, op: Any) -> Any:
        count("all_reduce", tensor)
        return reduce_(self, tensor, op)

    with ExitStack() as patches:
        patched = {name: counted(name) for name in VERBS}
        for module in (distributed_c10d, dist):
            patches.enter_context(mock.patch.multiple(module, **patched))
        patches.enter_context(mock.patch.object(HostMessages, "send", counted_send))
        patches.enter_context(mock.patch.object(HostMessages, "receive", counted_receive))
        patches.enter_context(mock.patch.object(HostMessages, "all_reduce_", counted_reduce))
        yield calls, nbytes
