"""Recipe sections inside a training: its optimiser, the average of its weights, and evaluation while it runs."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.section import Section


class OptimizerConfig(Section):
    """Optimiser and learning rate of a training run."""

    kind: Literal["adam", "adamw", "sgd"] = "adam"
    """Adam, AdamW, or SGD with momentum."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate after the warm-up and before the first milestone."""
    schedule: Literal["milestones", "cosine"] = "milestones"
    """milestones: constant between `milestones`; cosine: from `learning_rate` to 0 after the warm-up."""
    milestones: tuple[tuple[int, float], ...] = ()
    """[epoch, learning rate] pairs: the rate after that many epochs."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """Epochs of linear warm-up to `learning_rate`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """adam, sgd: L2 penalty, added to the gradient; adamw: decoupled decay, applied to the weights directly."""
    decay_scope: Literal["all", "weights", "residual_convs"] = "all"
    """Which parameters decay. weights: not biases, normalisation layers and what the network itself exempts;
    residual_convs: only the convolutions of residual blocks (released code)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD only."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Maximum gradient norm, clipped per network; null: no clipping."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "OptimizerConfig":
        epochs = [epoch for epoch, _ in self.milestones]
        if epochs != sorted(set(epochs)) or any(epoch < 0 or rate <= 0 for epoch, rate in self.milestones):
            raise ValueError(
                "optimizer.milestones must be [epoch, learning rate] pairs with increasing epochs and rates above 0"
            )
        if self.schedule == "cosine" and self.milestones:
            raise ValueError(
                "optimizer.milestones have no effect with `optimizer.schedule: cosine`: remove them, or set "
                "optimizer.schedule to milestones"
            )
        return self


class EmaConfig(Section):
    """An exponential moving average of the weights, which predictions, evaluation and export use."""

    decay: Annotated[float, Field(gt=0, lt=1)]
    """Share of the average that each step keeps; in the first steps less, min(decay, (1 + step) / (10 + step))."""
    use_buffers: bool = False
    """Also average BatchNorm's running mean and variance; false: use the last ones.

    While the learning rate is high, the last ones do not fit the averaged weights, and evaluation after such an epoch
    is too low.
    """


class EvaluationConfig(Section):
    """Evaluation of the methods while they train; the `evaluate` stage at the end does not depend on it."""

    every: Annotated[int, Field(ge=0)] = 0
    """Epochs between two evaluations on all evaluation sets, which metrics.jsonl records; 0: none."""
    training_labels: bool = False
    """Also measure the accuracy on the training images, against their given labels and, if known, the true ones.

    In metrics.jsonl: accuracy.train_given and accuracy.train_true. Costs a predict pass over the training set.
    """
    choose_on: str | None = None
    """Name of an evaluation set: in each training run, use the epoch with the highest top-1 accuracy on this set.

    The report marks the set as used for choosing. null: use the last epoch.
    """
    patience: Annotated[int, Field(ge=0)] = 0
    """End a training run after this many evaluations without a higher accuracy on `choose_on`; 0: never."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "EvaluationConfig":
        if self.choose_on is not None and not self.every:
            raise ValueError(
                "evaluation.choose_on needs evaluations to choose from: set evaluation.every to 1 or more"
            )
        if self.training_labels and not self.every:
            raise ValueError("evaluation.training_labels needs evaluations: set evaluation.every to 1 or more")
        if self.patience and self.choose_on is None:
            raise ValueError(
                "evaluation.patience needs an evaluation set that decides: set evaluation.choose_on, or patience to 0"
            )
        return self
