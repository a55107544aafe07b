"""A pair of networks as one module."""

import torch
from torch import Tensor, nn


class TwinModel(nn.Module):
    """The two networks of Co-teaching as one module: one optimiser, one engine, one checkpoint."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a = a
        self.b = b
        self.side_stream: torch.cuda.Stream | None = None
        """The CUDA stream that b runs on: at small batches, kernels of one network leave room for the other's."""

    def forward(self, x_a: Tensor, x_b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits of both, each [rows, classes]: b sees x_b where given (its peer's choice), else x_a too."""
        x_b = x_a if x_b is None else x_b
        if self.side_stream is None:
            return self.a(x_a), self.b(x_b)
        current, side = torch.cuda.current_stream(x_a.device), self.side_stream
        side.wait_stream(current)
        logits_a = self.a(x_a)  # a before b, as above: random draws (dropout) happen in that order
        with torch.cuda.stream(side):
            logits_b = self.b(x_b)
        current.wait_stream(side)
        x_b.record_stream(side)
        logits_b.record_stream(current)
        return logits_a, logits_b
