"""``tensorplay``: PyTorch under one more name, with distributed-aware optimizers."""

from tensorplay._version import __version__ as __version__
