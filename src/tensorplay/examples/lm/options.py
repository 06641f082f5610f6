"""The command line, checked: what the user asks for as plain frozen values."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from tensorplay.examples.lm.checkpoint import Checkpoint, read_checkpoint
from tensorplay.examples.lm.errors import UsageError
from tensorplay.examples.lm.model import ModelConfig

DEFAULT_NUM_PROCESSES = 2
MODES = {
    "both": ("replicated", "sharded"),
    "replicated": ("replicated",),
    "sharded": ("sharded",),
}
IN_BACKWARD_MODES = ("replicated", "in-backward")

_DESCRIPTION = """\
Train a small language model on real text, twice from the same seed: once with the optimizer state
replicated on every process, as plain data parallelism does, and once sharded over the processes
with tensorplay's ZeroRedundancyOptimizer. Then compare losses, memory, speed and traffic.
"""

_EPILOG = """\
A checkpoint written by --save holds the whole optimizer state. --resume continues that run on any
number of processes, replicated or sharded: the global batch and the order of the samples do not
depend on either. The options of the first two groups then come from the checkpoint, and giving
another value is an error. With --mode both, --resume starts both runs from the checkpoint, and
--save writes the sharded one at its end.

Several machines: torchrun --nnodes N --nproc-per-node M ... -m tensorplay.examples.train_lm
Each process computes on one thread; set OMP_NUM_THREADS for more.
"""


@dataclass(frozen=True)
class _Defaults:
    """What suits an optimizer on two CPU cores."""

    lr: float
    steps: int
    width: int
    heads: int


_DEFAULTS = {
    "adamw": _Defaults(lr=1e-3, steps=60, width=384, heads=6),
    "sgd": _Defaults(lr=0.1, steps=60, width=384, heads=6),
    # Muon computes in bfloat16, which most CPUs have no instructions for: 37 s per step at 384.
    "muon": _Defaults(lr=2e-3, steps=30, width=128, heads=4),
}


@dataclass(frozen=True)
class RunConfig:
    """What makes two runs the same run; a checkpoint carries it.

    Args:
        optimizer: ``"adamw"``, ``"sgd"`` or ``"muon"``.
        lr: Learning rate after the warm-up.
        batch: Windows of text per step, all processes together.
        seed: Of the first weights and of the order of the samples.
        layers: See `ModelConfig`.
        width: See `ModelConfig`.
        heads: See `ModelConfig`.
        context: See `ModelConfig`.
        in_backward: Compare updates after and inside backward. Gradients are then clipped one
            parameter at a time, which can be done in both.
    """

    optimizer: str
    lr: float
    batch: int
    seed: int
    layers: int
    width: int
    heads: int
    context: int
    in_backward: bool

    @property
    def model(self) -> ModelConfig:
        """The sizes of the model."""
        return ModelConfig(self.layers, self.width, self.heads, self.context)


@dataclass(frozen=True)
class Options:
    """The whole request.

    Args:
        config: What is trained.
        text: The file to learn; ``None`` for the standard library's sources.
        steps: The step to stop at, counted from the very beginning.
        modes: The runs asked for: ``"replicated"``, ``"sharded"`` or both; or ``"replicated"`` and
            ``"in-backward"``.
        only: The one of them that these processes make; ``None`` for all, one after the other.
        world_size: Number of processes.
        out: Folder for plot and numbers; ``None`` to name one after the moment.
        save: Where to write a checkpoint at the end.
        resume: The checkpoint to start from.
        record: Where to leave the records of the runs for the process that started this one.
        launcher_pid: That process.
    """

    config: RunConfig
    text: Path | None
    steps: int
    modes: tuple[str, ...]
    only: str | None
    world_size: int
    out: Path | None
    save: Path | None
    resume: Path | None
    record: Path | None
    launcher_pid: int | None


def parse_options(
    arguments: Sequence[str], world_size: int | None
) -> tuple[Options, Checkpoint | None]:
    """Returns the request and the checkpoint it starts from, both checked.

    Args:
        arguments: The command line without the program's name.
        world_size: Number of processes if they are running already (under ``torchrun``).

    Raises:
        UsageError: something cannot be run as given.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    checkpoint = None
    if given.resume is not None:
        checkpoint = read_checkpoint(given.resume)
        parser.set_defaults(**checkpoint.config)
        given = parser.parse_args(arguments)

    suited = _DEFAULTS[given.optimizer]
    config = RunConfig(
        optimizer=given.optimizer,
        lr=suited.lr if given.lr is None else given.lr,
        batch=given.batch,
        seed=given.seed,
        layers=given.layers,
        width=suited.width if given.width is None else given.width,
        heads=suited.heads if given.heads is None else given.heads,
        context=given.context,
        in_backward=given.in_backward,
    )
    if config.in_backward and given.mode != "both":
        raise UsageError(
            f"--mode {given.mode} with --in-backward, which compares the update inside backward with "
            "the ordinary one; leave one of them out"
        )
    options = Options(
        config=config,
        text=given.text,
        steps=suited.steps if given.steps is None else given.steps,
        modes=IN_BACKWARD_MODES if config.in_backward else MODES[given.mode],
        only=given.only,
        world_size=world_size or given.nproc or DEFAULT_NUM_PROCESSES,
        out=given.out,
        save=given.save,
        resume=given.resume,
        record=given.record,
        launcher_pid=given.launcher_pid,
    )
    if given.nproc is not None and given.nproc != options.world_size:
        raise UsageError(
            f"--nproc {given.nproc} under torchrun, which started {world_size}; leave --nproc out"
        )
    _check(options)
    if checkpoint is not None:
        _check_resume(options, checkpoint)
    return options, checkpoint


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_lm",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--optimizer",
        choices=sorted(_DEFAULTS),
        default="adamw",
        help="muon: Muon for the matrices, AdamW for the rest (default: adamw)",
    )
    training.add_argument("--lr", type=float, help="learning rate (default: suits the optimizer)")
    training.add_argument(
        "--batch", type=_count, default=16, help="windows per step, all processes together (16)"
    )
    training.add_argument("--seed", type=_seed, default=0, help="of weights and samples (0)")

    model = parser.add_argument_group("model (by default 10.8 M parameters)")
    model.add_argument("--layers", type=_count, default=6, help="blocks (6)")
    model.add_argument(
        "--width", type=_count, help="size of a position's vector (384; muon: 128, slow on CPUs)"
    )
    model.add_argument("--heads", type=_count, help="attention heads (6; muon: 4)")
    model.add_argument("--context", type=_count, default=64, help="bytes looked at (64)")

    run = parser.add_argument_group("run")
    run.add_argument(
        "--steps", type=_count, help="steps in all, resumed ones included (60; muon: 30)"
    )
    run.add_argument(
        "--nproc", type=_count, help=f"processes on this machine ({DEFAULT_NUM_PROCESSES})"
    )
    run.add_argument("--mode", choices=MODES, default="both", help="which runs to make (both)")
    run.add_argument(
        "--in-backward",
        action="store_true",
        help="compare updates after backward with updates inside backward, which free gradients",
    )
    run.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="what to learn (the Python standard library's sources)",
    )
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="for plot and numbers (runs/lm-OPTIMIZER-TIME)"
    )
    run.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint at the end")
    run.add_argument("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")

    # How the launcher talks to the processes it starts.
    parser.add_argument(
        "--only", choices=(*MODES["both"], IN_BACKWARD_MODES[1]), help=argparse.SUPPRESS
    )
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--launcher-pid", type=int, help=argparse.SUPPRESS)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 4294967295")
    return int(text)


