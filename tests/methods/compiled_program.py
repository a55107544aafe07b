"""`compiled_program.py FOLDER`: two steps of a compiled network; prints what torch's caches could serve."""

import sys
from pathlib import Path

from fast_steps import batch_at, position, task_of
from torch._dynamo.utils import counters

from trainer.world import ALONE

task = task_of("standard", ALONE, compile=True, compile_cache=Path(sys.argv[1]))
for step in range(2):
    task.step(batch_at(step, task.device), position(step))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
