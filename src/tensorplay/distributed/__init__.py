"""``torch.distributed``, with this package's ``optim`` in the place of torch's.

Every other name and submodule is torch's own: ``tensorplay.distributed.fsdp is torch.distributed.fsdp``.
Submodules that torch has not loaded yet are imported when they are first reached for.
"""

from typing import TYPE_CHECKING

from tensorplay import _facade

__getattr__, __dir__ = _facade.overlay(__name__)

if TYPE_CHECKING:
    from torch.distributed import *  # noqa: F403  # for type checkers and editors
