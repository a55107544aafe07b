"""Process settings that must be in place before torch is imported."""

import os
import tempfile

import pytest
from hypothesis import settings

from tests.support import REPOSITORY

# One thread per process: tests share few cores, and spinning threads of several processes starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled code of tests is cached, but not in the user's home.
os.environ.setdefault("INCV_COMPILE_CACHE", f"{tempfile.gettempdir()}/incv-tests-{os.getuid()}")
# Programs that tests start as processes of their own import `tests.support` too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
# A busy machine makes any example slow; pytest-timeout ends the tests that hang.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def _log_output():
    """Log lines reach stderr as they do from the command line, wherever a test starts."""
    from trainer.records.logs import configure_logging

    configure_logging()


@pytest.fixture
def exact_kernels():
    """cuDNN may choose kernels that add up in another order every time; not in these tests."""
    from torch.backends import cudnn

    before = cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark
    cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark = True, False, False
    yield
    cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark = before
