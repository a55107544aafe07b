"""`many_runs.py PLAN.json`, under any launcher or none: several `incv` commands in the same processes.

Each entry of the plan is {"arguments": [...], "port": number, "stop": [training, step] or null}. The ranks are
started once, since importing torch takes longer than such a run. The product has no test hooks: networks are added
to its list, and a stop is asked for by the STOP file, as anybody could.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer.run.runner
from trainer.cli import main
from trainer.models.cifar_resnets import SMALL_NETWORKS, CifarResNetV1
from trainer.records.trace import Trace


class Plain(nn.Module):
    """Convolutions without BatchNorm; smooth, since at the tie of a maximum rounding would lead the gradient."""

    def __init__(self, num_classes: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(12, 16, 3), nn.Tanh(), nn.Flatten()
        )
        self.fc = nn.Linear(16 * 2 * 2, num_classes)
        self.dtype = dtype
        self.to(dtype)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layers(x.to(self.dtype))
        return features

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        logits: torch.Tensor = x if pre_logits else self.fc(x)
        return logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


class FrozenResNet20(CifarResNetV1):
    """ResNet-20 whose BatchNorm stays in eval mode, with statistics of no round numbers."""

    def __init__(self, num_classes: int, dtype: torch.dtype) -> None:
        super().__init__(20, num_classes=num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(std=0.1)
                layer.running_var.uniform_(0.5, 1.5)
        self.dtype = dtype
        self.to(dtype)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward_features(x.to(self.dtype))

    def train(self, mode: bool = True) -> "FrozenResNet20":
        super().train(mode)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
        return self


def register_networks() -> None:
    for bits, dtype in (("64", torch.float64), ("32", torch.float32)):
        SMALL_NETWORKS[f"plain{bits}"] = lambda num_classes, dtype=dtype: Plain(num_classes, dtype)
        SMALL_NETWORKS[f"frozen{bits}"] = lambda num_classes, dtype=dtype: FrozenResNet20(num_classes, dtype)


class StoppingTrace(Trace):
    """After a given step of a training it leaves a STOP file, and time to notice it."""

    at: tuple[str, int] | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path.parents[1] / "STOP"

    def step(self, training: str, step: int, *what: Any) -> None:
        super().step(training, step, *what)
        if (training, step) == self.at:
            self._file.touch()
            time.sleep(1.0)


def run_entry(entry: dict[str, Any]) -> None:
    # A store of its own for every run: torchrun's would still hold what the ranks of the run before said.
    os.environ.update(MASTER_PORT=str(entry["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
    # And a launch of its own: workers that come back in the launch that was stopped leave the run stopped.
    os.environ["INCV_LAUNCHED"] = str(time.time())
    StoppingTrace.at = tuple(entry["stop"]) if entry["stop"] else None
    code = main(entry["arguments"])
    if dist.is_initialized():
        dist.destroy_process_group()
    if code != (75 if entry["stop"] and "RANK" not in os.environ else 0):
        sys.exit(f"{entry['arguments']} ended with {code}")


if __name__ == "__main__":
    register_networks()
    trainer.run.runner.Trace = StoppingTrace  # type: ignore[misc]
    for position, one in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        began = time.monotonic()
        run_entry(one)
        print(f"run {position}: {time.monotonic() - began:.1f} s", file=sys.stderr)
