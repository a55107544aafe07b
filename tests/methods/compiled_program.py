"""`compiled_program.py FOLDER [PRECISION]`: two compiled steps; prints what torch's caches could serve."""

import sys
from pathlib import Path

from fast_steps import batch_at, position, task_of
from torch._dynamo.utils import counters

from trainer.world import ALONE

precision = sys.argv[2] if len(sys.argv) > 2 else "fp32"
task = task_of("standard", ALONE, compile=True, compile_cache=Path(sys.argv[1]), precision=precision)
for step in range(2):
    task.step(batch_at(step, task.device), position(step))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
