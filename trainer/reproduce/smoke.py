"""`incv reproduce --smoke`: the same runs with a tiny network, few images and three epochs, on a CPU."""

from trainer.reproduce.planning import PlannedRun

_OVERRIDES = (
    "precision=fp32",
    "data.train.limit=40",
    "image.size=8",
    "image.resize=8",
    "image.pad=0",
    "model={name: digits_cnn}",
    "batch={global: 8}",
    "execution={device: cpu, threads: 1, log_every: 2, checkpoint_every: 3}",
)
_OPTIMIZER = ("learning_rate=0.01", "decay_scope=all")  # there are no residual blocks


def smoke_overrides(run: PlannedRun) -> tuple[str, ...]:
    """Return the overrides that make a planned run a matter of a second.

    What experiments vary, such as Cutout and the schedule, stays.
    """
    has_cutout = run.recipe.endswith("_plus") and "image.cutout=0" not in run.overrides
    epochs = dict.fromkeys(() if run.stage == "incv" else (*run.also, run.stage), 3)
    if "incv=null" not in run.overrides:
        epochs["incv"] = 1
    trains = [f"{name}.epochs={count}" for name, count in epochs.items()]
    trains += [f"{name}.optimizer.{text}" for name in epochs for text in _OPTIMIZER]
    image = ("image.cutout=4",) if has_cutout else ()
    limit = f"data.eval.{run.evaluation_set}.limit=20"
    return (*_OVERRIDES, limit, *image, *trains, *(("incv.min_per_class=1",) if "incv" in epochs else ()))
