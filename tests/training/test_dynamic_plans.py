"""A Task that plans each epoch after the one before: what it finds between epochs survives every interruption."""

import numpy as np
import pytest
import torch

from shards.errors import DataError
from tests.training import test_loop
from tests.training.test_loop import Killed, ended, run
from trainer.distributed.stop import Stopped
from trainer.loading.epoch_plan import EpochPlan, Part
from trainer.loading.sample_order import epoch_order
from trainer.training.checkpoint import TrainState, find_newest_checkpoint

STEPS, EPOCHS = 5, 5


class Interrupts:
    """Raises an error at one point of a training, once."""

    def __init__(self, point=None, error=None):
        self.point, self.error, self.seen = point, error, []

    def __call__(self, *point):
        if point == self.point:
            self.point = None
            raise self.error
        self.seen.append(point)


class PlanningTask(test_loop.ToyTask):
    """Trains in each epoch on those samples that what it has seen so far chooses."""

    plans_ahead = False

    def __init__(self, at=None, wrong=lambda plan: plan):
        super().__init__(lambda step: self.at("step", step.step))
        self.at = at or Interrupts()
        self.table, self.found = torch.zeros(30, dtype=torch.float64), 0.0
        self._wrong = wrong

    def prepare_epoch(self, epoch):
        self.at("prepare", epoch)  # a pass, which a stop may interrupt
        self.table += torch.sin(self.value * torch.arange(1, 31)) + epoch

    def plan_epoch(self, epoch):
        chosen = np.argsort(self.table.numpy(), kind="stable")[:20]
        order = np.resize(epoch_order(self.schedule.stream, epoch, chosen), STEPS * 7)
        return self._wrong(EpochPlan(epoch, (Part(order, 7),)))

    def after_epoch(self, epoch):
        def measure():
            self.at("measure", epoch)
            self.found += float(self.value)
            self.epoch_metrics = {"found": self.found}

        return [*super().after_epoch(epoch), measure]

    def state(self):
        state = super().state()
        state.tensors["table"] = self.table
        return TrainState(state.tensors, state.values | {"found": self.found})

    def load(self, state):
        super().load(state)
        self.table, self.found = state.tensors["table"].clone(), state.values["found"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder, task = tmp_path_factory.mktemp("calm"), PlanningTask()
    run(folder, task)
    return ended(folder), task


def test_an_epoch_is_prepared_and_planned_after_the_one_before(calm):
    expected = [("prepare", 0)]
    for epoch in range(EPOCHS):
        expected += [("step", step) for step in range(epoch * STEPS, (epoch + 1) * STEPS)]
        expected += [("measure", epoch), ("prepare", epoch + 1)] if epoch < EPOCHS - 1 else [("measure", epoch)]
    assert calm[1].at.seen == expected
    plans = [set(calm[1].plan_epoch(epoch).parts[0].ids.tolist()) for epoch in range(2)]
    assert len(plans[0]) == 20


@pytest.mark.parametrize("error", [Stopped("a pass", 3, "SIGTERM"), Killed()])
@pytest.mark.parametrize("point", [("prepare", 0), ("prepare", 2), ("measure", 1), ("measure", 4), ("step", 12)])
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(point, error, calm, tmp_path):
    first, second = PlanningTask(Interrupts(point, error)), PlanningTask()
    with pytest.raises(type(error)):
        run(tmp_path, first)
    run(tmp_path, second)
    assert ended(tmp_path) == calm[0]
    if isinstance(error, Stopped) and point[0] != "step":
        # What was done before the stop is not done again, and what it interrupted comes first.
        assert second.at.seen[0] == point
        assert first.at.seen + second.at.seen == calm[1].at.seen


class MeasuringTask(PlanningTask):
    """Measures something before the first step, too."""

    def prepare_epoch(self, epoch):
        super().prepare_epoch(epoch)
        self.epoch_metrics = {"total": float(self.table.sum())}

    def state(self):
        self.at("state")
        return super().state()


def test_a_kill_between_the_first_metrics_and_the_first_checkpoint_loses_nothing(tmp_path):
    for name, interrupts in (("calm", Interrupts()), ("killed", Interrupts(("state",), Killed()))):
        (tmp_path / name).mkdir()
        try:
            run(tmp_path / name, MeasuringTask(interrupts))
        except Killed:
            assert not find_newest_checkpoint(tmp_path / name / "checkpoints")
            run(tmp_path / name, MeasuringTask())
    assert ended(tmp_path / "killed") == ended(tmp_path / "calm")


def test_two_stops_between_the_same_epochs_lose_no_measurement(calm, tmp_path):
    for _ in range(2):
        with pytest.raises(Stopped):
            run(tmp_path, PlanningTask(Interrupts(("prepare", 2), Stopped("a pass", 3, "SIGTERM"))))
    run(tmp_path, PlanningTask())
    assert ended(tmp_path) == calm[0]


def test_a_plan_that_differs_after_a_resume_is_refused(tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path, PlanningTask(), stop_at=8)
    assert find_newest_checkpoint(tmp_path / "checkpoints")[0] == 8

    class Changed(PlanningTask):
        def load(self, state):
            super().load(state)
            self.table[3:9] -= 50.0

    with pytest.raises(DataError, match=r"toy: the plan of epoch 2 is not the one .*--redo toy"):
        run(tmp_path, Changed())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda plan: EpochPlan(plan.epoch, (Part(np.arange(14), 7),)), r"toy: the parts .* for 2 steps"),
        (lambda plan: EpochPlan(plan.epoch, (Part(np.arange(1, 36), 7),)), r"toy: .* lists sample_id 30"),
        (lambda plan: EpochPlan(plan.epoch + 1, plan.parts), r"toy: the plan for epoch 1 is of epoch 2"),
    ],
)
def test_a_plan_that_breaks_its_promises_names_the_method(wrong, told, tmp_path):
    with pytest.raises(DataError, match=told):
        run(tmp_path, PlanningTask(wrong=wrong))
