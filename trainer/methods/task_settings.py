"""The settings of a training job, from a recipe: its section, its plan, and where and how it computes."""

import torch

from trainer.acceleration.policy import choose_acceleration
from trainer.config.schema import Recipe, TrainingConfig
from trainer.distributed.world import World
from trainer.loading.epoch_plan import Schedule, StaticPlan
from trainer.methods.task import TaskSettings


def build_task_settings(
    recipe: Recipe,
    section: TrainingConfig,
    plan: StaticPlan | Schedule,
    targets: torch.Tensor,
    world: World,
    allow_accelerate: bool = False,
    steps: int | None = None,
) -> TaskSettings:
    """Build the settings of a training job in `world`, from the recipe and a section of it.

    Args:
        plan: What all epochs train on, or the schedule of a Task that plans each epoch itself.
        targets: As in TaskSettings.
        steps: Steps for which compilation and CUDA graphs must pay off; None: those of the plan.
    """
    schedule, planner = (plan.schedule, plan.plan_epoch) if isinstance(plan, StaticPlan) else (plan, None)
    acceleration = choose_acceleration(recipe, steps or schedule.total_steps, world, allow_accelerate)
    return TaskSettings(
        section.optimizer,
        schedule,
        targets,
        world,
        planner,
        recipe.precision,
        recipe.batch.micro,
        exact=world.device.type == "cpu" or recipe.execution.deterministic,
        allow_accelerate=allow_accelerate,
        sync_batchnorm=recipe.model.sync_batchnorm,
        graphs=acceleration.graphs,
        require_graphs=recipe.execution.graphs is True,
        compile=acceleration.compile,
        label_smoothing=section.label_smoothing,
        ema_decay=section.ema.decay if section.ema is not None else None,
        ema_buffers=section.ema is not None and section.ema.use_buffers,
    )
