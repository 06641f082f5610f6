"""Trains a language model with the optimizer state replicated, then sharded, and compares.

``python -m tensorplay.examples.train_lm`` starts its own processes through torchrun; started by
torchrun, it is one of them. See ``--help``.
"""

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tensorplay.examples.lm import report
from tensorplay.examples.lm.checkpoint import Checkpoint
from tensorplay.examples.lm.errors import UsageError
from tensorplay.examples.lm.options import Options, parse_options
from tensorplay.examples.lm.processes import (
    Interrupted,
    RankError,
    choose_device,
    interruptible,
    process_group,
    run_ranks,
)
from tensorplay.examples.lm.record import RunRecord
from tensorplay.examples.lm.text import Text, read_text

MODULE = "tensorplay.examples.train_lm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program.

    Returns:
        The exit code: 0; 1 when the losses differ or a rank failed; 2 for a request that cannot
        be run; 128 and the signal's number when interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if "RANK" in os.environ:
        return _run_as_rank(arguments)
    try:
        with interruptible():
            return _launch(arguments)
    except UsageError as error:
        _complain(f"error: {error}")
        return 2
    except RankError as error:
        _complain(f"{error}; see above")
        return 1
    except Interrupted as error:
        print(file=sys.stderr)  # below the progress bar
        _complain(f"{error}; all processes have ended")
        return 128 + error.received


def _launch(arguments: Sequence[str]) -> int:
    """Makes each run in fresh processes, so that neither inherits memory from the other."""
    options, text, _ = _prepare(arguments, world_size=None)
    _announce(options, text, local_world_size=options.world_size)
    records = []
    with tempfile.TemporaryDirectory(prefix="train_lm-") as scratch:
        for mode in options.modes:
            handed_over = Path(scratch, f"{mode}.json")
            run_ranks(
                MODULE,
                [
                    *arguments,
                    f"--only={mode}",
                    f"--record={handed_over}",
                    f"--launcher-pid={os.getpid()}",
                ],
                options.world_size,
            )
            records.append(RunRecord(**json.loads(handed_over.read_text())))
    return _report(options, text, records, one_process=False)


def _run_as_rank(arguments: Sequence[str]) -> int:
    """Makes the runs one after the other; rank 0 reports, or hands the record to the launcher."""
    is_first = os.environ["RANK"] == "0"
    try:
        options, text, checkpoint = _prepare(arguments, int(os.environ["WORLD_SIZE"]))
        from tensorplay.examples.lm.training import check_same_text, train

        if is_first and options.record is None:
            _announce(options, text, int(os.environ["LOCAL_WORLD_SIZE"]))
        with process_group(options.launcher_pid) as device:
            check_same_text(text, device)
            modes = options.modes if options.only is None else (options.only,)
            records = [train(mode, options, text, checkpoint, device) for mode in modes]
    except UsageError as error:
        if is_first:
            _complain(f"error: {error}")
        return 2
    if not is_first:
        return 0
    if options.record is None:
        return _report(options, text, records, one_process=True)
    options.record.write_text(json.dumps(asdict(records[0])))
    return 0


def _prepare(
    arguments: Sequence[str], world_size: int | None
) -> tuple[Options, Text, Checkpoint | None]:
    """Reads what is asked for, and finds out what cannot be done before anything is started."""
    options, checkpoint = parse_options(arguments, world_size)
    for package in ("matplotlib", "tqdm"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{package} is not installed; pip install 'tensorplay[examples]'")
    text = read_text(options.text, options.config.context)
    if checkpoint is not None and checkpoint.text_digest != text.digest:
        raise UsageError(
            f"the run in {options.resume} learned another text than {text.name} here; pass the "
            "--text it learned"
        )
    if options.out is not None:
        _make_folder(options.out)
    if options.save is not None:
        _make_folder(options.save.parent)
    return options, text, checkpoint


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to the folder {path} ({error.strerror})") from error


def _announce(options: Options, text: Text, local_world_size: int) -> None:
    device = choose_device(local_world_size)
    print(report.introduce(options, text, device), flush=True)


def _report(
    options: Options, text: Text, records: Sequence[RunRecord], *, one_process: bool
) -> int:
    folder = options.out
    if folder is None:
        folder = Path("runs", f"lm-{options.config.optimizer}-{time.strftime('%Y%m%d-%H%M%S')}")
        _make_folder(folder)
    rows = report.tabulate(records)
    same, verdict = report.judge(records)
    report.plot(folder / "loss.png", options, text, records)
    report.write_numbers(folder / "numbers.json", options, text, records, rows)
    print(f"\n{report.format_table(rows)}\n")
    print(report.explain(records, one_process=one_process))
    print(verdict)
    if options.save is not None:
        print(f"Checkpoint: {options.save} (go on with --resume {options.save} --steps ...)")
    print(f"Plot:       {folder / 'loss.png'}\nNumbers:    {folder / 'numbers.json'}")
    return 0 if same else 1


def _complain(message: str) -> None:
    print(f"train_lm: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
