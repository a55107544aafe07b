"""Trust in audits by features whose wrong labels are known; one JSON line per audit.

    python benchmarks/feature_audits.py features OUT WEIGHTS CIFAR FASHION   (once; 10 minutes on one core)
    python benchmarks/feature_audits.py judge OUT FIRST LAST --set NAME [--labels FOLDER]

WEIGHTS: tf_efficientnet_lite0 in safetensors; CIFAR: the folder of CIFAR-10's binary version; FASHION: that of
Fashion-MNIST; LABELS: that of CIFAR-10's human labels, one in each line of aggre.txt, random1.txt, ... An audit is
drawn by its seed, FIRST to LAST: images (CIFAR-10, Fashion-MNIST, shapes; features at 32 to 128 pixels, some of a
random network), 3 to 10 classes of 20 to 250 images, and wrong labels (symmetric, pair flip, a similar class, one
class alone, human). The thresholds of `trainer/report/trust.py` were chosen on the set `choose`, and are checked on
`check`.
"""

import argparse
import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from label_issues import estimate_shares, judge_by_features
from PIL import Image
from record import machine
from safetensors.torch import load_file

from tests.support.shapes import OTHER_SHAPES, SHAPES, draw_shape
from trainer.records.manifest import installed_versions
from trainer.report.signals import LISTED, share_flipped
from trainer.report.trust import Signals, judge

Arrays = np.ndarray[Any, Any]
SIMILAR = {
    "cifar": {9: 1, 2: 0, 4: 7, 3: 5, 5: 3},
    "fashion": {0: 6, 6: 0, 2: 4, 4: 2, 7: 9},
    "shapes": {0: 1, 2: 3, 4: 5},
}
"""By source: the class that each class is taken for."""
SETS = {  # source, pixels, whether the network is random: how often it is drawn
    ("cifar", 128, False): 3,
    ("cifar", 64, False): 3,
    ("cifar", 32, False): 2,
    ("shapes", 64, False): 2,
    ("shapes", 96, False): 2,
    ("fashion", 64, False): 3,
    ("fashion", 32, False): 2,
    ("cifar", 64, True): 1,
    ("fashion", 64, True): 1,
    ("shapes", 64, True): 1,
}
_DRAWN = 6000
HUMAN = ("aggre", "random1", "random2")


def name_set(source: str, pixels: int, random: bool) -> str:
    return f"{source}{pixels}{'-random' if random else ''}"


