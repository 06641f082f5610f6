from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.workers import Workers


@pytest.fixture(scope="package")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(str(Path(tmp_path_factory.mktemp("rpc"), "store")))
    yield workers
    workers.close()
