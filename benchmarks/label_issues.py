"""Finding wrong labels of CIFAR-10 by features, beside cleanlab on the same features; one JSON line per set.

    python benchmarks/label_issues.py CIFAR LABELS WEIGHTS [--draws 3] [--append]

CIFAR: the folder of CIFAR-10's binary version; LABELS: that of the human labels (aggre.txt, random1.txt, ..., a label
in each line); WEIGHTS: tf_efficientnet_lite0 in safetensors. Each draw is 3,000 images at 128 px, whose features both
get; one set has 200 crops besides, half of them under a random label, and 60 images of noise. Ours is the judge of
`incv audit`. cleanlab (2.9; pip install cleanlab) gets the held-out probabilities of scikit-learn's logistic
regression with its defaults, and is taken at its best score and at its best filter.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from PIL import Image
from record import publish, record_runs
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from sklearn.model_selection import cross_val_predict

from tests.support.shapes import OTHER_SHAPES, SHAPES, draw_shape
from trainer.config.schema import IncvConfig
from trainer.distributed.world import SINGLE_PROCESS
from trainer.examine.duplicates import connect_groups, find_near_duplicates
from trainer.examine.folds import stratified_group_folds
from trainer.examine.neighbours import nearest
from trainer.incv.confident import are_doubted
from trainer.incv.feature_judge import FOLDS, NEIGHBOURS, Examined, JudgedSamples, judge_samples
from trainer.incv.noise_estimates import NoiseEstimates, estimate_noise
from trainer.incv.predictions import Predictions
from trainer.report.findings import find_conflicts

DRAWN, SIDE, THUMBNAIL, CLASSES = 3000, 128, 32, 10
COPIES, STRAYS = 200, 60
SIMILAR_SET = "similar class 0.4"
SCORES = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
FILTERS = ("prune_by_class", "prune_by_noise_rate", "both", "confident_learning", "predicted_neq_given")
SIMILAR = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}  # truck -> automobile, bird -> airplane, deer -> horse, cat <-> dog
Arrays = np.ndarray[Any, Any]


def read_cifar(cifar: Path, rows: Arrays) -> tuple[list[Arrays], Arrays]:
    """Return training images, uint8 [32, 32, 3] each, and their true labels."""
    raw = np.concatenate([np.fromfile(path, np.uint8) for path in sorted(cifar.glob("data_batch_*.bin"))])
    raw = raw.reshape(-1, 3073)[rows]
    return list(raw[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), raw[:, 0].astype(np.int64)


def compute_features(network: Any, images: Sequence[Arrays]) -> tuple[Arrays, Arrays]:
    """Return features, float16 [rows, features], and thumbnails, uint8 [rows, 3, THUMBNAIL, THUMBNAIL]."""
    features, thumbnails = [], []
    with torch.inference_mode():
        for first in range(0, len(images), 100):
            part = [Image.fromarray(image) for image in images[first : first + 100]]
            large = np.stack([np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in part])
            batch = torch.from_numpy(large).permute(0, 3, 1, 2).float() / 127.5 - 1
            features.append(network.forward_head(network.forward_features(batch), pre_logits=True).half().numpy())
            small = [np.asarray(image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)) for image in part]
            thumbnails.append(np.stack(small).transpose(0, 3, 1, 2))
    return np.concatenate(features), np.concatenate(thumbnails)


def add_strays(network: Any, images: list[Arrays], given: Arrays, true: Arrays, seed: int) -> tuple[Arrays, ...]:
    """Return the features, thumbnails, given and true labels of COPIES near-duplicates and of STRAYS of noise.

    Half of the copies get a random label. The true label of noise is -1.
    """
    random = np.random.default_rng(seed)
    rows = random.permutation(len(images))[:COPIES]
    copies = []
    for row in rows:
        left, top = random.integers(0, 5, 2)
        copies.append(images[row][top : top + 28, left : left + 28])
    noise = list(random.integers(0, 256, (STRAYS, 32, 32, 3)).astype(np.uint8))
    said = np.where(random.random(COPIES) < 0.5, given[rows], random.integers(0, CLASSES, COPIES))
    said = np.concatenate([said, random.integers(0, CLASSES, STRAYS)])
    return *compute_features(network, copies + noise), said, np.concatenate([true[rows], np.full(STRAYS, -1)])


def draw_shapes(count: int) -> tuple[list[Arrays], Arrays]:
    random = np.random.default_rng(3)
    kinds = (*SHAPES, *OTHER_SHAPES)[:8]
    true = np.arange(count) % len(kinds)
    return [np.asarray(draw_shape(kinds[label], random).convert("RGB")) for label in true], true


def make_labels(labels: Path, rows: Arrays, true: Arrays) -> dict[str, Arrays]:
    random = np.random.default_rng(5)
    flips = random.random(len(true)) < 0.4
    sets = {
        name: np.loadtxt(labels / f"{name}.txt", dtype=np.int64)[rows] for name in ("aggre", "random1", "random2")
    }
    shifted = (true + random.integers(1, CLASSES, len(true))) % CLASSES
    sets["symmetric 0.4"] = np.where(flips, shifted, true)
    sets["symmetric 0.2"] = np.where(flips & (random.random(len(true)) < 0.5), shifted, true)
    similar = np.array([SIMILAR.get(label, label) for label in range(CLASSES)])
    sets[SIMILAR_SET] = np.where(flips, similar[true], true)
    return sets


def judge_by_features(
    features: Arrays, given: Arrays, classes: int = CLASSES, groups: Arrays | None = None
) -> tuple[Predictions, float, Arrays]:
    """Return the held-out predictions, the share of random flips, and the fold of each image."""
    whole, ids = torch.from_numpy(features), np.arange(len(given))
    near, _ = nearest(whole.float() - whole.float().mean(dim=0), min(NEIGHBOURS, len(given) - 1))
    groups = ids if groups is None else groups
    examined = Examined(ids, whole, near.int().numpy(), groups)
    folds = stratified_group_folds(given, groups, FOLDS, seed=0)
    verdict = judge_samples(JudgedSamples(examined, given, folds, np.ones(len(given), bool)), classes, SINGLE_PROCESS)
    return verdict.predictions, verdict.facts["uniform_flips"], folds


def find_groups(features: Arrays, thumbnails: Arrays) -> Arrays:
    whole = torch.from_numpy(features).float()
    centred = whole - whole.mean(dim=0)
    pairs = find_near_duplicates(centred, torch.from_numpy(thumbnails), nearest(centred, NEIGHBOURS)[0])
    return connect_groups(len(features), pairs.pairs)


def estimate_shares(found: Predictions, given: Arrays, classes: int, flips: float) -> tuple[NoiseEstimates, float]:
    """Return the noise estimates, and the one that an audit states."""
    config = IncvConfig(judge="features", rounds=1, folds=FOLDS, noise_estimate="combined")
    estimates = estimate_noise(found, given, classes, config, flips)
    return estimates, estimates.of_rule(config)


def measure(wrong: Arrays, score: Arrays) -> tuple[float, float]:
    return float(roc_auc_score(wrong, score)), float(average_precision_score(wrong, score))


def compare(features: Arrays, given: Arrays, true: Arrays, thumbnails: Arrays | None = None) -> dict[str, Any]:
    """Return the figures of one set. thumbnails: if duplicates are to be looked for, as an audit does."""
    wrong, classes, began = given != true, int(given.max()) + 1, time.perf_counter()
    groups = None if thumbnails is None else find_groups(features, thumbnails)
    found, flips, _ = judge_by_features(features, given, classes, groups)
    score, flagged = found.loss, are_doubted(found.loss, found.agrees)
    if groups is not None:  # first in the list of an audit
        conflicts = find_conflicts(groups, given, found.given_probability)
        score, flagged = score + 1000.0 * conflicts, flagged | conflicts
    noise, took = estimate_shares(found, given, classes, flips)[1], time.perf_counter() - began
    began = time.perf_counter()
    held_out = cross_val_predict(
        LogisticRegression(), features.astype(np.float32), given, cv=FOLDS, method="predict_proba"
    )
    theirs = [measure(wrong, 1 - get_label_quality_scores(given, held_out, method=score)) for score in SCORES]
    filtered = [f1_score(wrong, find_label_issues(given, held_out, filter_by=name, n_jobs=1)) for name in FILTERS]
    seconds = time.perf_counter() - began
    auroc, precision = measure(wrong, score)
    first = np.argsort(-score, kind="stable")[:24]
    return {
        "auroc": (auroc, max(one for one, _ in theirs)),
        "ap": (precision, max(one for _, one in theirs)),
        "f1": (float(f1_score(wrong, flagged)), float(max(filtered))),
        "noise": (noise, float(wrong.mean())),
        "first24": (float(wrong[first].mean()), float(wrong.mean())),
        "seconds": (took, seconds),
    }


Set = tuple[Arrays, Arrays, Arrays, Arrays | None]
"""Features, given and true labels, and the thumbnails if duplicates are to be looked for."""


def make_sets(network: Any, cifar: Path, labels: Path, draws: int) -> dict[str, list[Set]]:
    """Return the sets by name, each with its draws."""
    rows = np.random.default_rng(0).permutation(50_000)[: DRAWN * draws]
    parts = [slice(first, first + DRAWN) for first in range(0, len(rows), DRAWN)]
    images, true = read_cifar(cifar, rows)
    features, thumbnails = compute_features(network, images)
    sets: dict[str, list[Set]] = {}
    for name, given in make_labels(labels, rows, true).items():
        sets[name] = [(features[part], given[part], true[part], None) for part in parts]
        if name == SIMILAR_SET:
            mixed = sets[name + ", duplicates, off-topic"] = []
            for part in parts:
                more = add_strays(network, images[part], given[part], true[part], part.start)
                whole = (features[part], thumbnails[part], given[part], true[part])
                joined = [np.concatenate(pair) for pair in zip(whole, more, strict=True)]
                mixed.append((joined[0], joined[2], joined[3], joined[1]))
    shapes, kinds = draw_shapes(DRAWN * draws)
    drawn, random = compute_features(network, shapes)[0], np.random.default_rng(7)
    given = np.where(random.random(len(kinds)) < 0.2, (kinds + random.integers(1, 8, len(kinds))) % 8, kinds)
    sets["shapes, symmetric 0.2"] = [(drawn[part], given[part], kinds[part], None) for part in parts]
    return sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--append", action="store_true", help="keep the lines in results/label_issues.jsonl")
    given = parser.parse_args()
    network: Any = timm.create_model("tf_efficientnet_lite0").eval()
    network.load_state_dict(load_file(given.weights))
    lines = []
    for name, drawn in make_sets(network, given.cifar, given.labels, given.draws).items():
        each = [compare(*one) for one in drawn]
        note = f"{name}; {len(drawn[0][1]):,} images at {SIDE} px, tf_efficientnet_lite0"
        for figure in each[0]:
            ours, theirs = ([one[figure][side] for one in each] for side in (0, 1))
            against = "the truth" if figure in ("noise", "first24") else "cleanlab"
            lines.append(
                record_runs(f"label_issues_{figure}", ours, theirs, unit="", note=f"{note}; reference: {against}")
            )
            print(name, figure, np.round(ours, 4), np.round(theirs, 4), flush=True)
    publish(lines, "label_issues.jsonl" if given.append else None)


if __name__ == "__main__":
    main()
