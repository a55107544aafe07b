"""Algorithm 3: Co-teaching on INCV's selected samples S, joined by the candidates C after E0 epochs."""

from trainer import theory
from trainer.config.schema import IncvConfig, Recipe
from trainer.methods.coteaching import build_pair, require_rows_fit
from trainer.methods.method import Epochs, ExpectedSizes, Method, MethodInputs, MethodTraining, NoiseFacts
from trainer.methods.sections import INHERITS, CoteachingIncvConfig

_HIGH_NOISE = 0.6
_LATE_WARMUP, _EARLY_WARMUP = 0.4, 0.2  # E0 is 80 or 40 of 200 epochs (released code)


def warmup_epochs(config: CoteachingIncvConfig, incv: IncvConfig, noise: float) -> int:
    """Return E0, the number of epochs that Algorithm 3 trains on S alone. noise: ε."""
    if config.warmup_epochs != "from_noise":
        return config.warmup_epochs
    late = incv.noise_kind == "asymmetric" or noise > _HIGH_NOISE
    return round(config.epochs * (_LATE_WARMUP if late else _EARLY_WARMUP))


def noise_of_selected(config: CoteachingIncvConfig, incv: IncvConfig, noise: NoiseFacts, classes: int) -> float:
    """Return ε_S, the estimated share of wrong labels in S; it sets n(e), the rows kept in epoch e."""
    rule = config.noise_of_selected
    if rule == "confident":
        return noise.selected_confident
    if rule == "held_out":
        return noise.selected_held_out
    if not isinstance(rule, str):
        return rule
    kind = incv.noise_kind if rule == "formula" else "symmetric" if rule == "formula_symmetric" else "asymmetric"
    return float(theory.noise_of_selected(noise.ratio, classes, kind))


def _build(inputs: MethodInputs) -> MethodTraining:
    incv, noise = inputs.recipe.incv, inputs.noise
    assert incv is not None
    assert noise is not None
    assert inputs.selected is not None
    config = inputs.fit_config(inputs.selected)
    warmup = warmup_epochs(config, incv, noise.ratio)
    plan = inputs.plan(inputs.selected, inputs.candidates, candidates_from=warmup)
    rate = noise_of_selected(config, incv, noise, inputs.classes)
    return build_pair(inputs, plan, rate, config.rank, config.ramp_epochs)


def _passes(config: CoteachingIncvConfig, sizes: ExpectedSizes) -> list[Epochs]:
    assert sizes.incv is not None
    ranks_first = config.rank == "eval_first"
    warmup = min(warmup_epochs(config, sizes.incv, sizes.noise), config.epochs)
    return [
        Epochs(warmup, sizes.selected, ranks_first=ranks_first),
        Epochs(config.epochs - warmup, sizes.selected, sizes.candidates, ranks_first),
    ]


def _validate(recipe: Recipe) -> None:
    incv = recipe.incv
    if incv is not None and METHOD.config(recipe).noise_of_selected == "held_out" and incv.agree_top_k > 1:
        raise ValueError(
            f"{METHOD.name}.noise_of_selected is held_out, which holds for agreement with the likeliest class alone: "
            f"set incv.agree_top_k to 1, or {METHOD.name}.noise_of_selected to formula"
        )


def _validate_rows(recipe: Recipe, ranks: int) -> None:
    # |C| is not known yet, but a step has at most half as many rows of C as of S.
    require_rows_fit(recipe, METHOD.name, METHOD.config(recipe).rank, recipe.batch.rows // 2, ranks)


METHOD = Method(
    "coteaching_incv",
    "INCV + Co-teaching",
    CoteachingIncvConfig,
    _build,
    networks=2,
    inputs=lambda recipe: frozenset({"labels", "selection"}),
    passes=_passes,
    inherits=INHERITS["coteaching_incv"],
    validate=_validate,
    validate_rows=_validate_rows,
    is_headline=True,
)
