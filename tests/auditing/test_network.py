"""Which network an audit starts from: by source, by time, and with consent to a download."""

import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from shards.errors import ConfigError
from trainer.auditing import consent, network
from trainer.auditing.backbones import BACKBONES, find_backbone
from trainer.auditing.consent import require_consent
from trainer.auditing.duration import Duration
from trainer.auditing.network import choose_network
from trainer.auditing.settings import Start
from trainer.models.pretrained import NoPretrained

BASE, SMALL, LITE = (
    "vit_base_patch14_dinov2.lvd142m",
    "vit_small_patch14_dinov2.lvd142m",
    "tf_efficientnet_lite0.in1k",
)
DINOV3 = "vit_base_patch16_dinov3.lvd1689m"


class Hub:
    """A cache with some weights, and a hub that gives the others."""

    def __init__(self, *cached: str) -> None:
        self.cached, self.downloaded = cached, list[str]()

    def find(self, name: str, download: bool = True) -> Path | None:
        if name in self.cached:
            return Path(name)
        if download:
            self.downloaded.append(name)
        return Path(name) if download else None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    def make(*cached: str) -> Hub:
        found = Hub(*cached)
        monkeypatch.setattr(network, "find_pretrained", found.find)
        monkeypatch.setattr(consent, "require_reachable", lambda name: None)
        return found

    return make


def on_gpu(samples: int) -> Duration:
    return Duration("cuda", samples, lambda start: pytest.fail("nothing is measured on a GPU"))


def on_cpu(samples: int, gmacs_per_second: float = 60.0) -> Duration:
    def measure(start: Start) -> float:
        backbone = find_backbone(start.model)
        assert backbone is not None
        return samples * backbone.gmacs_at(start.image["size"]) / gmacs_per_second

    return Duration("cpu", samples, measure)


def choose(
    in_time: Duration, model: str | None = None, size: int | None = None, download: bool | None = True
) -> Start:
    return choose_network(model, None, size, in_time, download)


@pytest.mark.parametrize(
    ("in_time", "name", "size"),
    [
        (on_gpu(3_000), BASE, 224),
        (on_gpu(200_000), BASE, 224),
        (on_gpu(800_000), SMALL, 224),
        (on_gpu(10**9), LITE, 128),
        (on_cpu(500), BASE, 224),
        (on_cpu(3_000), SMALL, 168),
        (on_cpu(20_000), LITE, 224),
        (on_cpu(10**7), LITE, 128),
    ],
)
def test_what_is_downloaded_depends_on_the_machine_and_the_number_of_images(in_time, name, size, hub) -> None:
    machine = hub()
    start = choose(in_time)
    assert (start.model, start.image["size"], start.pretrained) == (name, size, True)
    assert machine.downloaded == [name]
    assert start.options == (find_backbone(name) or BACKBONES[0]).options


def test_more_images_never_get_a_dearer_network(hub) -> None:
    hub()
    for make in (on_gpu, on_cpu):
        costs = []
        for exponent in range(4, 17):
            start = choose(make(3**exponent))
            backbone = find_backbone(start.model)
            assert backbone is not None
            costs.append(backbone.gmacs_at(start.image["size"]))
        assert all(later <= 1.5 * earlier for earlier, later in pairwise(costs))
        assert costs[-1] == min(costs)


def test_the_cache_comes_first_and_may_have_dinov3(hub) -> None:
    machine = hub(DINOV3, LITE)
    assert choose(on_gpu(3_000), download=False).model == DINOV3
    assert choose(on_cpu(20_000), download=False).model == LITE
    assert machine.downloaded == []


def test_a_size_that_is_given_is_kept(hub) -> None:
    hub(BASE)
    start = choose_network(None, None, 98, on_cpu(10**6))
    assert (start.model, start.image["size"]) == (BASE, 98)


def test_a_file_comes_before_the_cache(hub, tmp_path) -> None:
    hub(BASE)
    (tmp_path / "mine.safetensors").write_bytes(b"")
    start = choose_network("tf_efficientnet_lite0", tmp_path / "mine.safetensors", None, on_cpu(3_000))
    assert (start.model, start.image["size"]) == ("tf_efficientnet_lite0", 224)
    other = choose_network("vit_tiny_patch16_224", tmp_path / "mine.safetensors", None, refuse_small())
    assert other.image["size"] == 224
    with pytest.raises(ConfigError, match="names the network"):
        choose_network(None, tmp_path / "mine.safetensors", None, on_cpu(3_000))


def refuse_small() -> Duration:
    def measure(start: Start) -> float:
        if start.image["size"] != 224:
            raise ConfigError("for one size only")
        return 10_000.0

    return Duration("cpu", 3_000, measure)


@pytest.mark.parametrize(("model", "folder"), [(None, SMALL), (BASE, BASE)])
def test_without_weights_the_line_says_which_and_how_to_get_them(model, folder, hub) -> None:
    machine = hub()
    start = choose(on_gpu(3_000), model, download=False)
    assert not start.has_weights
    assert start.model == (model or "resnet18")
    assert start.why_no_weights.startswith(f"{model}: none in the cache" if model else "none in the cache")
    assert "--no-download is given; copy " in start.why_no_weights
    assert f"models--timm--{folder} from a machine that has it" in start.why_no_weights
    assert machine.downloaded == []


def test_only_backbones_with_a_permissive_licence_are_downloaded_unasked(hub) -> None:
    machine = hub()
    start = choose(on_gpu(3_000), DINOV3, download=None)
    assert "dinov3-license" in start.why_no_weights
    assert "--download" in start.why_no_weights
    assert choose(on_gpu(3_000), download=None).model == BASE
    assert choose(on_gpu(3_000), DINOV3, download=True).model == DINOV3
    assert machine.downloaded == [BASE, DINOV3]


@pytest.mark.parametrize(
    ("answer", "agreed"), [("\n", True), ("Yes\n", True), ("n\n", False), ("what\n", False), ("", False)]
)
def test_a_terminal_is_asked_once(answer, agreed, monkeypatch, capsys) -> None:
    monkeypatch.setattr(consent, "can_ask", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    if answer in ("\n", "Yes\n"):
        require_consent(SMALL, None)
    else:
        with pytest.raises(NoPretrained, match=SMALL):
            require_consent(SMALL, None)
    shown = capsys.readouterr().err
    assert shown == f"Download {SMALL} (about 88 MB, apache-2.0) from the Hugging Face hub? [Y/n] "


def test_nobody_is_asked_without_a_terminal(monkeypatch, caplog) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert not consent.can_ask()
    monkeypatch.setattr("sys.stdin", None)
    assert not consent.can_ask()
    with caplog.at_level("INFO"):
        require_consent("resnet10t", None)
    assert "downloading resnet10t (about 22 MB, apache-2.0)" in caplog.text
