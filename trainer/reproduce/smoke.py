"""`incv reproduce --smoke`: the same runs with a tiny network, few images and three epochs, on a CPU."""

from trainer.reproduce.experiments import PlannedRun

_OVERRIDES = (
    "precision=fp32",
    "data.train.limit=40",
    "data.eval.test.limit=20",
    "image={size: 8, resize: 8, flip: true}",
    "model={name: digits_cnn}",
    "batch={global: 8}",
    "execution={device: cpu, threads: 1, log_every: 2, checkpoint_every: 3}",
)
_OPTIMIZER = "{kind: adam, learning_rate: 0.01, milestones: [], decay_scope: all}"  # no residual blocks, few epochs
_INCV = ("incv.epochs=1", "incv.min_per_class=1", f"incv.optimizer={_OPTIMIZER}")


def smoke_overrides(run: PlannedRun) -> tuple[str, ...]:
    """Return the overrides that make a planned run a matter of a second."""
    methods = () if run.stage == "incv" else (*run.also, run.stage)
    trains = [text for name in methods for text in (f"{name}.epochs=3", f"{name}.optimizer={_OPTIMIZER}")]
    return (*_OVERRIDES, *trains, *(() if "incv=null" in run.overrides else _INCV))
