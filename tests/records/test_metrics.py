"""metrics.jsonl: exact means, truncation to a step, torn lines dropped, partial means carried over."""

import json

import pytest
import torch

from trainer.records.metrics import MetricsLog


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "metrics.jsonl"


@pytest.fixture
def logged(path):
    """Lines of the steps 3, 6, 9 and 12."""
    log = MetricsLog(path)
    for step in (3, 6, 9, 12):
        log.add({"loss": torch.tensor(float(step))})
        log.write(step=step)
    return path


def test_a_line_holds_the_means_since_the_last(path):
    log = MetricsLog(path)
    assert not log.has_steps()
    for loss, accuracy in ((1.0, 0.0), (2.0, 0.5), (6.0, 1.0)):
        log.add({"loss": torch.tensor(loss), "accuracy": torch.tensor(accuracy)})
    note = log.write(step=3, epoch=0.5)
    log.add({"loss": torch.tensor(10.0), "accuracy": torch.tensor(1.0)})
    log.write(step=4, epoch=0.6)
    assert lines_of(path) == [
        {"step": 3, "epoch": 0.5, "loss": 3.0, "accuracy": 0.5},
        {"step": 4, "epoch": 0.6, "loss": 10.0, "accuracy": 1.0},
    ]
    assert "loss 3.000" in note
    assert log.has_steps()


def test_a_line_of_step_0_is_not_of_a_step(path):
    log = MetricsLog(path)
    log.write(step=0, epoch=0, kept=1.0)
    assert path.exists()
    assert not log.has_steps()
    log.write(step=10, epoch=1, kept=0.5)
    assert log.has_steps()


def test_means_of_bf16_are_not_summed_in_bf16(path):
    log = MetricsLog(path)
    for _ in range(1000):
        log.add({"loss": torch.tensor(1.0078125, dtype=torch.bfloat16)})
    log.write(step=1000)
    assert lines_of(path)[0]["loss"] == 1.007812  # rounded to six places


@pytest.mark.parametrize(
    ("step", "kept"), [(12, [3, 6, 9, 12]), (11, [3, 6, 9]), (9, [3, 6, 9]), (3, [3]), (2, []), (0, [])]
)
def test_cut_back_keeps_the_lines_up_to_the_step(logged, step, kept):
    before = logged.read_text().splitlines()
    log = MetricsLog(logged)
    log.truncate_after(step)
    assert logged.read_text().splitlines() == before[: len(kept)]
    assert log.has_steps() == bool(kept)
    log.add({"loss": torch.tensor(1.0)})
    log.write(step=step + 1)
    assert [line["step"] for line in lines_of(logged)] == [*kept, step + 1]


@pytest.mark.parametrize("torn", ['{"step": 15, "lo', "{", '{"step"', "\0\0\0\0"])
def test_a_torn_last_line_is_forgotten(logged, torn):
    whole = logged.read_text()
    logged.write_text(whole + torn)
    log = MetricsLog(logged)
    log.truncate_after(100)
    assert logged.read_text() == whole
    log.add({"loss": torch.tensor(1.0)})
    log.write(step=15)
    assert [line["step"] for line in lines_of(logged)] == [3, 6, 9, 12, 15]


def test_nothing_to_cut_back(path):
    MetricsLog(path).truncate_after(5)
    assert not path.exists()


def test_an_unfinished_mean_is_carried_over_exactly(tmp_path):
    values = torch.rand(7, generator=torch.Generator().manual_seed(0))
    whole, first, second = (MetricsLog(tmp_path / name) for name in ("whole", "first", "second"))
    for number, value in enumerate(values):
        whole.add({"loss": value})
        (first if number < 4 else second).add({"loss": value})
        if number == 3:
            second.load(json.loads(json.dumps(first.state())), torch.device("cpu"))
    assert whole.state() == second.state()
    whole.write(step=7)
    second.write(step=7)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "second").read_bytes()
    assert lines_of(tmp_path / "second")[0]["loss"] == pytest.approx(values.mean().item(), abs=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_an_unfinished_mean_is_carried_over_wherever_the_task_counts(tmp_path, first):
    """A step that does not count is left out, before the checkpoint and after it."""

    def values(loss, counted):
        found = {"counted": torch.tensor(counted), "loss": torch.tensor(loss)}
        return found if first else dict(reversed(found.items()))

    log, resumed = MetricsLog(tmp_path / "a.jsonl"), MetricsLog(tmp_path / "b.jsonl")
    log.add(values(1.0, 1.0))
    log.add(values(0.0, 0.0))
    resumed.load(json.loads(json.dumps(log.state())), torch.device("cpu"))
    for each in (log, resumed):
        each.add(values(4.0, 1.0))
        each.add(values(0.0, 0.0))
        each.write(step=4)
    assert lines_of(tmp_path / "a.jsonl") == lines_of(tmp_path / "b.jsonl") == [{"step": 4, "loss": 2.5}]


def test_sums_of_a_version_with_other_metrics_are_dropped(tmp_path):
    first, second = MetricsLog(tmp_path / "first"), MetricsLog(tmp_path / "second")
    first.add({"loss": torch.tensor(1.0)})
    second.load(first.state(), torch.device("cpu"))
    second.add({"loss": torch.tensor(3.0), "loss_a": torch.tensor(4.0)})
    second.write(step=2)
    assert lines_of(tmp_path / "second") == [{"step": 2, "loss": 3.0, "loss_a": 4.0}]
    second.add({"loss": torch.tensor(3.0)})
    with pytest.raises(AssertionError, match="after steps that reported"):
        second.add({"loss": torch.tensor(3.0), "loss_a": torch.tensor(4.0)})


def test_a_whole_line_without_its_newline_stays_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n{"step": 6}')
    log = MetricsLog(path)
    log.truncate_after(6)
    log.write(step=9)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3, 6, 9]
