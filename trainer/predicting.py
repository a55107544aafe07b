"""Forward passes without training: each id of a subset exactly once, in eval mode."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shards.progress import Progress
from trainer.loading.batch import Batch, BatchRequest, Loader
from trainer.methods.optimised import Precision, autocast
from trainer.stop_request import Stopped, StopRequest


def forward_pass(
    networks: Sequence[nn.Module],
    loader: Loader,
    requests: Sequence[BatchRequest],
    device: torch.device,
    precision: Precision,
    stop: StopRequest,
    name: str,
) -> Iterator[tuple[Batch, list[torch.Tensor]]]:
    """Each batch with the float32 logits [rows, classes] of every network."""
    were_training = [network.training for network in networks]
    try:
        for network in networks:
            network.eval()
        with Progress(name, sum(request.real_rows for request in requests)) as progress, torch.no_grad():
            for number, (request, batch) in enumerate(zip(requests, loader.batches(requests), strict=True)):
                reason = stop.reason()
                if reason is not None:
                    raise Stopped(name, number, reason)
                with autocast(device, precision):
                    logits = [network(batch.images).float() for network in networks]
                yield batch, logits
                progress.advance(request.real_rows)
    finally:
        for network, training in zip(networks, were_training, strict=True):
            network.train(training)
