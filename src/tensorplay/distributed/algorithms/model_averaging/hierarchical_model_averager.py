"""The averager of a hierarchy of groups, as in torch's module of this name."""

from tensorplay.distributed.optim.local_sgd import HierarchicalModelAverager

__all__ = ["HierarchicalModelAverager"]