def _check(options: Options) -> None:
    config = options.config
    if not (config.lr > 0 and math.isfinite(config.lr)):
        raise UsageError(f"--lr {config.lr} is not a positive number")
    if config.width % config.heads:
        raise UsageError(
            f"--width {config.width} is not a multiple of --heads {config.heads}; change one"
        )
    if config.batch < options.world_size:
        raise UsageError(
            f"--batch {config.batch} leaves some of the {options.world_size} processes without "
            "work; pass a batch of at least their number, or fewer processes"
        )
    if options.save is not None and options.save.is_dir():
        raise UsageError(f"--save {options.save} is a folder; pass the path of a file")


def _check_resume(options: Options, checkpoint: Checkpoint) -> None:
    for name, value in asdict(options.config).items():
        saved = checkpoint.config.get(name, False)  # older ones know nothing of in_backward
        name = name.replace("_", "-")  # noqa: PLW2901 - as it is written on the command line
        if value != saved:
            raise UsageError(
                f"--{name} {value} differs from the run in {options.resume}, which has {saved}; "
                f"leave --{name} out to go on with that run, or --resume to begin another"
            )
    if options.steps <= checkpoint.step:
        raise UsageError(
            f"--steps {options.steps}, but the run in {options.resume} has taken "
            f"{checkpoint.step} already; pass a larger number"
        )
