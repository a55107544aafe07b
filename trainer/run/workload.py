"""The training that follows each stage of a run, to estimate the time left; pure functions."""

from trainer.config.schema import Recipe
from trainer.methods.registry import methods_of


def work_after_stages(recipe: Recipe, samples: int, only: str | None = None) -> dict[str, float]:
    """Return, by stage, the image passes through a network of all trainings in later stages.

    samples: in the training set; a method that trains on a selection has fewer. only: the one stage that is run.
    """
    if only is not None:
        return {}
    work = {
        method.name: float(samples * method.config(recipe).epochs * method.networks) for method in methods_of(recipe)
    }
    stages = ["incv", *work]
    return {stage: sum(work.get(later, 0.0) for later in stages[place + 1 :]) for place, stage in enumerate(stages)}
