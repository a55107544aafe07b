"""`SamplePass`: run frozen networks over samples, split over the ranks, and return a table of what they gave."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.config.section import Precision
from trainer.distributed.stop import Stopped
from trainer.loading.batch import Batch
from trainer.loading.image_set import ImageSet
from trainer.loading.sample_order import Ids
from trainer.models.features import refuse_features
from trainer.passes.feature_file import FeatureFile
from trainer.passes.forward import iterate_forward, on_priority_stream
from trainer.passes.outputs import FEATURES, OUTPUTS, NetworkRows, Output, compute_columns
from trainer.passes.table import SampleTable, gather_table, prove_coverage
from trainer.training.loop import RunContext

Labels = npt.NDArray[np.int64] | torch.Tensor
Networks = nn.Module | Sequence[nn.Module]


@dataclass(frozen=True, eq=False)
class SamplePass:
    """Runs networks in eval mode over samples of one image set, in the centre crop; all ranks call it.

    It may raise Stopped, on all ranks alike: before a training, or between its epochs.
    """

    images: Callable[[str], ImageSet]
    """Called with what a pass is for; returns the image set, which may log unreadable images under this name."""
    precision: Precision
    ctx: RunContext
    """World, execution settings (`predict_batch`, `graphs`), heartbeat and stop request."""
    place: str
    """Format of the name of a pass, such as `d2l: {doing}`, in progress lines, heartbeats and errors."""

    def run(
        self,
        networks: Networks,
        ids: Ids,
        outputs: Sequence[str | Output] = ("probabilities",),
        *,
        doing: str = "predicting",
        labels: Labels | None = None,
        top_k: int = 1,
        gather: bool = True,
        features_to: Path | None = None,
    ) -> SampleTable:
        """Return one row for each of `ids`, with `status` and the columns named in `outputs`.

        Args:
            networks: a sequence gives columns [rows, networks, ...], a single network [rows, ...].
            ids: in any order, each once; may differ from pass to pass, so that a long pass can be run in pieces and
                put together by `SampleTable.join`.
            outputs: names of `OUTPUTS`, or columns of the caller's own.
            doing: what the pass is for.
            labels: int64, by sample_id, for the outputs that compare with labels.
            top_k: a label agrees if it is among so many likeliest classes.
            gather: whether every rank gets the rows of all ranks, instead of keeping those it computed.
            features_to: write the features to this file instead of keeping them; see `FeatureFile`. Their column
                stays on the host.
        """
        world = self.ctx.world
        chosen = [OUTPUTS[output] if isinstance(output, str) else output for output in outputs]
        if features_to is not None and FEATURES not in [output.name for output in chosen]:
            chosen.append(OUTPUTS[FEATURES])
        single = isinstance(networks, nn.Module)
        each = [networks] if isinstance(networks, nn.Module) else list(networks)
        name = self.place.format(doing=doing)
        wanted = np.sort(ids)
        reads_features = any(output.name == FEATURES for output in chosen)
        for network in each:
            if reads_features and not hasattr(network, "forward_head"):
                raise refuse_features(name, type(network).__name__, "it has no forward_head")
        file = FeatureFile(features_to, wanted, world) if features_to is not None else None
        given = None if labels is None else torch.as_tensor(labels, device=world.device)
        collector = Collector(chosen, given, top_k, single, file)
        data = self.images(doing)
        self._run_share(each, data, wanted, name, reads_features, collector)
        own, columns = collector.columns(world.device)
        if gather:
            table = gather_table(world, own, columns, wanted, name)
        else:
            prove_coverage(world, own, wanted, name)
            table = SampleTable.of(own, columns, name)
        if not table.columns:
            empty = {output.name: torch.empty(0, device=world.device) for output in chosen}
            table = SampleTable(table.ids, {**empty, "status": torch.empty(0, dtype=torch.int8, device=world.device)})
        if file is None:
            return table
        return SampleTable(table.ids, {**table.columns, FEATURES: file.finish(table.ids)})

    def _run_share(
        self,
        networks: Sequence[nn.Module],
        data: ImageSet,
        ids: Ids,
        name: str,
        features: bool,
        collector: "Collector",
    ) -> None:
        """Run this rank's share, with no collective inside; at the barrier after it, all stop if one has stopped."""
        ctx, device = self.ctx, self.ctx.world.device
        requests = data.predict_requests(ids, ctx.execution.predict_batch, ctx.world)
        ctx.heartbeat.update(name, 0, len(requests))
        stopped = None
        try:
            graphs = ctx.execution.graphs is not False
            passes = iterate_forward(
                networks, data.loader, requests, device, self.precision, ctx.stop, name, graphs, features
            )
            with on_priority_stream(device), closing(passes):
                rows = sum(request.real_rows for request in requests)
                for number, (request, (batch, answers)) in enumerate(zip(requests, passes, strict=True)):
                    ctx.heartbeat.update(name, number, len(requests))
                    collector.add(batch, answers, request.real_rows, rows)
        except Stopped as stop:
            stopped = stop
        ctx.heartbeat.update(f"waiting after {name}", 0, 0)
        if ctx.world.barrier(stopped is not None):
            raise stopped or Stopped(name, len(requests), ctx.stop.wait_for_reason())


class Collector:
    """Collects the columns of a rank's batches on the device, with no host-device sync between batches."""

    def __init__(
        self,
        outputs: Sequence[Output],
        labels: torch.Tensor | None = None,
        top_k: int = 1,
        single: bool = True,
        file: FeatureFile | None = None,
    ) -> None:
        """labels: int64, by sample_id, on the device of the batches."""
        self._outputs, self._labels, self._top_k, self._single, self._file = outputs, labels, top_k, single, file
        self._columns: dict[str, torch.Tensor] = {}
        self._filled = 0

    def add(self, batch: Batch, answers: Sequence[tuple[torch.Tensor, ...]], real: int, total: int) -> None:
        """Compute the columns of a batch, and keep those of its first `real` rows, of `total` in all."""
        given = None if self._labels is None else self._labels[batch.ids.clamp(min=0)].where(batch.ids >= 0, 0)
        rows = [NetworkRows(one[0], one[1] if len(one) > 1 else None, given, self._top_k) for one in answers]
        found = compute_columns(rows, batch.weights > 0, self._outputs, self._single)
        found["ids"] = batch.ids
        if self._file is not None:
            self._file.write(batch.ids[:real], found.pop(FEATURES)[:real])
        if not self._columns:
            self._columns = {name: column.new_empty(total, *column.shape[1:]) for name, column in found.items()}
        for name, column in found.items():
            self._columns[name][self._filled : self._filled + real] = column[:real]
        self._filled += real

    def columns(self, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the ids and the columns; a rank without samples has no columns."""
        columns = dict(self._columns)
        return columns.pop("ids", torch.empty(0, dtype=torch.int64, device=device)), columns
