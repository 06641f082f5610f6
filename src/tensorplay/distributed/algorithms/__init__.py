"""``torch.distributed.algorithms``, with this package's :class:`Join`."""

from tensorplay import _facade
from tensorplay.distributed.algorithms.join import Join as Join

__getattr__, __dir__ = _facade.overlay(__name__)
