"""D2L: the history of LIDs, a step by hand, the roll-back, and resuming before, at and after the turning point."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError
from tests.support import RECIPES
from tests.support.toy_networks import assert_same_network, batch_of, descend, linear, normed, setting, step_at
from trainer.config.optimisation import EvaluationConfig, OptimizerConfig
from trainer.distributed.stop import Stopped
from trainer.methods.built_in import D2lConfig
from trainer.methods.d2l import D2lTask, LidHistory, TurningRule, initial_epochs
from trainer.methods.dimensionality import label_share
from trainer.methods.epoch_evaluation import Accuracy, EvaluatedTask
from trainer.methods.method import ExpectedSizes
from trainer.methods.registry import get_method
from trainer.methods.standard import StandardTask
from trainer.run.recipe import load_recipe

quick = settings(max_examples=60, deadline=None)
LIDS = (5.0, 4.0, 4.2, 4.1, 9.0, 6.0, 5.0, 7.0)
"""With a window of 2 after one initial epoch, the fifth epoch is the turning point."""
RULE = TurningRule(epochs=8, initial=1, window=2)
HALF = Accuracy.of_hits([1], 2)


def histories(lids, rule=RULE):
    history, found = LidHistory(), []
    for lid in lids:
        history = history.after(lid, rule)
        found.append(history)
    return found


def test_the_history_by_hand():
    found = histories(LIDS)
    assert [history.turned_after for history in found] == [None] * 4 + [5] * 4
    assert [history.alpha for history in found[:4]] == [1.0] * 4
    shares = [label_share(LIDS[: 5 + later], 5 + later, 8) for later in range(4)]
    assert [history.alpha for history in found[4:]] == shares
    assert found[-1].ended == 8
    assert found[-1].lids == LIDS


def test_there_is_no_turn_at_the_end_of_the_training():
    assert histories((4.0, 4.2, 4.1, 9.0), TurningRule(4, 0, 2))[-1].turned_after is None
    assert histories((4.0, 4.2, 4.1, 9.0), TurningRule(5, 0, 2))[-1].turned_after == 4


def test_a_missing_estimate_repeats_the_last_one():
    found = histories((None, 4.0, None, 4.0, 9.0, None))
    assert found[0].lids == ()
    assert found[2].lids == (4.0, 4.0)
    assert found[-1].turned_after == 5
    assert found[-1].alpha == label_share([4.0, 9.0, 9.0], 6, 8)


@given(
    st.lists(st.none() | st.floats(0.5, 50), max_size=12), st.integers(1, 12), st.integers(0, 5), st.integers(2, 4)
)
@quick
def test_a_training_turns_once_and_then_trusts_predictions_too(lids, epochs, initial, window):
    rule = TurningRule(epochs, initial, window)
    found = histories(lids[:epochs], rule)
    turns = {history.turned_after for history in found} - {None}
    assert len(turns) <= 1
    for history in found:
        turned = history.turned_after is not None
        assert turned == (history.alpha < 1)
        assert 0 <= history.alpha <= 1
        if turned:
            assert initial + window <= history.turned_after <= history.ended
            assert history.turned_after < epochs


class Lids:
    """LIDs told in advance, by epoch."""

    def __init__(self, *lids, stops_at=None):
        self.lids, self.stops_at, self.asked = lids, stops_at, []

    def __call__(self, features, epoch):
        if epoch == self.stops_at:
            self.stops_at = None
            raise Stopped("LID", 0, "SIGTERM")
        self.asked.append(epoch)
        return self.lids[epoch]


def task_of(lids=None, build=linear, seed=1, rule=RULE, **form):
    return D2lTask(build(seed), setting(steps_per_epoch=2, epochs=8, **form), rule, lids or Lids(*LIDS))


def trained(task, epochs):
    for epoch in epochs:
        for step in (2 * epoch, 2 * epoch + 1):
            task.step(batch_of(8, seed=step), step_at(8, epoch=epoch, step=step))
        for work in task.after_epoch(epoch):
            work()


def test_a_step_learns_from_labels_and_predictions_by_hand():
    network, batch = linear(1), batch_of(8, real=5)
    task = task_of(Lids(*LIDS))
    task.load(_with_alpha(task, 0.3))
    report = task.step(batch, step_at(5))
    expected = copy.deepcopy(network)
    logits = expected(batch.images[:5])
    log_p, rows = logits.log_softmax(dim=1), torch.arange(5)
    loss = -(0.3 * log_p[rows, batch.labels[:5]] + 0.7 * log_p[rows, logits.argmax(1)]).mean()
    loss.backward()
    descend(expected)
    assert_same_network(task.module, expected)
    torch.testing.assert_close(report["loss"], loss.detach())
    right = (logits.argmax(1) == batch.labels[:5]).float().mean()
    torch.testing.assert_close(report["train_accuracy"], right)  # with the given labels


def _with_alpha(task, alpha):
    state = copy.deepcopy(task.state())
    state.values["lid_history"] |= {"ended": 5, "lids": [3.0], "turned_after": 5, "alpha": alpha}
    return state


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_before_the_turning_point_it_is_standard_training(smoothing):
    ours, theirs = task_of(build=normed, label_smoothing=smoothing), None
    theirs = StandardTask(normed(1), setting(steps_per_epoch=2, label_smoothing=smoothing))
    for task in (ours, theirs):
        trained(task, range(4))
    assert_same_network(ours.module, theirs.module)


@pytest.mark.parametrize("form", [{}, {"ema_decay": 0.5}])
def test_the_training_goes_back_to_the_weights_of_the_epoch_before(form):
    task = task_of(build=normed, **form)
    trained(task, range(4))
    before = copy.deepcopy(task.state().tensors)
    addresses = {name: tensor.data_ptr() for name, tensor in task.module.state_dict().items()}
    trained(task, range(4, 5))
    assert task.history.turned_after == 5
    after = task.state().tensors
    restored = [name for name in before if name.startswith(("model.", "ema."))]
    assert any(name.startswith("ema.") for name in restored) == bool(form)
    for name in restored:
        assert torch.equal(after[name], before[name]), name
    # In place, as CUDA graphs need it.
    assert {name: tensor.data_ptr() for name, tensor in task.module.state_dict().items()} == addresses
    assert not any(name.startswith("previous") for name in after)
    assert task.epoch_metrics == {"lid": 9.0, "alpha": round(label_share(LIDS[:5], 5, 8), 6)}


def test_previous_weights_are_kept_only_while_the_training_may_turn():
    task = task_of()
    kept = []
    for epoch in range(8):
        trained(task, range(epoch, epoch + 1))
        kept.append(any(name.startswith("previous.") for name in task.state().tensors))
    assert kept == [False, True, True, True, False, False, False, False]
    steady = task_of(Lids(*[4.0] * 8))
    trained(steady, range(7))
    assert not any(name.startswith("previous.") for name in steady.state().tensors)  # the last epoch cannot turn


def saved(task):
    """The state as a checkpoint returns it."""
    state = copy.deepcopy(task.state())
    state.values = json.loads(json.dumps(state.values))
    return state


def assert_same_state(one, other):
    ours, theirs = one.state(), other.state()
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name
    assert json.dumps(ours.values, sort_keys=True) == json.dumps(theirs.values, sort_keys=True)
    assert one.epoch_metrics == other.epoch_metrics


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_task_goes_on_from_its_state_bit_for_bit(stop, ema):
    """Before, at and after the turning point (the end of the fifth epoch), and in the middle of the next epoch."""
    form = {"build": normed, "ema_decay": ema, "optimizer": OptimizerConfig(kind="adam", learning_rate=0.05)}
    calm, first = task_of(**form), task_of(**form)
    trained(calm, range(8))
    trained(first, range(stop))
    first.step(batch_of(8, seed=2 * stop), step_at(8, epoch=stop, step=2 * stop))
    second = task_of(seed=7, **form)
    second.load(saved(first))
    second.step(batch_of(8, seed=2 * stop + 1), step_at(8, epoch=stop, step=2 * stop + 1))
    for work in second.after_epoch(stop):
        work()
    trained(second, range(stop + 1, 8))
    assert_same_state(second, calm)


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_stop_inside_the_measurement_changes_nothing(stop):
    calm = task_of(build=normed)
    trained(calm, range(8))
    first = task_of(Lids(*LIDS, stops_at=stop), build=normed)
    with pytest.raises(Stopped):
        trained(first, range(8))
    second = task_of(build=normed, seed=7)
    second.load(saved(first))
    for work in second.after_epoch(stop):
        work()
    trained(second, range(stop + 1, 8))
    assert_same_state(second, calm)


def evaluated(task, measure):
    return EvaluatedTask(task, EvaluationConfig(every=1), measure)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_stop_inside_an_evaluation_does_not_measure_twice(stop):
    """The loop then goes on with the evaluation."""
    calm, first, second = (task_of(Lids(*LIDS), build=normed, seed=seed) for seed in (1, 1, 7))
    trained(evaluated(calm, lambda networks: {"test": HALF}), range(8))
    left = [{"test": HALF}] * stop

    def measure(networks):
        if not left:
            raise Stopped("evaluation", 0, "SIGTERM")
        return left.pop()

    with pytest.raises(Stopped):
        trained(evaluated(first, measure), range(8))
    again = evaluated(second, lambda networks: {"test": HALF})
    again.load(saved(first))
    again.after_epoch(stop)[-1]()
    assert second._measure.asked == []
    assert again.epoch_metrics.keys() == {"lid", "alpha", "accuracy.test"}
    trained(again, range(stop + 1, 8))
    assert_same_state(second, calm)


def config(**keys):
    return D2lConfig(epochs=200, **keys)


def test_a_third_of_the_epochs_is_initial():
    assert initial_epochs(config()) == 67
    assert initial_epochs(D2lConfig(epochs=120)) == 40
    assert initial_epochs(config(initial_epochs=0)) == 0


def test_the_estimate_counts_the_measurements():
    sizes = ExpectedSizes(50_000, 0, 0, 0.0, None)
    assert get_method("d2l").expect_passes(config(), sizes) == [(200, 1280)]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("d2l.neighbours=128", "among the other 127 rows"),
        ("d2l.mixup.alpha=0.2", "d2l does not support mixup"),
        ("d2l.window=1", r"d2l\.window"),
    ],
)
def test_what_cannot_be_is_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        load_recipe(RECIPES / "tiny.yaml", ["methods=[d2l]", "d2l={epochs: 3}", keys])
