"""`compiled_program.py FOLDER PRECISION STEP ...`: compiled steps; prints what torch's caches could serve."""

import sys
from pathlib import Path

from torch._dynamo.utils import counters

from tests.support.fast_steps import batch_at, position, task_of
from trainer.distributed.world import SINGLE_PROCESS

folder, precision, *steps = sys.argv[1:]
task = task_of("standard", SINGLE_PROCESS, compile=True, compile_cache=Path(folder), precision=precision)
for step in map(int, steps):
    task.step(batch_at(step, task.device), position(step))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
