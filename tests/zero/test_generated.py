"""Generated training runs: whatever the plan, sharded training equals the plain optimizer's.

``FUZZ_EXAMPLES=1000`` runs that many new random plans instead of the same few hundred.
"""

import contextlib
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.generated.plan import ALL_RANKS, Plan
from tests.generated.strategies import plans
from tests.generated.training import carry_out
from tests.launch import RankPool

FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with contextlib.closing(RankPool(len(ALL_RANKS))) as ranks:
        yield ranks


@pytest.mark.timeout(0 if FUZZ_EXAMPLES else 600)  # an example that hangs is ended by the pool
@settings(
    max_examples=FUZZ_EXAMPLES or 400,
    derandomize=not FUZZ_EXAMPLES,
    deadline=None,
    print_blob=bool(FUZZ_EXAMPLES),
    phases=[p for p in Phase if p is not Phase.explain],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plan=plans())
def test_a_sharded_training_run_equals_the_plain_one(pool: RankPool, plan: Plan) -> None:
    differences = [difference for difference in pool.run(carry_out, plan) if difference]
    assert not differences, "\n".join(differences)
