"""`incv reproduce --smoke`: the same runs with a tiny network, few images and three epochs, on a CPU."""

from trainer.reproduce.experiments import PlannedRun

_OVERRIDES = (
    "precision=fp32",
    "data.train.limit=40",
    "model={name: digits_cnn}",
    "batch={global: 8}",
    "execution={device: cpu, threads: 1, log_every: 2, checkpoint_every: 3}",
)
_OPTIMIZER = "{kind: adam, learning_rate: 0.01, milestones: [], decay_scope: all}"  # no residual blocks, few epochs
_IMAGE = "image={size: 8, resize: 8, flip: true}"
_IMAGE_OF_PLUS = ("image.size=8", "image.resize=8", "image.pad=0")


def smoke_overrides(run: PlannedRun) -> tuple[str, ...]:
    """Return the overrides that make a planned run a matter of a second.

    What the recipes `*_plus` add, such as Cutout and a schedule, stays, since experiments vary it.
    """
    is_plus = run.recipe.endswith("_plus")
    has_cutout = is_plus and "image.cutout=0" not in run.overrides
    image = (*_IMAGE_OF_PLUS, *(("image.cutout=4",) if has_cutout else ())) if is_plus else (_IMAGE,)
    epochs = dict.fromkeys(() if run.stage == "incv" else (*run.also, run.stage), 3)
    if "incv=null" not in run.overrides:
        epochs["incv"] = 1
    trains = [f"{name}.epochs={count}" for name, count in epochs.items()]
    trains += [text for name in epochs for text in _optimizer(name, is_plus)]
    limit = f"data.eval.{run.evaluation_set}.limit=20"
    return (*_OVERRIDES, limit, *image, *trains, *(("incv.min_per_class=1",) if "incv" in epochs else ()))


def _optimizer(section: str, is_plus: bool) -> tuple[str, ...]:
    if not is_plus:
        return (f"{section}.optimizer={_OPTIMIZER}",)
    return tuple(f"{section}.optimizer.{text}" for text in ("learning_rate=0.01", "decay_scope=all"))
