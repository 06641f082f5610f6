"""The interpreter keeps its record of a thread that has answered, and counts it once."""

import threading

import pytest

from tensorplay.distributed.optim.remote import endpoints


class Interpreter:
    """Counts the references that are taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    def PyGILState_Check(self) -> int:  # noqa: N802 - CPython's name
        return 1

    def PyGILState_Ensure(self) -> int:  # noqa: N802 - CPython's name
        self.num_taken += 1
        return 0


def test_one_reference_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = Interpreter()
    monkeypatch.setattr(endpoints, "_thread", threading.local())
    monkeypatch.setattr(endpoints.ctypes, "pythonapi", interpreter)

    def answer() -> None:
        for _ in range(3):
            endpoints._answer_step(-1, 0)  # of an optimizer that isn't there

    for expected in (1, 2):
        thread = threading.Thread(target=answer)
        thread.start()
        thread.join()
        assert interpreter.num_taken == expected
