"""Averaging at once, as in ``torch.distributed.algorithms.model_averaging.utils``, but in place."""

from tensorplay.distributed.optim.local_sgd.averaging import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)

__all__ = [
    "average_parameters",
    "get_params_to_average",
    "average_parameters_or_parameter_groups",
]
