"""The hook of post-local SGD, as in torch's module of this name."""

# ruff: noqa: N999 - torch's name for it
from tensorplay.distributed.optim.local_sgd import PostLocalSGDState, post_localSGD_hook

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]
