"""Standard training on INCV's selected samples, alone or with the candidates: what INCV gives without Co-teaching."""

import numpy as np

from trainer.methods.method import Epochs, ExpectedSizes, Method, MethodInputs, MethodTraining
from trainer.methods.sections import INHERITS, StandardIncvConfig
from trainer.methods.standard import StandardTask


def _build(inputs: MethodInputs) -> MethodTraining:
    assert inputs.selected is not None
    assert inputs.candidates is not None
    match inputs.config.candidates:
        case "none":
            plan = inputs.plan(inputs.selected)
        case "limited":
            plan = inputs.plan(inputs.selected, inputs.candidates)
        case _:
            plan = inputs.plan(np.union1d(inputs.selected, inputs.candidates))
    dealt = 0 if inputs.config.candidates == "none" else len(inputs.candidates)
    sizes = {"selected": len(inputs.selected), "candidates": dealt}
    return MethodTraining(StandardTask(inputs.module(), inputs.settings(plan)), sizes)


def _passes(config: StandardIncvConfig, sizes: ExpectedSizes) -> list[Epochs]:
    match config.candidates:
        case "none":
            return [Epochs(config.epochs, sizes.selected)]
        case "limited":
            return [Epochs(config.epochs, sizes.selected, sizes.candidates)]
        case _:
            return [Epochs(config.epochs, sizes.selected + sizes.candidates)]


METHOD = Method(
    "standard_incv",
    "INCV + standard training",
    StandardIncvConfig,
    _build,
    inputs=lambda recipe: frozenset({"labels", "selection"}),
    passes=_passes,
    inherits=INHERITS["standard_incv"],
    supports_mixup=True,
    is_headline=True,
)
