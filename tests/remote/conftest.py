from collections.abc import Iterator

import pytest

from tests.remote.workers import Workers


@pytest.fixture(scope="package")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("rpc"))
    yield workers
    workers.close()
