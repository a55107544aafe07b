"""`compiled_program.py`: one compiled step; prints the hits and misses of torch's caches as JSON."""

import json

import torch
from torch import nn
from torch._dynamo.utils import counters

from trainer.acceleration.compile import compile_blocks

network = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
compile_blocks(network)
network(torch.ones(2, 8)).sum().backward()
served, missed = "fxgraph_cache_hit", "fxgraph_cache_miss"
found = {"inductor": [counters["inductor"][name] for name in (served, missed)]}
served, missed = "autograd_cache_hit", "autograd_cache_miss"
found["aot_autograd"] = [counters["aot_autograd"][name] for name in (served, missed)]
print(json.dumps(found))
