"""Which parameters of a bucket have gradients on some rank: a few bytes that travel next to these."""

from collections.abc import Sequence

import torch

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.ranks import GroupRank


class Usage:
    """What the ranks tell each other about one bucket; launched by the constructor.

    Args:
        communicator: carries it.
        has: of which of the bucket's parameters this rank has a gradient.
        stopped: whether this rank's gradients must not be used, because something went wrong here.
        readers: the ranks that need to know.
    """

    def __init__(
        self,
        communicator: Communicator,
        has: Sequence[bool],
        readers: Sequence[GroupRank],
        *,
        stopped: bool,
    ) -> None:
        members = communicator.members
        own = torch.tensor(
            [stopped, *has], dtype=torch.uint8, device=communicator.transport_device()
        )
        rank = members.group_rank
        peers = [peer for peer in members if peer != rank]
        received = [torch.empty_like(own) for _ in peers] if rank in readers else []
        self._flags = [own, *received]
        self._exchange = communicator.exchange(
            [(reader, own) for reader in readers if reader != rank],
            list(zip(peers, received, strict=False)),
        )

    def wait(self) -> list[bool] | None:
        """Waits for the others' answers.

        Returns:
            Of which parameters some rank has a gradient; ``None`` if some rank has stopped. On ranks
            that needn't know: what this rank has said.
        """
        self._exchange.wait()
        stopped, *used = (torch.stack(self._flags).amax(0) != 0).tolist()
        return None if stopped else used
