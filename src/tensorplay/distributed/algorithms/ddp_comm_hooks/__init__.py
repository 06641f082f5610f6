"""``torch.distributed.algorithms.ddp_comm_hooks``, with this package's hooks."""

from tensorplay import _facade

__getattr__, __dir__ = _facade.overlay(__name__)
