"""The text that is learned, and which windows of it each step and each rank sees."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorplay.examples.lm.errors import UsageError

STANDARD_LIBRARY_NBYTES = 8_000_000
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True)
class Text:
    """A text as bytes.

    Args:
        name: What to call it in a sentence.
        tokens: Its bytes, ``uint8``, shape ``(numel,)``, on the CPU.
        digest: SHA-256 of the bytes, hexadecimal.
    """

    name: str
    tokens: torch.Tensor
    digest: str


def read_text(path: Path | None, context: int) -> Text:
    """Returns the bytes of ``path``, or of the Python standard library's sources.

    Args:
        path: A file of any kind; ``None`` for the standard library.
        context: Bytes the model looks at; the text must be longer.

    Raises:
        UsageError: the file cannot be read, or is too short for one window.
    """
    name, content = _standard_library() if path is None else _file(path)
    if len(content) < context + 1:
        raise UsageError(
            f"the text has {len(content)} bytes, fewer than one window of --context {context} "
            "and the byte after it; pass a longer --text or a smaller --context"
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(name, tokens, hashlib.sha256(content).hexdigest())


def _file(path: Path) -> tuple[str, bytes]:
    try:
        return path.name, path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read --text {path} ({error.strerror}); pass a readable file, or leave "
            "--text out to learn the Python standard library's sources"
        ) from error


def _standard_library() -> tuple[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    content = bytearray()
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            content += path.read_bytes()
        if len(content) >= STANDARD_LIBRARY_NBYTES:
            break
    if not content:
        raise UsageError(f"no Python sources under {root}; pass --text FILE")
    return "the Python standard library's sources", bytes(content[:STANDARD_LIBRARY_NBYTES])


def sample_positions(num_tokens: int, context: int, batch: int, seed: int, step: int) -> list[int]:
    """Returns where the windows of one step's global batch begin.

    A function of its arguments alone: neither the number of ranks nor the steps taken before
    matter, so that a run can go on from any step on any number of processes.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    positions: list[int] = torch.randint(
        0, num_tokens - context, (batch,), generator=generator
    ).tolist()
    return positions


def partition_batch(batch: int, world_size: int, rank: int) -> slice:
    """Returns the contiguous share of a batch that ``rank`` takes; shares differ by at most one."""
    each, left_over = divmod(batch, world_size)
    start = rank * each + min(rank, left_over)
    return slice(start, start + each + (rank < left_over))


def cut_windows(
    tokens: torch.Tensor, positions: list[int], context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the windows at ``positions`` and, for each of their bytes, the byte that follows.

    Returns:
        Inputs and targets, ``int64``, each of shape ``(len(positions), context)``.
    """
    windows = torch.stack([tokens[start : start + context + 1] for start in positions]).long()
    return windows[:, :-1], windows[:, 1:]
