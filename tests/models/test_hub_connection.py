"""Whether the hub can be reached: found out within seconds, also behind a proxy, and said in one line."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from trainer.models import hub_connection
from trainer.models.hub_connection import find_connection_problem
from trainer.models.pretrained import NoPretrained, find_pretrained

CLOSED = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_accepts_connections(server: str) -> None:
    assert find_connection_problem(server) is None


def test_a_closed_port() -> None:
    assert find_connection_problem(CLOSED) == "no connection to 127.0.0.1 (Connection refused)"


def test_a_network_that_swallows_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallow(*_given: object, **_options: object) -> None:
        time.sleep(3)
        raise TimeoutError

    monkeypatch.setattr(hub_connection.socket, "create_connection", swallow)
    began = time.monotonic()
    assert find_connection_problem("https://hub.invalid", 0.1) == (
        "no connection to hub.invalid (no answer within 0.1 s)"
    )
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_proxy_is_asked_instead(scheme: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", scheme + server.removeprefix("http://"))
    assert find_connection_problem("https://hub.invalid") is None
    monkeypatch.setenv("https_proxy", CLOSED)
    assert find_connection_problem("https://hub.invalid") == (
        "no connection to hub.invalid through the proxy 127.0.0.1 (Connection refused)"
    )
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert find_connection_problem(server.replace("http:", "https:")) is None


def test_weights_are_given_up_at_once_and_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(NoPretrained, match=r"no connection to 127\.0\.0\.1") as refused:
        find_pretrained("resnet18.a1_in1k")
    assert time.monotonic() - began < 5
    assert refused.value.why == (
        f"none in the cache of the Hugging Face hub ({tmp_path}), and no connection to 127.0.0.1 (Connection refused)"
    )
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
