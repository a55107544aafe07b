"""The built-in methods: recipe sections and records, without torch; the Tasks are in modules of their own."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shards.errors import ConfigError
from trainer.config.schema import IncvConfig, LabelTrainingConfig, Recipe, TrainingConfig
from trainer.config.section import Positive, Ratio
from trainer.methods.method import Epochs, ExpectedSizes, Inputs, Method


class StandardConfig(LabelTrainingConfig):
    """Standard training on all labels. `standard_incv` takes the keys that it leaves unset from here."""


STANDARD = Method(
    "standard",
    "Standard training",
    StandardConfig,
    "trainer.methods.standard:build",
    supports_mixup=True,
    role="reference",
)


class ForwardCorrectionConfig(TrainingConfig):
    """F-correction (Patrini et al. 2017): cross-entropy corrected by a transition matrix T of the labels.

    T is estimated from the network that `standard` trained, which `methods` must list too.
    """

    percentile: Annotated[float, Field(ge=50.0, le=100.0)] = 97.0
    """Row i of T is the prediction for the training sample with the largest probability of class i below this
    percentile, in percent, of that class's probabilities."""


def _check_smoothing(recipe: Recipe) -> None:
    if recipe.section("forward_correction").label_smoothing:
        raise ValueError(
            "forward_correction.label_smoothing is above 0, but the transition matrix already says how far a given "
            "label is trusted: set it to 0"
        )


FORWARD_CORRECTION = Method(
    "forward_correction",
    "F-correction",
    ForwardCorrectionConfig,
    "trainer.methods.forward_correction:build",
    inputs=("standard",),
    passes_before=1,
    validate=_check_smoothing,
)


ChooseBy = Literal["one_pass", "eval_first"]
"""Which forward a method chooses rows by: that of the training, or a separate one in eval mode before it."""


class DecouplingConfig(TrainingConfig):
    """Decoupling on all samples: two networks learn where their predictions differ."""

    compare: ChooseBy = "one_pass"
    """one_pass: compare the predictions of the training forward (authors' code); eval_first: compare in eval mode
    first, then train on the rows that differ alone."""


DECOUPLING = Method(
    "decoupling",
    "Decoupling",
    DecouplingConfig,
    "trainer.methods.decoupling:build",
    networks=2,
    epochs=lambda config, sizes: [Epochs(config.epochs, sizes.samples, ranks_first=config.compare == "eval_first")],
)


class CoteachingConfig(TrainingConfig):
    """Co-teaching on all samples. `coteaching_incv` takes the keys that it leaves unset from here."""

    rank: ChooseBy = "one_pass"
    """one_pass: rank by the losses of the training forward; eval_first: rank in eval mode first (released code)."""
    forget_rate: Literal["estimate", "true_ratio"] | Ratio = "estimate"
    """τ, the final share of dropped rows. estimate: INCV's noise estimate; true_ratio: `labels.ratio`, for synthetic
    noise only; or a number."""
    ramp_epochs: Positive = 10
    """Epochs over which the share of dropped rows ramps up to τ."""


