"""The file that ``--save`` writes and ``--resume`` reads.

It holds what a run needs to go on, on any number of processes and with the state replicated or
sharded: the model, the whole state of each optimizer as the plain class writes it, the number of
steps taken (which is also the position in the data, see `text.sample_positions`) and the options
that make it the same run.
"""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tensorplay.examples.lm.errors import UsageError

FORMAT = "tensorplay.examples.train_lm/1"


@dataclass(frozen=True)
class Checkpoint:
    """A run between two steps.

    Args:
        step: Steps taken.
        config: The fields of `options.RunConfig`.
        text_digest: Of the text that was being learned.
        model: The model's state dict.
        optimizers: The plain state dict of each optimizer.
    """

    step: int
    config: dict[str, Any]
    text_digest: str
    model: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]


_FIELDS = [field.name for field in fields(Checkpoint)]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes ``path`` whole or not at all; one rank calls it."""
    content = {FORMAT: {name: getattr(checkpoint, name) for name in _FIELDS}}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Returns what `write_checkpoint` wrote, on the CPU.

    Raises:
        UsageError: no such file, or not one of ours.
    """
    if not path.is_file():
        raise UsageError(f"no checkpoint at --resume {path}; pass a file that --save wrote")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return Checkpoint(**content[FORMAT])
    except Exception as error:  # torch.load raises whatever a foreign file provokes
        raise UsageError(
            f"--resume {path} is not a checkpoint of this program, or a damaged one "
            f"({type(error).__name__}); pass a file that --save wrote"
        ) from error
