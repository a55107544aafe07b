"""The examples of docs/other-tools.md run on a real audit, where the tool is installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.command_line import exit_code
from tests.support.documentation import read_blocks
from tests.support.made_once import make_once
from tests.support.saved_weights import save
from tests.test_docs_commands import write_photos
from trainer.models.factory import create_model

EXAMPLES = {
    package: block.text
    for block in read_blocks(REPOSITORY / "docs" / "other-tools.md")
    for package in ("cleanlab", "datasets", "fiftyone")
    if package in block.text
}
_DATALAB = "from datasets import Dataset; Dataset.from_dict({'label': ['a', 'b']})"
_MONGODB = "import fiftyone; fiftyone.list_datasets()"


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, one of them broken, and their audit; the weights are random."""

    def make(folder: Path) -> None:
        write_photos(folder)
        (folder / "photos/0/page.png").write_text("<html>404</html>")
        described = {"architecture": "test_resnet", "pretrained_cfg": {"input_size": [3, 32, 32]}}
        weights = save(create_model("test_resnet", 10, 0), folder / "weights/model.safetensors", described)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert exit_code(["audit", "photos", "--weights", str(weights), "execution.device=cpu"]) == 0

    return make_once(tmp_path_factory, "audited-photos", make)


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, whose home and caches are in `folder`/.home."""
    environment = os.environ | {"HOME": str(folder / ".home"), "HF_HUB_OFFLINE": "1", "FIFTYONE_DO_NOT_TRACK": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def run_example(name: str, shown: str, folder: Path) -> dict[str, object]:
    """Run an example; return what the expression `shown` is after it."""
    done = run_python(f"{EXAMPLES[name]}\nimport json\nprint()\nprint(json.dumps({shown}))", folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_examples_are_short() -> None:
    assert EXAMPLES.keys() == {"cleanlab", "datasets", "fiftyone"}
    assert all(len(text.splitlines()) <= 12 for text in EXAMPLES.values())


@needs("cleanlab", "datasets")  # Datalab needs both
def test_cleanlab_reads_the_probabilities(audited: Path) -> None:
    if (tried := run_python(_DATALAB, audited)).returncode != 0:  # version 5.2 beside pyarrow 26
        pytest.skip(f"datasets cannot make the data set of Datalab: {tried.stderr.strip()[-200:]}")
    found = run_example("cleanlab", "{'rows': len(issues), 'columns': list(issues), 'key': issues.index[0]}", audited)
    assert found["rows"] == 120
    assert {"is_label_issue", "label_score", "is_label_issue_of_incv", "off_topic"} <= set(found["columns"])
    assert (audited / "photos" / found["key"]).exists()


@needs("fiftyone")
def test_fiftyone_shows_the_findings(audited: Path) -> None:
    if (tried := run_python(_MONGODB, audited)).returncode != 0:
        pytest.skip(f"fiftyone finds no MongoDB (mongod or FIFTYONE_DATABASE_URI): {tried.stderr.strip()[-200:]}")
    shown = "{'rows': len(dataset), 'tags': dataset.count_sample_tags(), 'most': dataset.bounds('mistakenness')[1],"
    shown += " 'labels': dataset.distinct('ground_truth.label'), 'suggested': dataset.distinct('incv.label')}"
    try:
        found = run_example("fiftyone", shown, audited)
    finally:
        run_python("import fiftyone as fo; fo.delete_dataset('photos')", audited)
    assert found["rows"] == 120
    assert found["labels"] == ["0", "1", "2"] == found["suggested"]
    assert found["tags"]["is_label_issue"] > 0
    assert 0.5 < found["most"] <= 1


@needs("datasets")
def test_datasets_filter_by_our_columns(audited: Path) -> None:
    found = run_example("datasets", "{'rows': len(photos), 'kept': len(kept), 'first': kept[0]['key'],"
                        " 'size': kept[0]['image'].size, 'columns': kept.column_names}", audited)  # fmt: skip
    report = json.loads((audited / "runs/audit-photos/report.json").read_text())
    assert found["rows"] == 120
    assert found["kept"] == report["selection"]["selected"]
    assert found["size"] == [8, 8]
    assert {"image", "label", "key", "label_quality"} <= set(found["columns"])
    assert (audited / "photos" / found["first"]).exists()
