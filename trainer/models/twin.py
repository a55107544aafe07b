"""`TwinModel`: the two networks of Co-teaching as one module."""

import torch
from torch import Tensor, nn


class TwinModel(nn.Module):
    """Two networks that share one optimiser, one engine and one checkpoint."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a = a
        self.b = b
        self.side_stream: torch.cuda.Stream | None = None
        """CUDA stream on which b runs concurrently with a: with small batches, one network does not fill the GPU."""

    def forward(self, x_a: Tensor, x_b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits of a and b, each [rows, classes]; b gets x_b (the rows its peer selected) or else x_a."""
        x_b = x_a if x_b is None else x_b
        if self.side_stream is None:
            return self.a(x_a), self.b(x_b)
        current, side = torch.cuda.current_stream(x_a.device), self.side_stream
        side.wait_stream(current)
        logits_a = self.a(x_a)  # a before b, as above, so that random draws (dropout) keep their order
        with torch.cuda.stream(side):
            logits_b = self.b(x_b)
        current.wait_stream(side)
        x_b.record_stream(side)
        logits_b.record_stream(current)
        return logits_a, logits_b
