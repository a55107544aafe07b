"""`incv audit` and `incv.audit` in Python, on a folder of real digits, some of them in the wrong folder."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import save_file

import incv as package
from trainer.models.factory import create_model

SMALL = ["--model", "digits_cnn", "--no-download", "image.size=8", "image.resize=9", "data.train.resize=9"]
SHORT = ["incv.epochs=1", "incv.optimizer.milestones=[]", "execution.threads=1"]


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> Path:
    """60 images each of the digits 0, 1 and 2; every fifth is in the folder of the next digit."""
    from sklearn.datasets import load_digits

    digits, folder = load_digits(), tmp_path_factory.mktemp("digits")
    for label in range(3):
        for place, row in enumerate(np.flatnonzero(digits.target == label)[:60]):
            said = (label + (place % 5 == 0)) % 3
            path = folder / f"digit {said}" / f"{label}-{place:02d}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).convert("RGB").save(path)
    return folder


@pytest.fixture
def digits(drawn: Path, playground: Path) -> Path:
    (playground / "digits").symlink_to(drawn)
    return Path("digits")


def wrong(key: str) -> bool:
    said, file = key.split("/")
    return said.removeprefix("digit ") != file[0]


def test_an_audit_finds_the_wrong_labels(digits, incv):
    shorter = ["incv.epochs=20", "incv.optimizer.milestones=[[15, 0.01]]", "execution.threads=1"]
    answer = incv("audit", digits, *SMALL, *shorter)
    assert answer.code == 0, answer.err
    run = Path("runs/audit-digits")
    table = pq.read_table(run / "labels_review.parquet").to_pydict()
    assert np.mean([wrong(key) for key in table["key"][:24]]) >= 0.9
    report = json.loads((run / "report.json").read_text())
    assert abs(report["noise"]["confirmed"] - 0.2) <= 0.05
    assert report["trust"]["level"] in ("trusted", "with care")
    assert report["methods"] == {}
    for words in ("no pretrained weights", "180 images, 3 classes"):
        assert words in answer.err
    assert f"trust: {report['trust']['level']}" in answer.out
    assert str(run / "labels_review.csv") in answer.out
    assert str(run / "config.resolved.yaml") in answer.out
    for words in ("truth", "removed", "confident", "paper"):  # one share, and no empty columns
        assert words not in answer.out
    stated = report["trust"]["noise_range"] or [report["noise"]["confirmed"]]
    count = " to ".join(str(round(share * 180)) for share in stated)
    assert f"of the 180 labels are wrong ({count})." in answer.out
    assert report["flagged"] == sum(table["is_label_issue"])
    lines = [shlex.split(line, comments=True) for line in answer.out.partition("\nnext: ")[2].splitlines()]
    copy, again, clean = (line for line in lines if line and line[0] in ("cp", "incv"))
    shutil.copy(*copy[1:])
    plan = incv(*again[1:], "--dry-run")
    assert plan.code == 0, plan.err
    assert "runs/audit-digits-corrected" in plan.out
    assert incv(*clean[1:]).code == 0
    page = (run / "report.html").read_text()
    assert f"Trust: {report['trust']['level']}" in page
    assert page.count("data:image/webp;base64,") == min(report["flagged"], 24) + 1, "cards, and one in the script"
    assert 'id="accuracy"' not in page


def test_an_audit_goes_on_and_its_recipe_can_be_run(digits, incv):
    Path("runs").mkdir()
    Path("runs/mine.yaml").write_text("seed: 7  # the user's own, of the same name\n")
    first = incv("audit", digits, *SMALL, *SHORT, "--run-dir", "runs/mine")
    assert first.code == 0, first.err
    assert "expected to take less than a minute on this CPU" in first.err
    chosen = Path("runs/mine/config.resolved.yaml").read_bytes()
    again = incv("audit", digits, *SMALL, *SHORT, "--run-dir", "runs/mine")
    assert again.code == 0
    assert "incv: already done" in again.err
    assert "expected to take" not in again.err
    other = incv("audit", digits, *SMALL, *SHORT, "seed=1", "--run-dir", "runs/mine")
    assert other.code == 2
    assert "--redo" in other.err
    assert Path("runs/mine/config.resolved.yaml").read_bytes() == chosen
    assert incv("audit", digits, *SMALL, *SHORT, "seed=1", "--run-dir", "runs/mine", "--redo", "labels").code == 0
    assert incv("run", "-c", "runs/mine/config.resolved.yaml", "--run-dir", "runs/copy").code == 0
    assert Path("runs/mine.yaml").read_text() == "seed: 7  # the user's own, of the same name\n"
    copy, mine = (Path("runs", name, "labels_review.csv").read_bytes() for name in ("copy", "mine"))
    assert copy == mine


@pytest.mark.parametrize(("seconds", "advises"), [(1_700, False), (40_000, True)])
def test_a_long_audit_says_how_to_shorten_it(seconds, advises, digits, incv, monkeypatch):
    monkeypatch.setattr("trainer.auditing.audit.estimate_cpu_seconds", lambda *_: seconds)
    monkeypatch.setattr("trainer.auditing.audit.run_recipe", lambda *_: 75)
    assert ("`--redo incv` and a smaller network" in incv("audit", digits, *SMALL, *SHORT).err) is advises


def test_an_audit_is_started_again_with_smaller_images_as_it_advises(digits, incv):
    assert incv("audit", digits, *SMALL, *SHORT).code == 0
    smaller = incv("audit", digits, *SMALL, *SHORT, "image.size=6", "--redo", "incv")
    assert smaller.code == 0, smaller.err
    assert "from scratch at 6 pixels" in smaller.err


def test_the_python_interface(digits):
    result = package.audit(
        digits, model="digits_cnn", download=False, run_dir="runs/table", overrides=[*SMALL[3:], *SHORT]
    )
    assert len(result) == 180
    table = result.samples
    assert {"path", "given_label", "predicted_label", "label_quality", "is_label_issue"} <= set(table.column_names)
    assert all(Path(path).is_file() for path in table["path"].to_pylist())
    assert result.verdict in ("trusted", "with care", "do not use")
    assert len(result.issues) < 180
    assert "labels flagged" in result._repr_html_()


def test_weights_from_a_file(digits, incv):
    network = create_model("digits_cnn", 10, 0)
    save_file(network.state_dict(), "digits.safetensors")
    refused = incv("audit", digits, "--weights", "digits.safetensors")
    assert refused.code == 2
    assert "--model NAME" in refused.err
    missing = incv("audit", digits, "--weights", "none.safetensors")
    assert missing.code == 2
    assert "--weights: the file none.safetensors cannot be read: there is no such file" in missing.err
    answer = incv("audit", digits, "--weights", "digits.safetensors", *SMALL, *SHORT)
    assert answer.code == 0, answer.err
    assert "digits_cnn from digits.safetensors" in answer.err
    shards = sorted(Path("data/shards").iterdir())
    again = incv("audit", digits, *SMALL[2:], *SHORT)  # without --weights and --model
    assert again.code == 0, again.err
    assert "digits_cnn from digits.safetensors" in again.err
    assert sorted(Path("data/shards").iterdir()) == shards


def test_a_mistyped_key_is_named_as_it_was_given(digits, incv):
    answer = incv("audit", digits, *SMALL, "incv.epocs=3")
    assert answer.code == 2
    assert "override 'incv.epocs=3': unknown key `incv.epocs`; did you mean `incv.epochs`?" in answer.err


def test_several_processes_are_refused(digits, incv, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    answer = incv("audit", digits, *SMALL)
    assert answer.code == 2
    assert "runs in one process" in answer.err


def test_nothing_is_written_if_the_folder_is_unusable(playground, incv):
    Path("photos/cat").mkdir(parents=True)
    assert incv("audit", "photos", "--no-download").code == 3
    assert incv("audit", "nowhere", "--no-download").code == 2
    assert not Path("runs").exists()