def read_images(source: str, cifar: Path, fashion: Path) -> tuple[list[Arrays], Arrays, Arrays]:
    """Return images, uint8 [height, width, 3] each, their classes, and their rows in the data set."""
    random = np.random.default_rng(0)
    if source == "shapes":
        pairs = [(shape, label) for label, shape in enumerate((*SHAPES, *OTHER_SHAPES)[:8]) for _ in range(250)]
        images = [np.asarray(draw_shape(shape, random).convert("RGB")) for shape, _ in pairs]
        return images, np.array([label for _, label in pairs]), np.arange(len(pairs))
    if source == "fashion":
        pixels, labels = (
            np.frombuffer(gzip.decompress((fashion / f"t10k-{name}-ubyte.gz").read_bytes()), np.uint8)
            for name in ("images-idx3", "labels-idx1")
        )
        rows = np.arange(_DRAWN)
        return [np.stack([one] * 3, -1) for one in pixels[16:].reshape(-1, 28, 28)[rows]], labels[8:][rows], rows
    raw = np.concatenate([np.fromfile(path, np.uint8) for path in sorted(cifar.glob("data_batch_*.bin"))])
    rows = random.permutation(50_000)[:_DRAWN]
    raw = raw.reshape(-1, 3073)[rows]
    return list(raw[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), raw[:, 0], rows


def write_features(out: Path, weights: Path, cifar: Path, fashion: Path) -> None:
    for source, pixels, random in SETS:
        torch.manual_seed(0)
        network: Any = timm.create_model("tf_efficientnet_lite0").eval()
        if not random:
            network.load_state_dict(load_file(weights))
        images, labels, rows = read_images(source, cifar, fashion)
        features = []
        with torch.inference_mode():
            for first in range(0, len(images), 100):
                part = [np.asarray(Image.fromarray(one).resize((pixels, pixels), 3)) for one in images[first:][:100]]
                batch = torch.from_numpy(np.stack(part)).permute(0, 3, 1, 2).float() / 127.5 - 1
                features.append(network.forward_head(network.forward_features(batch), pre_logits=True).half().numpy())
        np.savez(
            out / f"{name_set(source, pixels, random)}.npz",
            features=np.concatenate(features),
            labels=labels.astype(np.int64),
            rows=rows,
        )


def draw_audit(seed: int, out: Path, labels: Path | None) -> tuple[str, Arrays, Arrays, Arrays]:
    """Return the name of an audit, its features, and the true and given labels."""
    random = np.random.default_rng(seed)
    sets, weights = list(SETS), np.array(list(SETS.values()))
    source, pixels, untrained = sets[random.choice(len(sets), p=weights / weights.sum())]
    data = np.load(out / f"{name_set(source, pixels, untrained)}.npz")
    number = int(data["labels"].max()) + 1
    classes = np.sort(random.permutation(number)[: int(random.choice([3, 4, 6, 8, 10]))])
    each = int(random.choice([20, 40, 80, 150, 250]))
    kind = str(random.choice(["symmetric", "symmetric", "pair", "similar", "similar", "one"]))
    share = float(random.choice([0.02, 0.05, 0.1, 0.18, 0.3, 0.4, 0.45]))
    if kind == "similar":
        classes = np.unique([*classes, *(SIMILAR[source].get(one, one) for one in classes)])
    by_people = (source, pixels) == ("cifar", 128) and random.random() < 0.5 and labels is not None
    rows = np.concatenate([random.permutation(np.flatnonzero(data["labels"] == one))[:each] for one in classes])
    if by_people:
        kind, share = str(random.choice(HUMAN)), 0.0
        named = np.loadtxt(labels / f"{kind}.txt", dtype=np.int64)[data["rows"]]  # type: ignore[operator]
        rows = rows[np.isin(named[rows], classes)]
        given = np.searchsorted(classes, named[rows])
    true = np.searchsorted(classes, data["labels"][rows])
    if not by_people:
        taken_for = np.searchsorted(classes, [SIMILAR[source].get(one, one) for one in classes])
        flipped = {
            "symmetric": (true + random.integers(1, len(classes), len(true))) % len(classes),
            "pair": (true + 1) % len(classes),
            "similar": taken_for[true] if kind == "similar" else true,
            "one": np.where(true == 0, 1, true),
        }[kind]
        given = np.where(random.random(len(true)) < share, flipped, true)
    name = f"{name_set(source, pixels, untrained)}-{len(classes)}x{each}-{kind}{share:g}-seed{seed}"
    return name, data["features"][rows], true, given


def audit(features: Arrays, true: Arrays, given: Arrays) -> dict[str, Any]:
    """Return the signals of an audit, its level of trust, and how good it is."""
    classes = int(given.max()) + 1
    found, flips, folds = judge_by_features(features, given, classes)
    estimates, noise = estimate_shares(found, given, classes, flips)
    wrong, listed = given != true, np.argsort(-found.loss, kind="stable")[:LISTED]
    signals = Signals(
        samples=len(given),
        classes=classes,
        chance=float(np.bincount(given).max() / len(given)),
        agreement=float(found.agrees.mean()),
        agreement_each=tuple(float(found.agrees[folds == fold].mean()) for fold in np.unique(folds)),
        estimate=noise,
        other_estimate=estimates.paper,
        repeated=None,
        repeated_listed=None,
        train_accuracy=None,
        steps=None,
        flips=flips,
        listed_flipped=share_flipped(found.given_probability[listed], flips, classes),
    )
    return {
        "precision": float(wrong[listed[: max(1, min(LISTED, wrong.sum()))]].mean()),
        "listed": float(wrong[listed].mean()),
        "wrong": float(wrong.mean()),
        "error": abs(noise - float(wrong.mean())),
        "level": judge(signals).level,
        "signals": {
            name: value
            for name, value in asdict(signals).items()
            if value != Signals.__dataclass_fields__[name].default
        },
    }


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _round(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_round(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    features = commands.add_parser("features")
    for name in ("out", "weights", "cifar", "fashion"):
        features.add_argument(name, type=Path)
    judged = commands.add_parser("judge")
    judged.add_argument("out", type=Path)
    judged.add_argument("first", type=int)
    judged.add_argument("last", type=int)
    judged.add_argument("--set", required=True)
    judged.add_argument("--labels", type=Path)
    given = parser.parse_args()
    if given.command == "features":
        write_features(given.out, given.weights, given.cifar, given.fashion)
        return
    about = {"machine": machine(), "versions": installed_versions(("incv", "torch", "timm", "numpy"))}
    for seed in range(given.first, given.last + 1):
        name, *arrays = draw_audit(seed, given.out, given.labels)
        print(json.dumps({"set": given.set, "case": name} | _round(audit(*arrays)) | about), flush=True)


if __name__ == "__main__":
    main()
