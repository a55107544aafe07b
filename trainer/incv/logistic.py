"""Multinomial logistic regression on features: convex, fitted by L-BFGS on a CPU, a GPU, or over all ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer.distributed.world import World

PENALTIES = tuple(10.0**-exponent for exponent in (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0))
"""From strong to weak. A weak penalty fits the wrong labels too."""
_PATIENCE = 2
"""Penalties without a better agreement after which weaker ones are not tried."""
_ITERATIONS = 40
_CONVERGED = 2e-2
"""Largest entry of the gradient, times the classes, at which a fit counts as converged: at the start, an entry is of
the order of a class's share of the rows."""
_CHUNK_NUMBERS = 2**25
"""Numbers of a chunk's logits: bounds the memory."""


@dataclass(frozen=True, eq=False)
class Classifier:
    """A fitted classifier: logits = features @ weight + bias."""

    weight: torch.Tensor
    """float32 [features, classes]"""
    bias: torch.Tensor
    """float32 [classes]"""
    gradient: float
    """Largest entry of the gradient at the end of the fit, times the classes."""

    @property
    def converged(self) -> bool:
        return self.gradient <= _CONVERGED

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, features.float(), self.weight)


@dataclass(frozen=True, eq=False)
class Fit:
    """What a classifier learns from: this rank's rows of the features."""

    features: torch.Tensor
    """float [rows, features]; centred and scaled, see `scale_rows`."""
    labels: torch.Tensor
    """int64 [rows]"""
    classes: int
    world: World

    def chunks(self) -> Iterator[slice]:
        step = max(1, _CHUNK_NUMBERS // max(self.classes, self.features.shape[1]))
        for first in range(0, len(self.labels), step):
            yield slice(first, min(first + step, len(self.labels)))

    def train(self, weights: torch.Tensor, penalty: float, start: Classifier | None = None) -> Classifier:
        """Minimise the mean cross-entropy plus penalty / 2 times the squared weights (not the bias); a collective.

        Args:
            weights: float [rows], what each row counts: 0 leaves it out.
            start: a classifier to begin with, such as that of the next stronger penalty.
        """
        width = self.features.shape[1]
        device = self.features.device
        flat = torch.zeros(width + 1, self.classes, device=device)
        if start is not None:
            flat = torch.cat([start.weight, start.bias[None]])
        flat.requires_grad_()
        total = float(self.world.all_reduce(weights.sum().double()[None])[0])
        optimizer = torch.optim.LBFGS(
            [flat],
            max_iter=_ITERATIONS,
            history_size=10,
            line_search_fn="strong_wolfe",
            tolerance_grad=_CONVERGED / (10 * self.classes),
            tolerance_change=1e-9,
        )

        def measure() -> torch.Tensor:
            with torch.no_grad():
                loss, gradient = self._sum(flat[:width], flat[width], weights)
                both = self.world.all_reduce(torch.cat([gradient.flatten(), loss[None].float()])) / max(total, 1.0)
                gradient = both[:-1].view_as(flat).clone()
                gradient[:width] += penalty * flat[:width]
                flat.grad = gradient
                return both[-1] + 0.5 * penalty * flat[:width].square().sum()

        optimizer.step(measure)
        measure()
        found = flat.detach()
        assert flat.grad is not None
        return Classifier(found[:width].clone(), found[width].clone(), float(flat.grad.abs().max()) * self.classes)

    def _sum(
        self, weight: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses, and its gradient by (weight, bias): [features + 1, classes]."""
        loss = torch.zeros((), dtype=torch.float64, device=weight.device)
        gradient = torch.zeros(len(weight) + 1, self.classes, device=weight.device)
        for rows in self.chunks():
            features, labels = self.features[rows].float(), self.labels[rows]
            log_p = torch.addmm(bias, features, weight).log_softmax(dim=1)
            loss -= (log_p.gather(1, labels[:, None])[:, 0] * counts[rows]).sum()
            error = log_p.exp_()
            error[torch.arange(len(labels), device=labels.device), labels] -= 1.0
            error *= counts[rows, None]
            gradient[:-1].addmm_(features.T, error)
            gradient[-1] += error.sum(dim=0)
        return loss, gradient

    def cross_validate(self, folds: torch.Tensor, counts: torch.Tensor, number: int) -> "Validated":
        """Fit each fold's classifier for growing freedom, and return those that agree best with held-out labels.

        No true label is needed: random wrong labels lower the agreement of all penalties alike.

        Args:
            folds: int64 [rows], the fold that holds each row out.
            counts: float [rows], what each row counts in training; its agreement counts as much.
            number: of folds.
        """
        best: Validated | None = None
        classifiers: list[Classifier | None] = [None] * number
        worse = 0
        for penalty in PENALTIES:
            agreed = torch.zeros(2, dtype=torch.float64, device=counts.device)
            for fold in range(number):
                found = self.train(counts * (folds != fold), penalty, classifiers[fold])
                classifiers[fold] = found
                agreed += self._agreement(found, counts * (folds == fold))
            right, total = self.world.all_reduce(agreed).tolist()
            agreement = right / max(total, 1.0)
            if best is None or agreement > best.agreement:
                best = Validated(penalty, agreement, tuple(one for one in classifiers if one is not None))
                worse = 0
            elif (worse := worse + 1) == _PATIENCE:
                break
        assert best is not None
        return best

    def _agreement(self, classifier: Classifier, counts: torch.Tensor) -> torch.Tensor:
        """Return how much of `counts` the predictions agree with, and their sum: [2]."""
        agreed = torch.zeros(2, dtype=torch.float64, device=counts.device)
        for rows in self.chunks():
            right = classifier.logits(self.features[rows]).argmax(dim=1) == self.labels[rows]
            agreed += torch.stack([(right * counts[rows]).sum(), counts[rows].sum()])
        return agreed


@dataclass(frozen=True, eq=False)
class Validated:
    """The classifiers of all folds with the penalty that agrees best with the held-out labels."""

    penalty: float
    agreement: float
    classifiers: Sequence[Classifier]

    def held_out_logits(self, features: torch.Tensor, folds: torch.Tensor) -> torch.Tensor:
        """Return the logits of each row from the classifier that was not trained on it: [rows, classes]."""
        logits = features.new_empty(len(features), self.classifiers[0].bias.shape[0], dtype=torch.float32)
        for fold, classifier in enumerate(self.classifiers):
            mine = folds == fold
            logits[mine] = classifier.logits(features[mine])
        return logits


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the factor of the logits that makes the given labels likeliest: below 1 for overconfident ones.

    Args:
        logits: float [rows, classes], held out.
        labels: the given ones, int64 [rows].
    """
    log_factor = torch.zeros((), dtype=torch.float64, device=logits.device)
    wide = logits.double()
    given = wide.gather(1, labels[:, None])[:, 0]
    for _ in range(20):  # Newton's method; the loss is convex in the factor
        factor = log_factor.exp()
        p = (wide * factor).softmax(dim=1)
        mean = (p * wide).sum(dim=1)
        slope = (mean - given).mean()
        curvature = ((p * wide.square()).sum(dim=1) - mean.square()).mean()
        step = -(slope / (curvature * factor).clamp_min(1e-12)).clamp(-1.0, 1.0)
        log_factor = (log_factor + step).clamp(-5.0, 5.0)
    return float(log_factor.exp())


def scale_rows(features: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Centre the features and scale each row to length 1: of the type of `features`, [rows, features]."""
    rows = features.float() - mean
    return rows.div_(torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-12)).to(features.dtype)
