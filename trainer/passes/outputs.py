"""What a pass computes for each sample from the networks' logits and features: the columns of its table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from trainer.passes import Status


@dataclass(frozen=True)
class NetworkRows:
    """What one network gave for the rows of a batch, on the device."""

    logits: torch.Tensor
    """float32 [rows, classes]"""
    features: torch.Tensor | None
    """float32 [rows, features]; None if no output reads them."""
    given: torch.Tensor | None
    """The label of each row, int64 [rows]; None in a pass without labels."""
    top_k: int

    @property
    def labels(self) -> torch.Tensor:
        if self.given is None:
            raise ValueError("this output compares with labels: give `labels` to the pass")
        return self.given

    @cached_property
    def log_probabilities(self) -> torch.Tensor:
        return torch.log_softmax(self.logits, dim=1)

    @cached_property
    def given_log_probability(self) -> torch.Tensor:
        return self.log_probabilities.gather(1, self.labels[:, None])[:, 0]

    @cached_property
    def likeliest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest log-probabilities and their classes: [rows, 2], or more columns if top_k is more."""
        classes = self.log_probabilities.shape[1]
        values, indices = self.log_probabilities.topk(min(max(self.top_k, 2), classes), dim=1)
        return values, indices

    @cached_property
    def is_finite(self) -> torch.Tensor:
        finite = torch.isfinite(self.log_probabilities).all(dim=1)
        return finite if self.features is None else finite & torch.isfinite(self.features).all(dim=1)


@dataclass(frozen=True)
class Output:
    """A column of a table, computed from the rows of one network at a time, or of all together."""

    name: str
    of_network: Callable[[NetworkRows], torch.Tensor] | None = None
    """Returns the column of one network: [rows, ...]. Rows that do not count become NaN, -1 or False."""
    of_all: Callable[[Sequence[NetworkRows], torch.Tensor], torch.Tensor] | None = None
    """Called with the rows of all networks and whether each image is readable; its result is kept as it is."""


def _features(rows: NetworkRows) -> torch.Tensor:
    assert rows.features is not None
    return rows.features


def _runner_up(rows: NetworkRows, values_or_classes: int) -> torch.Tensor:
    found = rows.likeliest[values_or_classes]
    return found[:, min(1, found.shape[1] - 1)]


def _agreement(rows: NetworkRows) -> torch.Tensor:
    return (rows.likeliest[1][:, : rows.top_k] == rows.labels[:, None]).any(dim=1)


def _given_rank(rows: NetworkRows) -> torch.Tensor:
    return (rows.log_probabilities > rows.given_log_probability[:, None]).sum(dim=1).int()


FEATURES = "features"
OUTPUTS = {
    "logits": Output("logits", lambda rows: rows.logits),
    "probabilities": Output("probabilities", lambda rows: rows.logits.softmax(dim=1)),
    FEATURES: Output(FEATURES, _features),
    "predicted": Output("predicted", lambda rows: rows.likeliest[1][:, 0].int()),
    "predicted_probability": Output("predicted_probability", lambda rows: rows.likeliest[0][:, 0].exp()),
    "second": Output("second", lambda rows: _runner_up(rows, 1).int()),
    "second_probability": Output("second_probability", lambda rows: _runner_up(rows, 0).exp()),
    "losses": Output("losses", lambda rows: -rows.given_log_probability),
    "agreement": Output("agreement", _agreement),
    "given_probability": Output("given_probability", lambda rows: rows.given_log_probability.exp()),
    "given_rank": Output("given_rank", _given_rank),
}
"""The columns that a pass can be asked for by name. The first seven need no labels; the others compare with the given
label: cross-entropy, whether it is among the top k classes, its probability, and the number of likelier classes."""


def compute_columns(
    rows: Sequence[NetworkRows], readable: torch.Tensor, outputs: Sequence[Output], single: bool
) -> dict[str, torch.Tensor]:
    """Compute the columns of a batch, with no host-device sync.

    Args:
        rows: of each network.
        readable: bool [rows], whether each image could be decoded.
        single: whether a column is that of the only network, [rows, ...], and not [rows, networks, ...].
    """
    finite = torch.stack([one.is_finite for one in rows]).all(dim=0)
    status = torch.where(finite, int(Status.OK), int(Status.NON_FINITE))
    columns = {"status": torch.where(readable, status, int(Status.UNREADABLE)).to(torch.int8)}
    for output in outputs:
        if output.of_network is None:
            assert output.of_all is not None
            columns[output.name] = output.of_all(rows, readable)
            continue
        each = [_blank(output.of_network(one), readable & one.is_finite) for one in rows]
        columns[output.name] = each[0] if single else torch.stack(each, dim=1)
    return columns


def _blank(column: torch.Tensor, usable: torch.Tensor) -> torch.Tensor:
    """Replace the numbers of rows that do not count: by NaN, -1 or False."""
    nothing = torch.nan if column.is_floating_point() else False if column.dtype == torch.bool else -1
    return torch.where(usable.reshape(-1, *[1] * (column.dim() - 1)), column, nothing)
