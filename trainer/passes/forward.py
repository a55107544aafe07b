"""Run networks in eval mode over batches: compiled in a long pass, replayed from CUDA graphs if that pays."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext

import torch
from torch import nn

from shards.progress import Progress
from trainer.acceleration.graphed_forward import Forward, GraphedForward, predict_stream
from trainer.acceleration.precision import autocast
from trainer.config.section import Precision
from trainer.distributed.place import show_place
from trainer.distributed.stop import Stopped, StopRequest
from trainer.loading.batch import Batch, BatchRequest, Loader
from trainer.models.features import forward_with_features

Passes = Generator[tuple[Batch, list[tuple[torch.Tensor, ...]]], None, None]
"""Each batch with every network's (logits,) or (logits, features)."""

WORTH_COMPILING = 100_000
"""In a pass with at least this many images per rank, blocks that are compiled for training are compiled for
prediction too. Compilation takes 25 s once and saves 0.05 ms per image on Inception-ResNet-v2, so it pays off after
five such passes, and many runs do one pass per epoch."""


@contextmanager
def on_priority_stream(device: torch.device) -> Iterator[None]:
    """Run the body on a high-priority stream, ahead of the decoding of the next batches on the same GPU."""
    if device.type != "cuda":
        yield
        return
    here, first = torch.cuda.current_stream(device), predict_stream(device).stream
    first.wait_stream(here)
    with torch.cuda.stream(first):
        yield
    here.wait_stream(first)


def iterate_forward(
    networks: Sequence[nn.Module],
    loader: Loader,
    requests: Sequence[BatchRequest],
    device: torch.device,
    precision: Precision,
    stop: StopRequest,
    name: str,
    graphs: bool = True,
    features: bool = False,
) -> Passes:
    """Yield each batch with every network's outputs in float32, which the next batch overwrites.

    Args:
        name: of the pass, for its progress and when it is stopped.
        features: whether the outputs are logits and features instead of logits alone.
    """
    were_training = [network.training for network in networks]
    try:
        for network in networks:
            network.eval()
        rows = sum(request.real_rows for request in requests)
        compiled = rows >= WORTH_COMPILING
        way = nullcontext() if compiled else torch.compiler.set_stance("force_eager")
        forwards = [_forward_of(network, device, precision, features) for network in networks]
        if graphs:
            recorded = zip(networks, forwards, strict=True)
            forwards = [GraphedForward(*one, (precision, compiled, features), len(requests)) for one in recorded]
        with (
            Progress(show_place(name), rows) as progress,
            torch.no_grad(),
            way,
            closing(loader.batches(requests)) as batches,
        ):
            for number, (request, batch) in enumerate(zip(requests, batches, strict=True)):
                reason = stop.reason()
                if reason is not None:
                    raise Stopped(name, number, reason)
                yield batch, [forward(batch.images) for forward in forwards]
                progress.advance(request.real_rows)
    finally:
        if device.type == "cuda":  # finish replays before the graphs that are not cached, and their memory, are freed
            torch.cuda.current_stream(device).synchronize()
        for network, training in zip(networks, were_training, strict=True):
            network.train(training)


def _forward_of(network: nn.Module, device: torch.device, precision: Precision, features: bool) -> Forward:
    def forward(images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with autocast(device, precision):
            outputs = forward_with_features(network, images) if features else (network(images),)
        return tuple(output.float() for output in outputs)

    return forward
