"""One thread a process: tests share few cores, and spinning threads of several processes starve each other."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def exact_kernels():
    """cuDNN may choose kernels that add up in another order every time; not in these tests."""
    from torch.backends import cudnn

    before = cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark
    cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark = True, False, False
    yield
    cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark = before
