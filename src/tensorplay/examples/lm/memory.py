"""The most memory that this process has held since a moment of its choice, and for gradients."""

import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures from its construction on.

    On a GPU: what torch allocated there. On Linux: the resident size of the process, which starts
    afresh where the kernel allows that. Elsewhere: the resident size since the process began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            return  # the figure then counts from the start of the process

    def nbytes(self) -> int:
        """Returns the peak so far, in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if _STATUS.exists():
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeakGradients:
    """Measures the memory behind all ``.grad`` whenever one has come, until it's told to stop.

    Construct it before whatever frees gradients during backward.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self.nbytes = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._look)  # type: ignore[no-untyped-call] # torch leaves it untyped
            for parameter in self._parameters
        ]

    def stop(self) -> None:
        """Looks once more, and no longer."""
        self._look()
        for hook in self._hooks:
            hook.remove()

    def _look(self, _: torch.Tensor | None = None) -> None:
        gradients = (parameter.grad for parameter in self._parameters)
        storages = (gradient.untyped_storage() for gradient in gradients if gradient is not None)
        self.nbytes = max(self.nbytes, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
