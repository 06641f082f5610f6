"""The examples of functional optimizers, with tiny settings."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from tensorplay.examples import ensemble, learn_lr


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("algorithm", ensemble.ALGORITHMS)
def test_the_ensemble_trains_with_every_algorithm(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--steps=3", "--batch=8", "--width=4", "--lrs", "0.1", "0.2"]
    assert ensemble.main([f"--algorithm={algorithm}", *tiny, f"--out={tmp_path}"]) == 0
    assert (tmp_path / "curves.png").stat().st_size > 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:3]] == ["0.1", "0.2"]


def test_the_ensemble_learns() -> None:
    digits = ensemble.load_digits(seed=0)
    torch.manual_seed(0)
    rates = torch.tensor([0.0, 0.01])
    params, losses = ensemble.train(
        ensemble.optim.functional_adam, rates, digits, width=16, batch=64, steps=60
    )
    idle, trained = ensemble.measure_accuracy(params, digits).tolist()
    assert losses.shape == (60, 2)
    assert trained > 0.8 > idle


def test_the_learning_rate_is_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--updates=8", "--steps=3", "--batch=64", "--width=8", "--lr=1e-4"]
    assert learn_lr.main([*tiny, f"--out={tmp_path}"]) == 0
    assert (tmp_path / "learning-rate.png").stat().st_size > 0
    last = capsys.readouterr().out.splitlines()[1]
    assert float(last.split()[2].rstrip(":")) > 2e-4


def test_without_scikit_learn_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=r"scikit-learn is not installed; pip install 'tensorplay"):
        ensemble.load_digits(seed=0)
