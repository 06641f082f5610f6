"""Memory in which other ranks' parts arrive, lent for one round of an exchange at a time.

On CPUs fresh memory of this size comes from the operating system and goes back to it, and its first
use costs about as much as the transfer: what has been lent is kept for the next round.
"""

import torch


class ReceiveMemory:
    """Lends blocks and keeps some of those that come back.

    Args:
        num_kept_bytes: of returned memory that stays allocated.
    """

    def __init__(self, num_kept_bytes: int) -> None:
        self._num_kept_bytes = num_kept_bytes
        self._free: dict[torch.device, list[torch.Tensor]] = {}

    def lend(self, nbytes: int, usual_nbytes: int, device: torch.device) -> torch.Tensor:
        """``(at least nbytes,)`` bytes; blocks are as long as ``usual_nbytes``, if that's enough."""
        free = self._free.setdefault(device, [])
        for place, block in enumerate(free):
            if block.numel() >= nbytes:
                return free.pop(place)
        return torch.empty(max(nbytes, usual_nbytes), dtype=torch.uint8, device=device)

    def take_back(self, block: torch.Tensor) -> None:
        """The block isn't in use any more."""
        free = self._free.setdefault(block.device, [])
        if sum(each.numel() for each in free) + block.numel() <= self._num_kept_bytes:
            free.append(block)
