"""What every partial gradient shows of the other ranks' gradients: whether all of them are finite."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tensorplay.distributed.optim._core.collectives import Communicator, Waitable
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient


class Sentinels:
    """A scalar of each dtype and device that is a part of every partial gradient.

    It isn't finite where some rank's gradients aren't, so that an unmodified ``GradScaler`` skips on
    all ranks or on none.

    Args:
        communicator: carries what ranks tell each other.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._scalars: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._pending: list[_Finiteness] = []

    def partial(self, parameter: torch.Tensor, own: torch.Tensor | None = None) -> PartialGradient:
        """The gradient of a parameter of which this rank has ``own``, ``(numel of it,)``, or nothing."""
        sentinel, method = self._of(parameter), weakref.WeakMethod(self.complete)

        def complete() -> None:
            if (found := method()) is not None:
                found()

        parts = (sentinel,) if own is None else (own, sentinel)
        return PartialGradient(parameter, parts, own, complete)

    def agree(
        self,
        scalars: Sequence[torch.Tensor],
        devices: Iterable[torch.device],
        *,
        adds_up: bool,
    ) -> None:
        """Begins to tell the other ranks; every rank must call it.

        Args:
            scalars: finite if and only if this rank's gradients are.
            devices: of any rank's gradients, in one order.
            adds_up: whether gradients were added to those of before, which may not have been finite.
        """
        self.complete()
        for device in devices:
            local = [scalar for scalar in scalars if scalar.device == device]
            infinite = torch.zeros(1, dtype=torch.uint8, device=device)
            if local:
                infinite += ~torch.isfinite(torch.stack(local)).all()  # a sum might overflow
            gathering = self._communicator.all_reduce_(infinite, "max")
            self._pending.append(_Finiteness(gathering, infinite, adds_up))

    @torch.no_grad()
    def complete(self) -> None:
        """Waits for what ranks tell each other, which few ask for before the next step."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.gathering.wait()
            for (_, device), sentinel in self._scalars.items():
                if device == each.infinite.device:
                    worst = torch.where(each.infinite.bool(), torch.inf, 0.0).to(sentinel.dtype)
                    sentinel.copy_(sentinel + worst if each.adds_up else worst)

    def _of(self, parameter: torch.Tensor) -> torch.Tensor:
        kind = parameter.dtype, parameter.device
        if kind not in self._scalars:
            self._scalars[kind] = torch.zeros(1, dtype=kind[0], device=kind[1])
        return self._scalars[kind]


@dataclass
class _Finiteness:
    """Whether some rank's gradients aren't finite, as soon as all have told."""

    gathering: Waitable
    infinite: torch.Tensor
    adds_up: bool
