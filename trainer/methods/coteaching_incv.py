"""Algorithm 3: Co-teaching on INCV's selected samples S, joined by the candidates C after E0 epochs."""

from trainer import theory
from trainer.config.schema import IncvConfig
from trainer.methods.built_in import CoteachingIncvConfig, warmup_epochs
from trainer.methods.coteaching import build_pair
from trainer.methods.inputs import MethodInputs, MethodTraining, NoiseFacts


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


def build(inputs: MethodInputs) -> MethodTraining:
    recipe, incv = inputs.recipe, inputs.incv
    assert recipe.incv is not None
    config = inputs.fit_config(incv.selected)
    warmup = warmup_epochs(config, recipe.incv, incv.noise.ratio)
    plan = inputs.plan(incv.selected, incv.candidates, candidates_from=warmup)
    rate = noise_of_selected(config, recipe.incv, incv.noise, inputs.classes)
    return build_pair(inputs, plan, rate, config.rank, config.ramp_epochs)
