"""The settings of a training job, from a recipe: its section, its plan, and where and how it computes."""

from trainer.acceleration.policy import choose_acceleration
from trainer.config.schema import LabelTrainingConfig, Recipe, TrainingConfig
from trainer.distributed.world import World
from trainer.loading.sample_order import TrainingPlan
from trainer.methods.task import TaskSettings


def build_task_settings(
    recipe: Recipe,
    section: TrainingConfig,
    plan: TrainingPlan,
    world: World,
    allow_accelerate: bool = False,
    steps: int | None = None,
) -> TaskSettings:
    """Build the settings of a training job that follows `plan` in `world`, from the recipe and a section of it.

    steps: for which compilation and CUDA graphs must pay off; None: those of the plan.
    """
    acceleration = choose_acceleration(recipe, steps or plan.total_steps, world, allow_accelerate)
    return TaskSettings(
        section.optimizer,
        plan.steps_per_epoch,
        world,
        recipe.precision,
        recipe.batch.micro,
        exact=world.device.type == "cpu" or recipe.execution.deterministic,
        allow_accelerate=allow_accelerate,
        sync_batchnorm=recipe.model.sync_batchnorm,
        graphs=acceleration.graphs,
        require_graphs=recipe.execution.graphs is True,
        compile=acceleration.compile,
        total_steps=plan.total_steps,
        label_smoothing=section.label_smoothing,
        gce_q=section.gce.q if isinstance(section, LabelTrainingConfig) and section.gce is not None else None,
        ema_decay=section.ema.decay if section.ema is not None else None,
        ema_buffers=section.ema is not None and section.ema.use_buffers,
    )
