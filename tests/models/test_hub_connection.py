"""Without a connection to the hub, weights are given up within seconds and in one line."""

import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from trainer.models.pretrained import NoPretrained, find_pretrained, require_pretrained

NAME = "resnet18.a1_in1k"
CLOSED = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_weights_are_given_up_at_once_and_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    require_pretrained(NAME)  # imports timm, which takes seconds
    began = time.monotonic()
    with pytest.raises(NoPretrained, match=r"no connection to 127\.0\.0\.1") as refused:
        find_pretrained(NAME)
    assert time.monotonic() - began < 5
    assert refused.value.why == (
        f"none in the cache of the Hugging Face hub ({tmp_path}), and no connection to 127.0.0.1 "
        "([Errno 111] Connection refused)"
    )
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
