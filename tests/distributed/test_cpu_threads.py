"""Waiting threads sleep, unless the user has decided otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.distributed.launch import WAIT_VARIABLES, let_waiting_threads_sleep

_USES_GNU = "libgomp" in Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else False


@given(st.dictionaries(st.sampled_from(["HOME", "OMP_NUM_THREADS", *WAIT_VARIABLES]), st.text(max_size=5)))
def test_a_policy_of_the_user_is_kept(environ: dict[str, str]) -> None:
    before = dict(environ)
    let_waiting_threads_sleep(environ)
    if any(name in before for name in WAIT_VARIABLES):
        assert environ == before
    else:
        assert environ == before | {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.skipif(not torch.backends.openmp.is_available() or not _USES_GNU, reason="torch without GNU's OpenMP")
@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_openmp_is_loaded_with_the_policy(given: dict[str, str], policy: str) -> None:
    """OpenMP reads it once, when torch is imported: the command must have set it before."""
    environ = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    program = "import sys; from trainer.cli import main; main(['ls']); import torch"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=environ | {"OMP_DISPLAY_ENV": "true"} | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in answer.stderr
