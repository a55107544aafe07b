"""Export each trained network as a folder with weights (safetensors) and a description, in timm's format.

`load_network(FOLDER)` loads any exported network; `timm.create_model("local-dir:FOLDER", pretrained=True)` loads timm
models.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file
from torch import nn

from shards.durable import atomic_folder, read_json
from trainer.config.schema import Recipe
from trainer.methods.registry import methods_of
from trainer.models.factory import create_model
from trainer.training.checkpoint import write_tensors

if TYPE_CHECKING:
    from trainer.run.stages import StageRunner


def export_networks(stages: "StageRunner", name: str) -> None:
    """Export the networks of all methods of a run."""
    index = stages.data.train
    for method in methods_of(stages.recipe):
        for letter, network in zip("ab", stages.load_trained(method, index.num_classes), strict=False):
            folder = stages.run.export(method.name) / f"model_{letter}"
            export_network(network, stages.recipe, index.class_names, folder)


def export_network(network: nn.Module, recipe: Recipe, class_names: tuple[str, ...], folder: Path) -> None:
    """Write model.safetensors and config.json in timm's format."""
    size = recipe.image.size
    description = {
        "architecture": recipe.model.name,
        "num_classes": len(class_names),
        "model_args": recipe.model.options,
        "label_names": list(class_names),
        "pretrained_cfg": {
            "input_size": [3, size, size],
            "mean": list(recipe.image.mean),
            "std": list(recipe.image.std),
            "num_classes": len(class_names),
            "crop_pct": size / recipe.image.resize if recipe.image.resize else 1.0,
            "interpolation": "bilinear",
            "label_names": list(class_names),
        },
    }
    with atomic_folder(folder) as temporary:
        weights = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
        write_tensors(temporary / "model.safetensors", weights, {"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def load_network(folder: Path | str) -> nn.Module:
    """Load an exported network, in eval mode, on the CPU."""
    folder = Path(folder)
    description = read_json(folder / "config.json")
    network = create_model(
        description["architecture"], description["num_classes"], seed=0, **description["model_args"]
    )
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.eval()
