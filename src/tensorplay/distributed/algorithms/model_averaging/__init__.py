"""``torch.distributed.algorithms.model_averaging``, with this package's averagers."""

from tensorplay import _facade

__getattr__, __dir__ = _facade.overlay(__name__)
