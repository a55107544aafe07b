"""Several hosts on one GPU, over NCCL: fold groups, gathers, CUDA graphs, ZeRO-2, a killed rank. `make test-gpu`."""

import os

import pytest
import torch

from tests.support.nccl_hosts import CASES, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(1800),  # all runs are in the set-up of the first test
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all cases; as many runs at once as there are cores for their ranks."""
    return check(list(CASES), tmp_path_factory.mktemp("hosts"), jobs=max(1, (os.cpu_count() or 1) // 4))


@pytest.mark.parametrize("case", CASES)
def test_several_hosts_do_what_they_should(case: str, outcomes: dict[str, str]) -> None:
    outcome = outcomes[case]
    if outcome.startswith("skip"):
        pytest.skip(outcome)
    assert outcome.startswith("ok"), outcome
