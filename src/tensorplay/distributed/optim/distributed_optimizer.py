"""``DistributedOptimizer``: one name, and the choice between the two classes behind it."""

import sys
from abc import ABCMeta
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from tensorplay.distributed.optim.data_parallel import DataParallelOptimizer
from tensorplay.distributed.optim.remote import RemoteOptimizer

__all__ = ["DistributedOptimizer"]

LOCAL_KEYWORDS = ("optim", "params", "named_parameters")
REMOTE_KEYWORDS = ("optimizer_class", "params_rref")


class DistributedOptimizer(Optimizer, metaclass=ABCMeta):
    """An optimizer for parameters that live on other workers, or on every rank.

    Over **RRefs**, ``DistributedOptimizer(optimizer_class, params_rref, *args, **kwargs)``: the
    parameters stay on the workers that own them. On each of these the constructor makes a local
    optimizer, all at once, and :meth:`step` lets all of them step with the gradients that
    distributed autograd has collected in a context. RPC must be initialised on every worker; only
    the trainer calls the constructor and the methods. Several trainers may update the same
    parameters, each with its own optimizer: on each worker one of them steps at a time.

    Over **local parameters**, ``DistributedOptimizer(optim, params, named_parameters=...)``: every
    rank has all parameters, and gradients are averaged over ranks in backward, in the place of
    ``DistributedDataParallel``. Its arguments and methods are those of
    :class:`DataParallelOptimizer`; ``optim`` may also be an optimizer, which is wrapped.

    Which of the two is meant is seen from the keywords ``optim``, ``params``, ``named_parameters`` or
    ``optimizer_class``, ``params_rref``; without any, from the type of the first parameter. The
    result is an instance of this class and of ``torch.optim.Optimizer``, so that schedulers take it.

    Over RRefs it follows ``torch.distributed.optim.DistributedOptimizer``, with these differences.
    Any optimizer class runs unmodified, none is scripted; where ``fused`` and ``foreach`` are left
    ``None``, dense CPU parameters in single or double precision take the class's fused kernel.
    A parameter without a gradient in the context stays as it is, and ``.grad`` is neither read nor
    changed, with any class. A worker that has no part in the context is no error. Failures of
    several workers are all reported. Passing a parameter twice is an error.

    Args:
        optimizer_class: class of the local optimizers. On several workers it must step each
            parameter from its own gradient and state (not LBFGS, Prodigy, D-Adaptation).
        params_rref: RRefs to parameters, such as ``RemoteModule.remote_parameters()`` gives, or
            param groups: dicts of ``params``, a list of RRefs, and options.
        *args: for ``optimizer_class``, after the parameters.

    Keyword Args:
        clip_grad_norm: if given, gradients are scaled so that their 2-norm over all parameters on
            all workers is at most this, as ``torch.nn.utils.clip_grad_norm_`` does. It costs one
            more round of calls that carry a number; the gradients in the context stay as they are.
        atomic: if true, a step that raises on one worker is undone on all others. It costs two more
            rounds of calls, one call per worker in which the workers take their turn one after the
            other, and, during a step, a copy of what it changes. A worker that is lost while the
            step is being confirmed is named: the others keep the step.
        **kwargs: for ``optimizer_class``.

    Attributes:
        param_groups: RRefs and options. What schedulers change here travels with the next step,
            and costs no call.
        remote_optimizers: RRefs to the local optimizers, one for each worker.

    Raises:
        RuntimeError: if RPC isn't initialised or torch lacks it, or a worker fails to answer.
        ValueError: for a parameter passed twice, a class that can't work on several workers, no
            parameters; also whatever ``optimizer_class`` raises, with every worker named.
        TypeError: if a parameter is no RRef, or refers to something that is no tensor.

    Example:
        >>> optimizer = DistributedOptimizer(torch.optim.AdamW, module.remote_parameters(), lr=1e-3)
        >>> with torch.distributed.autograd.context() as context_id:
        ...     loss = loss_fn(module.forward(inputs), targets)
        ...     torch.distributed.autograd.backward(context_id, [loss])
        ...     optimizer.step(context_id)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes one of the two concrete optimizers, which is not an instance of ``cls`` proper."""
        if cls is not DistributedOptimizer:
            raise TypeError(
                "DistributedOptimizer only chooses between two classes and can't be subclassed; "
                f"let {cls.__name__} hold one instead"
            )
        local = [keyword for keyword in LOCAL_KEYWORDS if keyword in kwargs]
        remote = [keyword for keyword in REMOTE_KEYWORDS if keyword in kwargs]
        if local and remote:
            raise TypeError(
                f"DistributedOptimizer takes {local} for parameters of this process and {remote} for "
                "RRefs, but not both"
            )
        if local and not args and "optim" not in kwargs:
            raise TypeError(
                "DistributedOptimizer needs an optimizer for parameters of this process: pass optim=, "
                "such as optim=torch.optim.AdamW"
            )
        if not local and not remote:
            if len(args) == 1 and isinstance(args[0], Optimizer):
                return DataParallelOptimizer(*args, **kwargs)
            if len(args) < 2:
                raise TypeError(
                    "DistributedOptimizer needs an optimizer class and parameters: "
                    "(optimizer_class, params_rref, ...) for RRefs, or (optim, params, ...)"
                )
            optimizer, params, *others = args
            params = _listed(params)  # a generator can be looked at only once
            if params == []:
                raise ValueError("optimizer got an empty parameter list")
            args = (optimizer, params, *others)
            if not _holds_rref(params):
                return DataParallelOptimizer(*args, **kwargs)
        return (DataParallelOptimizer if local else RemoteOptimizer)(*args, **kwargs)


DistributedOptimizer.register(DataParallelOptimizer)
DistributedOptimizer.register(RemoteOptimizer)


def _listed(params: Any) -> Any:
    """``params`` with every generator in it made a list; what isn't iterable stays."""
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        return params
    if isinstance(params, dict):
        return {key: _listed(value) if key == "params" else value for key, value in params.items()}
    return [_listed(entry) if isinstance(entry, dict) else entry for entry in params]


def _holds_rref(params: Any) -> bool:
    while isinstance(params, (list, dict)) and params:
        params = params.get("params") if isinstance(params, dict) else params[0]
    # Without torch's RPC there is no RRef, and nothing to import.
    rpc = sys.modules.get("torch.distributed.rpc")
    return isinstance(params, getattr(rpc, "PyRRef", ()))
