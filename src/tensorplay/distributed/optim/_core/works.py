"""What has been launched, and can be awaited."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Waitable(Protocol):
    """Something that has been launched and can be awaited."""

    def wait(self) -> None:
        """Returns once the result may be read; raises if it failed."""


class CommunicationError(RuntimeError):
    """The backend failed or timed out; the message says what was under way, and with whom."""


class Work(Protocol):
    """What a backend returns for an operation."""

    def wait(self) -> object:
        """Waits until it has succeeded; ``RuntimeError`` if it fails."""

    def is_completed(self) -> bool:
        """Whether it needn't be waited for."""


class Launched(NamedTuple):
    """One operation, and words for what it does, for instance "from rank 1"."""

    work: Work
    what: str


class Works:
    """Several launched operations, awaited together."""

    def __init__(self, works: Sequence[Launched]) -> None:
        self._works = works

    def wait(self) -> None:
        """Awaits all of them, in the order of launch.

        Raises:
            CommunicationError: at the first that fails, naming it and the others that haven't
                succeeded either.
        """
        for position, (work, what) in enumerate(self._works):
            error = _failure(work)
            if error is not None:
                later = self._works[position + 1 :]
                others = [also for work, also in later if not work.is_completed() or _failure(work)]
                missing = f" (neither has come what is {', '.join(others)})" if others else ""
                raise CommunicationError(f"{what}: {error}{missing}") from error


def _failure(work: Work) -> RuntimeError | None:
    try:
        work.wait()
    except RuntimeError as error:
        return error
    return None