def require_rows_fit(recipe: Recipe, section: str, candidates: int, ranks: int) -> None:
    """Raise ConfigError if batch.micro is too small for one_pass, which selects among all rows before any backward.

    candidates: maximum number of rows of C in a step; ranks: number of processes.
    """
    micro, batch = recipe.batch.micro, recipe.batch.rows
    if micro is None or recipe.section(section).rank != "one_pass":
        return
    rows = -(-batch // ranks) + -(-candidates // ranks)
    if micro < rows:
        raise ConfigError(
            f"batch.micro is {micro}, but `{section}.rank: one_pass` needs up to {rows} rows of a step on a GPU at "
            f"once: set {section}.rank to eval_first, or batch.micro to null or at least {rows}"
        )


def _coteaching_inputs(recipe: Recipe) -> Inputs:
    config = recipe.section("coteaching")
    return ("noise_estimate",) if config is not None and config.forget_rate == "estimate" else ()


def _check_true_ratio(recipe: Recipe) -> None:
    if recipe.section("coteaching").forget_rate == "true_ratio" and not recipe.labels.ratio:
        raise ValueError(
            "coteaching.forget_rate is true_ratio, the ratio of synthetic label noise, but this recipe has none "
            "(labels.ratio = 0): set it to estimate, or to a number"
        )


COTEACHING = Method(
    "coteaching",
    "Co-teaching",
    CoteachingConfig,
    "trainer.methods.coteaching:build",
    networks=2,
    inputs=_coteaching_inputs,
    epochs=lambda config, sizes: [Epochs(config.epochs, sizes.samples, ranks_first=config.rank == "eval_first")],
    validate=_check_true_ratio,
    validate_rows=lambda recipe, ranks: require_rows_fit(recipe, "coteaching", candidates=0, ranks=ranks),
)


class MentorNetConfig(TrainingConfig):
    """MentorNet PD on all samples: one network, whose rows are weighted by their loss in closed form."""

    loss_percentile: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Percentile of a step's losses, as a fraction. Its moving average over the steps is the threshold below which a
    loss counts as small. The authors use 0.75, and 0.5 if 80 % of the labels are wrong."""


def _require_whole_step(recipe: Recipe, ranks: int) -> None:
    """Raise ConfigError if batch.micro is too small: weights depend on the losses of all rows of a step."""
    micro, rows = recipe.batch.micro, -(-recipe.batch.rows // ranks)
    if micro is not None and micro < rows:
        raise ConfigError(
            f"batch.micro is {micro}, but `mentornet` weights rows by the losses of a whole step, and needs its "
            f"{rows} rows on a GPU at once: set batch.micro to null or at least {rows}, or use more GPUs"
        )


MENTORNET = Method(
    "mentornet",
    "MentorNet",
    MentorNetConfig,
    "trainer.methods.mentornet:build",
    validate_rows=_require_whole_step,
)


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


D2L = Method(
    "d2l",
    "D2L",
    D2lConfig,
    "trainer.methods.d2l:build",
    inputs=("features",),
    passes_per_epoch=lambda config, sizes: min(config.lid_rows * config.lid_batches / sizes.samples, 1.0),
)


class CoteachingIncvConfig(TrainingConfig):
    """Co-teaching on S and C. Keys that are unset here, even `epochs`, are taken from the `coteaching` section."""

    rank: ChooseBy = "one_pass"
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


_HIGH_NOISE = 0.6
_LATE_WARMUP, _EARLY_WARMUP = 0.4, 0.2  # E0 is 80 or 40 of 200 epochs (released code)


def warmup_epochs(config: CoteachingIncvConfig, incv: IncvConfig, noise: float) -> int:
    """Return E0, the number of epochs that Algorithm 3 trains on S alone. noise: ε."""
    if config.warmup_epochs != "from_noise":
        return config.warmup_epochs
    late = incv.noise_kind == "asymmetric" or noise > _HIGH_NOISE
    return round(config.epochs * (_LATE_WARMUP if late else _EARLY_WARMUP))


def _coteaching_incv_epochs(config: CoteachingIncvConfig, sizes: ExpectedSizes) -> list[Epochs]:
    assert sizes.incv is not None
    ranks_first = config.rank == "eval_first"
    warmup = min(warmup_epochs(config, sizes.incv, sizes.noise), config.epochs)
    return [
        Epochs(warmup, sizes.selected, ranks_first=ranks_first),
        Epochs(config.epochs - warmup, sizes.selected, sizes.candidates, ranks_first),
    ]


def _check_held_out(recipe: Recipe) -> None:
    incv = recipe.incv
    if (
        incv is not None
        and recipe.section("coteaching_incv").noise_of_selected == "held_out"
        and incv.agree_top_k > 1
    ):
        raise ValueError(
            "coteaching_incv.noise_of_selected is held_out, which holds for agreement with the likeliest class only: "
            "set incv.agree_top_k to 1, or coteaching_incv.noise_of_selected to formula"
        )


COTEACHING_INCV = Method(
    "coteaching_incv",
    "INCV + Co-teaching",
    CoteachingIncvConfig,
    "trainer.methods.coteaching:build_on_selection",
    networks=2,
    inputs=("selection",),
    epochs=_coteaching_incv_epochs,
    inherits="coteaching",
    validate=_check_held_out,
    # |C| is not known yet, but a step has at most half as many rows of C as of S.
    validate_rows=lambda recipe, ranks: require_rows_fit(recipe, "coteaching_incv", recipe.batch.rows // 2, ranks),
    role="headline",
)


class StandardIncvConfig(LabelTrainingConfig):
    """Standard training on INCV's selection. Keys that are unset here, even `epochs`, are taken from `standard`."""

    candidates: Literal["none", "limited", "all"] = "none"
    """Which candidates to train on beside the selected samples. none: no candidates; limited: in each step at most
    half as many as selected samples, as in Algorithm 3 after its warm-up; all: each once per epoch."""


def _standard_incv_epochs(config: StandardIncvConfig, sizes: ExpectedSizes) -> list[Epochs]:
    match config.candidates:
        case "none":
            return [Epochs(config.epochs, sizes.selected)]
        case "limited":
            return [Epochs(config.epochs, sizes.selected, sizes.candidates)]
        case _:
            return [Epochs(config.epochs, sizes.selected + sizes.candidates)]


STANDARD_INCV = Method(
    "standard_incv",
    "INCV + standard training",
    StandardIncvConfig,
    "trainer.methods.standard:build_on_selection",
    inputs=("selection",),
    epochs=_standard_incv_epochs,
    inherits="standard",
    supports_mixup=True,
    role="headline",
)
