"""Recipe sections of the built-in methods, apart from their code: a recipe is read without importing torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.schema import LabelTrainingConfig, Positive, Ratio, TrainingConfig


class StandardConfig(LabelTrainingConfig):
    """Standard training on all labels, with the cross-entropy unless `gce` is set.

    `standard_incv` takes the keys that it leaves unset from here.
    """


class ForwardCorrectionConfig(TrainingConfig):
    """F-correction (Patrini et al. 2017): cross-entropy corrected by a transition matrix T of the labels.

    T is estimated from the network that `standard` trained, which `methods` must list too.
    """

    percentile: Annotated[float, Field(ge=50.0, le=100.0)] = 97.0
    """Row i of T is the prediction for the training sample with the largest probability of class i below this
    percentile, in percent, of that class's probabilities."""


Compare = Literal["one_pass", "eval_first"]
"""Which predictions Decoupling compares.

one_pass: those of the training forward (authors' code). eval_first: those of a separate forward in eval mode.
"""


class DecouplingConfig(TrainingConfig):
    """Decoupling on all samples: two networks learn where their predictions differ."""

    compare: Compare = "one_pass"
    """one_pass: compare the predictions of the training forward (authors' code); eval_first: compare in eval mode
    first, then train on the rows that differ alone."""


Rank = Literal["one_pass", "eval_first"]
"""Which losses the small-loss selection uses.

one_pass: losses of the training forward. eval_first (released code): losses of a separate forward in eval mode.
"""


class CoteachingConfig(TrainingConfig):
    """Co-teaching on all samples. `coteaching_incv` takes the keys that it leaves unset from here.

    Its own keys `noise_of_selected` and `warmup_epochs` may be set here too.
    """

    rank: Rank = "one_pass"
    """one_pass: rank by the losses of the training forward; eval_first: rank in eval mode first (released code)."""
    forget_rate: Literal["estimate", "true_ratio"] | Ratio = "estimate"
    """τ, the final share of dropped rows. estimate: INCV's noise estimate; true_ratio: `labels.ratio`, for synthetic
    noise only; or a number."""
    ramp_epochs: Positive = 10
    """Epochs over which the share of dropped rows ramps up to τ."""


class MentorNetConfig(TrainingConfig):
    """MentorNet PD on all samples: one network, whose rows are weighted by their loss in closed form."""

    loss_percentile: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Percentile of a step's losses, as a fraction. Its moving average over the steps is the threshold below which a
    loss counts as small. The authors use 0.75, and 0.5 if 80 % of the labels are wrong."""


class D2lConfig(TrainingConfig):
    """D2L (Ma et al. 2018): trusts the given labels less once the dimensionality of the features (LID) rises."""

    initial_epochs: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Epochs before LIDs are compared; auto: a third of all epochs (the authors' 40 of 120)."""
    window: Annotated[int, Field(ge=2)] = 5
    """Number of preceding epochs with which an epoch's LID is compared.

    The turning point is the first epoch whose LID exceeds their mean by more than 2 standard deviations. Training
    then returns to the weights of the epoch before, and from there on mixes its predictions into the labels.
    """
    neighbours: Annotated[int, Field(ge=2)] = 20
    """Number of nearest neighbours from which a sample's LID is estimated."""
    lid_rows: Annotated[int, Field(ge=3)] = 128
    """Samples per batch; the neighbours of a sample are searched within its batch."""
    lid_batches: Positive = 10
    """Number of batches over which the LID is averaged after every epoch."""

    @model_validator(mode="after")
    def _check_neighbours(self) -> "D2lConfig":
        if self.neighbours >= self.lid_rows:
            raise ValueError(
                f"neighbours = {self.neighbours} are searched among the other {self.lid_rows - 1} rows of a batch: "
                "lower neighbours, or raise lid_rows"
            )
        return self


class CoteachingIncvConfig(TrainingConfig):
    """Co-teaching on S and C. Keys that are unset here, even `epochs`, are taken from the `coteaching` section."""

    rank: Rank = "one_pass"
    """one_pass: rank by the losses of the training forward; eval_first: rank in eval mode first (released code)."""
    noise_of_selected: (
        Literal["formula", "formula_symmetric", "formula_asymmetric", "confident", "held_out"] | Ratio
    ) = "formula_symmetric"
    """ε_S, the share of the rows of S that is dropped once the ramp has ended.

    formula: the paper's formula for the kind of noise in `incv.noise_kind`; formula_symmetric, formula_asymmetric:
    that for this kind; confident: Prop. 2 with the estimated T; held_out: Prop. 2 with the confusion matrix of the
    held-out predictions, at most that of a network that memorises; or a number.
    """
    warmup_epochs: Literal["from_noise"] | Annotated[int, Field(ge=0)] = "from_noise"
    """E0: number of epochs on S alone. from_noise: 40 % of the epochs if the noise is asymmetric or ε > 0.6, else
    20 %."""
    ramp_epochs: Positive = 10
    """Epochs over which the share of dropped rows ramps up to ε_S."""


class StandardIncvConfig(LabelTrainingConfig):
    """Standard training on INCV's selection. Keys that are unset here, even `epochs`, are taken from `standard`."""

    candidates: Literal["none", "limited", "all"] = "none"
    """Which candidates to train on beside the selected samples. none: no candidates; limited: in each step at most
    half as many as selected samples, as in Algorithm 3 after its warm-up; all: each once per epoch."""


SECTIONS: dict[str, type[TrainingConfig]] = {
    "standard": StandardConfig,
    "forward_correction": ForwardCorrectionConfig,
    "decoupling": DecouplingConfig,
    "coteaching": CoteachingConfig,
    "mentornet": MentorNetConfig,
    "d2l": D2lConfig,
    "coteaching_incv": CoteachingIncvConfig,
    "standard_incv": StandardIncvConfig,
}
"""By the name of the method. A method that is missing here has its section in its own file, which imports torch."""

INHERITS = {"coteaching_incv": "coteaching", "standard_incv": "standard"}
"""The section from which a method's section takes the values of its unset keys, by the name of the method."""

OWN_KEYS_ALSO_THERE = frozenset({"coteaching_incv"})
"""Methods whose own keys may be set in the section that they inherit from too, as older recipes do."""
