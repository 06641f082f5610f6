"""The most memory that this process has held since a moment of its choice."""

import resource
import sys
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
