"""timm's pretrained weights: where their file is, and the input they expect."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shards.durable import read_json
from shards.errors import ConfigError
from trainer.models.cifar_resnets import SMALL_NETWORKS
from trainer.models.factory import import_timm, require_known_model

_SECONDS_TO_ANSWER = 5.0


class NoPretrained(ConfigError):
    """There are no pretrained weights for a model. why: the cause in a few words."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message


class NotOnHub(NoPretrained):
    """The hub has no weights for a model, so that its cache cannot have them either."""


def find_pretrained(name: str, download: bool = True) -> Path | None:
    """Return the file of timm's weights for a model: from the cache of the Hugging Face hub, or downloaded into it.

    download: if false, return None for weights that are not in the cache. Raises NoPretrained.
    """
    from huggingface_hub import try_to_load_from_cache

    repository, revision, files = _hub_location(name)
    for file in files:
        cached = try_to_load_from_cache(repository, file, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
    return _download(name, repository, revision, files) if download else None


def describe_hub_location(name: str) -> str:
    """Return where the weights of a model come from and where they are cached, for messages."""
    from huggingface_hub import constants

    return f"{_hub_location(name)[0]} on the Hugging Face hub, cached in {constants.HF_HUB_CACHE}"


def describe_cache_folder(name: str) -> str:
    """Return the folder of the hub's cache that has the weights of a model."""
    from huggingface_hub import constants

    return str(Path(constants.HF_HUB_CACHE) / f"models--{_hub_location(name)[0].replace('/', '--')}")


def find_licence(name: str) -> str | None:
    """Return the licence of timm's weights of a model, such as `apache-2.0`; None if timm states none."""
    licence: str | None = getattr(require_pretrained(name), "license", None)
    return licence


def input_settings(name: str, file: Path | None) -> dict[str, Any]:
    """Return the image keys (size, mean, std) that weights expect.

    file: weights whose config.json, if there is one beside them, describes the input; without it, and for None, the
    values are those that timm records for its weights of the model. Empty if neither exists.
    """
    described = describe_file(file) if file is not None else {}
    if described.get("architecture") == base_name(name):
        settings = described.get("pretrained_cfg", described)
    elif file is not None and name in SMALL_NETWORKS:
        return {}
    else:
        settings = (_find_cfg(name) if file is not None else require_pretrained(name)).to_dict()
    height, width = (settings.get("input_size") or (3, None, None))[-2:]
    found = {"size": width if height == width else None, "mean": settings.get("mean"), "std": settings.get("std")}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items() if value}


def describe_file(file: Path) -> dict[str, Any]:
    """Return the config.json beside a file of weights, as timm, the hub and our exports write it; {} without one."""
    path = file.parent / "config.json"
    described = read_json(path) if path.is_file() else None
    if not isinstance(described, dict) or not isinstance(described.get("architecture"), str):
        return {}
    return described | {"architecture": base_name(described["architecture"])}


def base_name(name: str) -> str:
    """Return the name of a model without the tag of its weights: `resnet18` for `resnet18.a1_in1k`."""
    return name.partition(".")[0]


def require_pretrained(name: str) -> Any:
    """Return timm's description of its weights for a model (PretrainedCfg); raises NoPretrained if it has none."""
    cfg = None if name in SMALL_NETWORKS else _find_cfg(name)
    if cfg is not None and cfg.hf_hub_id:
        return cfg
    if cfg is not None and cfg.url:
        raise NotOnHub(
            f"timm's weights of {name} are not on the Hugging Face hub: download {cfg.url} and set model.weights to "
            "the file, with model.pretrained: false",
            f"timm's weights of {name} are not on the Hugging Face hub, but at {cfg.url}",
        )
    raise NotOnHub(
        f"model.pretrained: timm has no weights for {name}: choose one of timm.list_models(pretrained=True), or set "
        "model.pretrained to false (and model.weights to a file, if you have one)",
        f"timm has none for {name}",
    )


def _find_cfg(name: str) -> Any:
    """Return timm's record of a model's weights (those that its tag names); raises ConfigError for an unknown tag."""
    require_known_model(name)
    timm = import_timm()
    try:
        return timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = ", ".join(timm.list_pretrained(f"{base_name(name)}.*"))
        raise ConfigError(f"{error} timm has {tags or 'no weights for it'}", field="model.name") from error


def _hub_location(name: str) -> tuple[str, str | None, tuple[str, ...]]:
    """Return the hub's repository, revision and files, of which the first that exists has the weights."""
    cfg = require_pretrained(name)
    repository, _, revision = cfg.hf_hub_id.partition("@")
    files = (cfg.hf_hub_filename,) if cfg.hf_hub_filename else ("model.safetensors", "pytorch_model.bin")
    return repository, revision or None, files


def _download(name: str, repository: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    require_reachable(name)
    why = None
    for file in files:
        try:
            with _quiet_hub():
                return Path(hf_hub_download(repository, file, revision=revision))
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):  # neither cached nor reachable
                why = _first_line(error.__cause__ or error)
                break
        except OSError as error:
            why = _first_line(error)
            break
    raise _no_download(name, why or f"{repository} has none of {', '.join(files)}")


def require_reachable(name: str) -> None:
    """Raise NoPretrained if the hub does not answer, so that weights cannot be downloaded."""
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _find_connection_problem(constants.ENDPOINT)
    if why is not None:
        raise _no_download(name, why)


def _no_download(name: str, why: str) -> NoPretrained:
    from huggingface_hub import constants

    return NoPretrained(
        f"timm's weights of {name} ({describe_hub_location(name)}) are not in the cache and cannot be downloaded: "
        f"{why}. Start once where there is internet, copy that cache here (HF_HUB_CACHE names its folder), or set "
        "model.weights to a file with model.pretrained: false",
        f"none in the cache of the Hugging Face hub ({constants.HF_HUB_CACHE}), and {why}",
    )


def _find_connection_problem(endpoint: str) -> str | None:
    """Return why the hub does not answer; None if it does. A download would retry for half a minute."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_SECONDS_TO_ANSWER)
    except Exception as error:  # of the HTTP client, which depends on the version of the hub's library
        return f"no connection to {urlsplit(endpoint).hostname} ({_first_line(error)})"
    return None


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Within the block, the hub's library does not log its retries; it still shows the progress of a download."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
