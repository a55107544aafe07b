"""A pair of small networks trained through an engine, on batches that depend on the step alone."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from trainer.distributed.world import World
from trainer.models.twin import TwinModel
from trainer.training.checkpoint import load_module, module_state
from trainer.training.engines import Engine

ROWS, CLASSES = 12, 5
STEPS, FURTHER = 20, 5
SCALE = 4.0
"""The gradients are those of a quarter of the loss, and are scaled when they are complete."""
NOT_FINITE = 7
"""The step at which one row of the last rank is infinite."""


def twin(normed: bool) -> TwinModel:
    torch.manual_seed(5)
    return TwinModel(_network(normed), _network(normed))


def _network(normed: bool) -> nn.Module:
    """Sizes are odd, so that ZeRO cuts through the middle of weights.

    No bias before BatchNorm: its true gradient is 0, and Adam would blow rounding errors up to whole steps.
    """
    norm = nn.BatchNorm2d(7) if normed else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, bias=not normed), norm, nn.ReLU(), nn.Flatten(), nn.Linear(7 * 4 * 4, CLASSES)
    )


def optimizer_of(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Two groups, which interleave in the module's own order: numbers of moments go by group."""
    matrices = {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.01}
    vectors = {"params": [p for p in module.parameters() if p.ndim == 1], "weight_decay": 0.0}
    if kind != "sgd":
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]([matrices, vectors], lr=1.0)
    return torch.optim.SGD([matrices, vectors], lr=1.0, momentum=0.9)


@dataclass
class Training:
    engine: Engine
    world: World
    kind: str
    skipped: list[int] = field(default_factory=list)

    def steps(self, first: int, count: int) -> "Training":
        for step in range(first, first + count):
            self._step(step)
        return self

    def _step(self, step: int) -> None:
        engine = self.engine
        before = [buffer.clone() for buffer in engine.module.buffers()]
        images, labels = self._own_rows(step)
        engine.module.train()
        engine.zero_grad()
        parts = torch.arange(len(images)).chunk(1 + step % 2)
        for number, rows in enumerate(parts):
            last = number == len(parts) - 1
            logits = engine.forward(images[rows], last=last)
            losses = [F.cross_entropy(said, labels[rows], reduction="sum") for said in logits]
            engine.backward((losses[0] + losses[1]) / (ROWS * SCALE), last)
        for tensor in engine.unreduced_gradients():
            self.world.all_reduce(tensor)
        engine.scale_gradients(torch.tensor(SCALE))
        finite = engine.gradients_finite()
        engine.set_rate((0.05 if self.kind == "sgd" else 0.01) / (1 + step // 10))
        engine.step(finite)
        if not finite:
            self.skipped.append(step)
            for buffer, old in zip(engine.module.buffers(), before, strict=True):
                buffer.copy_(old)

    def broken_off(self) -> "Training":
        """A step that ends after the first of its parts."""
        self.engine.zero_grad()
        images, _ = self._own_rows(0)
        self.engine.backward(sum(said.sum() for said in self.engine.forward(images, last=False)), last=False)
        return self

    def _own_rows(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(ROWS, 3, 6, 6, generator=generator)
        labels = torch.randint(CLASSES, (ROWS,), generator=generator)
        if step == NOT_FINITE:
            images[-1] = torch.inf
        own = slice(self.world.rank * ROWS // self.world.size, (self.world.rank + 1) * ROWS // self.world.size)
        return images[own], labels[own]

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it, in a copy."""
        tensors = module_state(self.engine.module, "model.") | self.engine.moments()
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def load(self, state: dict[str, torch.Tensor]) -> "Training":
        load_module(self.engine.module, state, "model.")
        self.engine.sync_weights()
        self.engine.load_moments(state)
        return self


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any number; the two must hold the same names, shapes and types."""
    assert {name: (t.shape, t.dtype) for name, t in a.items()} == {name: (t.shape, t.dtype) for name, t in b.items()}
    return max((float((a[name].double() - b[name].double()).abs().max()) for name in a), default=0.0)
