"""`compiled_program.py FOLDER PRECISION STEP ...`: compiled steps; prints what torch's caches could serve."""

import sys
from pathlib import Path

from fast_steps import batch_at, position, task_of
from torch._dynamo.utils import counters

from trainer.world import ALONE

folder, precision, *steps = sys.argv[1:]
task = task_of("standard", ALONE, compile=True, compile_cache=Path(folder), precision=precision)
for step in map(int, steps):
    task.step(batch_at(step, task.device), position(step))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
