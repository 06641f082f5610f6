"""PyTorch under one more name, with distributed-aware optimizers.

Every name and every submodule of ``torch`` is reachable here, and is torch's own object::

    import tensorplay as tp
    import tensorplay.nn.functional as F
    from tensorplay.nn.parallel import DistributedDataParallel

    tp.Tensor is torch.Tensor  # True; code may mix both names freely

This package defines a few modules itself, in the place of torch's:

* ``tensorplay.distributed.optim``: the distributed-aware optimizers.
* ``tensorplay.examples``: programs that show them at work.

``tensorplay.distributed`` holds the first of these and falls back to ``torch.distributed`` for
everything else. Importing ``tensorplay`` loads torch and no more. How it works is told in
``tensorplay/_facade.py``.
"""

from typing import TYPE_CHECKING

from tensorplay import _facade
from tensorplay._version import __version__ as __version__

__getattr__, __dir__ = _facade.overlay(__name__)

if TYPE_CHECKING:
    # For type checkers and editors, which do not see what happens at import. What these lines leave
    # out is `Any` to them, never an error: torch's `__all__` is only partly readable without running it.
    from torch import *  # noqa: F403 - for type checkers: all that torch has
    from torch import autograd as autograd
    from torch import cuda as cuda
    from torch import nn as nn
    from torch import optim as optim
    from torch import utils as utils
    from torch._C._VariableFunctions import *  # noqa: F403 - for type checkers: all that torch has
