"""Standard training on INCV's selected samples, alone or with the candidates: what INCV gives without Co-teaching."""

import numpy as np

from trainer.methods.inputs import MethodInputs, MethodTraining
from trainer.methods.losses import build_row_losses
from trainer.methods.standard import StandardTask


def build(inputs: MethodInputs) -> MethodTraining:
    selected, candidates = inputs.incv.selected, inputs.incv.candidates
    match inputs.config.candidates:
        case "none":
            plan = inputs.plan(selected)
        case "limited":
            plan = inputs.plan(selected, candidates)
        case _:
            plan = inputs.plan(np.union1d(selected, candidates))
    dealt = 0 if inputs.config.candidates == "none" else len(candidates)
    sizes = {"selected": len(selected), "candidates": dealt}
    task = StandardTask(inputs.module(), inputs.settings(plan), build_row_losses(inputs.config))
    return MethodTraining(task, sizes)
