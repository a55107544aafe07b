"""Predict passes: run networks in eval mode over each id of a subset exactly once, split over the ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

from shards.progress import Progress
from trainer.acceleration.graphed_forward import Forward, GraphedForward, predict_stream
from trainer.config.schema import Precision
from trainer.distributed.place import show_place
from trainer.distributed.stop import Stopped, StopRequest
from trainer.loading.batch import Batch, BatchRequest, Loader
from trainer.loading.image_set import ImageSet
from trainer.loading.sample_order import Ids
from trainer.methods.precision import autocast
from trainer.training.loop import RunContext

Passes = Iterator[tuple[Batch, list[torch.Tensor]]]
Result = TypeVar("Result")

WORTH_COMPILING = 100_000
"""In a pass with at least this many images per rank, blocks that are compiled for training are compiled for
prediction too. Compilation takes 25 s once and saves 0.05 ms per image on Inception-ResNet-v2, so it pays off after
five such passes, and many runs do one pass per epoch."""


def predict(
    networks: Sequence[nn.Module],
    data: ImageSet,
    ids: Ids,
    precision: Precision,
    ctx: RunContext,
    name: str,
    read: Callable[[Passes], Result],
) -> Result:
    """Run this rank's share of a predict pass over `ids`, and return the result of `read`.

    read: consumes the pass, which yields each batch with the logits of every network. No collective runs inside the
    pass; at the barrier after it, all ranks stop if one has stopped.
    """
    world, device = ctx.world, ctx.world.device
    requests = data.predict_requests(ids, ctx.execution.predict_batch, world)
    ctx.heartbeat.update(name, 0, len(requests))
    result, stopped = None, None
    try:
        graphs = ctx.execution.graphs is not False
        passes = iterate_forward(networks, data.loader, requests, device, precision, ctx.stop, name, graphs)
        with on_priority_stream(device):
            result = read(_report_progress(passes, ctx, name, len(requests)))
    except Stopped as stop:
        stopped = stop
    ctx.heartbeat.update(f"waiting after {name}", 0, 0)
    if world.barrier(stopped is not None):
        raise stopped or Stopped(name, len(requests), ctx.stop.wait_for_reason())
    assert result is not None
    return result


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


def _report_progress(passes: Passes, ctx: RunContext, name: str, total: int) -> Passes:
    for number, batch in enumerate(passes):
        ctx.heartbeat.update(name, number, total)
        yield batch


def iterate_forward(
    networks: Sequence[nn.Module],
    loader: Loader,
    requests: Sequence[BatchRequest],
    device: torch.device,
    precision: Precision,
    stop: StopRequest,
    name: str,
    graphs: bool = True,
) -> Passes:
    """Yield each batch with every network's float32 logits [rows, classes], which the next batch overwrites."""
    were_training = [network.training for network in networks]
    try:
        for network in networks:
            network.eval()
        rows = sum(request.real_rows for request in requests)
        compiled = rows >= WORTH_COMPILING
        way = nullcontext() if compiled else torch.compiler.set_stance("force_eager")
        forwards = [_forward_of(network, device, precision) for network in networks]
        if graphs:
            recorded = zip(networks, forwards, strict=True)
            forwards = [GraphedForward(*one, (precision, compiled), len(requests)) for one in recorded]
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


def _forward_of(network: nn.Module, device: torch.device, precision: Precision) -> Forward:
    def forward(images: torch.Tensor) -> torch.Tensor:
        with autocast(device, precision):
            logits: torch.Tensor = network(images)
        return logits.float()

    return forward
