"""Averagers of models, as in ``torch.distributed.algorithms.model_averaging.averagers``."""

from tensorplay.distributed.optim.local_sgd import ModelAverager, PeriodicModelAverager

__all__ = ["ModelAverager", "PeriodicModelAverager"]
