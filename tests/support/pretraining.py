"""Pre-trains a small network in plain PyTorch, as weights for an audit of other images."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

from tests.support.shapes import OTHER_SHAPES, draw_shape
from trainer.models.factory import create_model

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def pretrain(
    images: list[Image.Image],
    labels: list[int],
    model: str,
    size: int,
    file: Path,
    *,
    epochs: int,
    batch: int = 64,
    rate: float = 0.1,
    seed: int = 0,
) -> float:
    """Train a network and write its weights, with a config.json beside them; returns its last training accuracy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    margin = max(2, size // 8)
    pixels = torch.from_numpy(np.stack([_square(image, size + margin) for image in images])).permute(0, 3, 1, 2)
    pixels, targets = pixels.to(device), torch.tensor(labels, device=device)
    network = create_model(model, max(labels) + 1, seed).to(device).train()
    optimizer = torch.optim.SGD(network.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = epochs * (len(pixels) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    right = 0.0
    for _ in range(epochs):
        order = torch.randperm(len(pixels), device=device)
        right = 0.0
        for rows in order.split(batch)[: len(pixels) // batch]:
            top, left = (int(torch.randint(margin + 1, ())) for _ in range(2))
            crop = pixels[rows, :, top : top + size, left : left + size].float() / 255
            crop = crop.flip(3) if torch.rand(()) < 0.5 else crop
            logits = network((crop - mean) / std)
            loss = F.cross_entropy(logits, targets[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            right += float((logits.argmax(1) == targets[rows]).float().mean())
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.cpu().contiguous() for name, value in network.state_dict().items()}, file)
    cfg = {"input_size": [3, size, size], "mean": list(MEAN), "std": list(STD), "num_classes": max(labels) + 1}
    (file.parent / "config.json").write_text(json.dumps({"architecture": model, "pretrained_cfg": cfg}))
    return right / max(1, len(pixels) // batch)


def pretrain_on_other_shapes(file: Path, epochs: int = 40) -> float:
    """Train a small timm network on shapes that `write_shapes` does not draw by default."""
    rng = np.random.default_rng(99)
    drawn = [(draw_shape(shape, rng), label) for label, shape in enumerate(OTHER_SHAPES) for _ in range(250)]
    images, labels = [image for image, _ in drawn], [label for _, label in drawn]
    return pretrain(images, labels, "test_resnet", 64, file, epochs=epochs)


def _square(image: Image.Image, size: int) -> np.ndarray:
    """Return the centre square of an image, resized: uint8 [size, size, 3]."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return np.asarray(
        image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    )
