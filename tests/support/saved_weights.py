"""Files of weights as timm and torch write them, and a cache of the Hugging Face hub laid out by hand."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from trainer.models.factory import create_model, import_timm

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lived_in(name: str, classes: int, seed: int = 7, **options: Any) -> nn.Module:
    """A network whose weights and BatchNorm statistics are all unlike initial ones."""
    network = create_model(name, classes, seed, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.05 + 0.1 * torch.rand(tensor.shape, generator=generator))
    return network


def save(network: nn.Module, path: Path, described: dict[str, Any] | None = None) -> Path:
    """Save a network's state_dict by the suffix of the path, with `described` as the config.json beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.clone().contiguous() for name, tensor in network.state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    if described is not None:
        (path.parent / "config.json").write_text(json.dumps(described))
    return path


def fill_hub_cache(cache: Path, name: str, network: nn.Module, file: str = "model.safetensors") -> Path:
    """Put a network into a cache as if it were timm's for the model `name`, downloaded from the hub."""
    repository = import_timm().models.get_pretrained_cfg(name).hf_hub_id
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT / file
    blob = save(network, folder / "blobs" / f"blob{snapshot.suffix}")
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    snapshot.symlink_to(blob)
    return snapshot


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, nest: Path) -> None:
        self.nest = nest

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.nest, "it sang")
