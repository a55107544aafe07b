"""Finding wrong labels of CIFAR-10 by features, beside cleanlab on the same features; one JSON line per set.

    python benchmarks/label_issues.py CIFAR LABELS WEIGHTS [--draws 3] [--append]

CIFAR: the folder of CIFAR-10's binary version; LABELS: that of the human labels (aggre.txt, random1.txt, ..., a label
in each line); WEIGHTS: tf_efficientnet_lite0 in safetensors. Each draw is 3,000 images at 128 px, whose features both
get. Ours is the judge of `incv audit`. cleanlab (2.9; pip install cleanlab) gets the held-out probabilities of
scikit-learn's logistic regression with its defaults, and is taken at its best score and at its best filter.
"""

import argparse
import time
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

from trainer.config.schema import IncvConfig
from trainer.distributed.world import SINGLE_PROCESS
from trainer.examine.folds import stratified_group_folds
from trainer.examine.neighbours import nearest
from trainer.incv.feature_judge import FOLDS, NEIGHBOURS, Examined, JudgedSamples, judge_samples
from trainer.incv.noise_estimates import NoiseEstimates, estimate_noise
from trainer.incv.predictions import Predictions
from trainer.incv.suspicion import are_doubted

DRAWN, SIDE, CLASSES = 3000, 128, 10
SCORES = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
FILTERS = ("prune_by_class", "prune_by_noise_rate", "both", "confident_learning", "predicted_neq_given")
SIMILAR = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}  # truck -> automobile, bird -> airplane, deer -> horse, cat <-> dog
Arrays = np.ndarray[Any, Any]


def read_features(cifar: Path, weights: Path, rows: Arrays) -> tuple[Arrays, Arrays]:
    """Return features, float16 [rows, features], and true labels of training images."""
    raw = np.concatenate([np.fromfile(path, np.uint8) for path in sorted(cifar.glob("data_batch_*.bin"))])
    raw = raw.reshape(-1, 3073)[rows]
    network: Any = timm.create_model("tf_efficientnet_lite0").eval()
    network.load_state_dict(load_file(weights))
    features = []
    with torch.inference_mode():
        for part in np.array_split(raw[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), -(-len(raw) // 100)):
            large = [
                np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in part
            ]
            images = torch.from_numpy(np.stack(large)).permute(0, 3, 1, 2).float() / 127.5 - 1
            features.append(network.forward_head(network.forward_features(images), pre_logits=True).half().numpy())
    return np.concatenate(features), raw[:, 0].astype(np.int64)


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
    sets["similar class 0.4"] = np.where(flips, similar[true], true)
    return sets


def judge_by_features(features: Arrays, given: Arrays, classes: int = CLASSES) -> tuple[Predictions, float, Arrays]:
    """Return the held-out predictions, the share of random flips, and the fold of each image."""
    whole = torch.from_numpy(features)
    near, _ = nearest(whole.float() - whole.float().mean(dim=0), min(NEIGHBOURS, len(given) - 1))
    groups = np.arange(len(given))
    examined = Examined(groups, whole, near.int().numpy(), groups)
    folds = stratified_group_folds(given, groups, FOLDS, seed=0)
    verdict = judge_samples(JudgedSamples(examined, given, folds, np.ones(len(given), bool)), classes, SINGLE_PROCESS)
    return verdict.predictions, verdict.facts["uniform_flips"], folds


def estimate_shares(found: Predictions, given: Arrays, classes: int, flips: float) -> tuple[NoiseEstimates, float]:
    """Return the noise estimates, and the one that an audit states."""
    config = IncvConfig(judge="features", rounds=1, folds=FOLDS, noise_estimate="combined")
    estimates = estimate_noise(found, given, classes, config, flips)
    return estimates, estimates.of_rule(config)


def measure(wrong: Arrays, score: Arrays) -> tuple[float, float]:
    return float(roc_auc_score(wrong, score)), float(average_precision_score(wrong, score))


def compare(features: Arrays, given: Arrays, true: Arrays) -> dict[str, Any]:
    """Return the figures of one set."""
    wrong, began = given != true, time.perf_counter()
    found, flips, _ = judge_by_features(features, given)
    ours, took = estimate_shares(found, given, CLASSES, flips)[1], time.perf_counter() - began
    began = time.perf_counter()
    held_out = cross_val_predict(
        LogisticRegression(), features.astype(np.float32), given, cv=FOLDS, method="predict_proba"
    )
    theirs = [measure(wrong, 1 - get_label_quality_scores(given, held_out, method=score)) for score in SCORES]
    filtered = [f1_score(wrong, find_label_issues(given, held_out, filter_by=name, n_jobs=1)) for name in FILTERS]
    seconds = time.perf_counter() - began
    auroc, precision = measure(wrong, found.loss)
    first = np.argsort(-found.loss, kind="stable")[:24]
    return {
        "auroc": (auroc, max(one for one, _ in theirs)),
        "ap": (precision, max(one for _, one in theirs)),
        "f1": (float(f1_score(wrong, are_doubted(found.loss, found.agrees))), float(max(filtered))),
        "noise": (ours, float(wrong.mean())),
        "first24": (float(wrong[first].mean()), float(wrong.mean())),
        "seconds": (took, seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--append", action="store_true", help="keep the lines in results/label_issues.jsonl")
    given = parser.parse_args()
    rows = np.random.default_rng(0).permutation(50_000)[: DRAWN * given.draws]
    features, true = read_features(given.cifar, given.weights, rows)
    lines = []
    for name, labels in make_labels(given.labels, rows, true).items():
        parts = [slice(first, first + DRAWN) for first in range(0, len(rows), DRAWN)]
        each = [compare(features[part], labels[part], true[part]) for part in parts]
        note = f"{name}; {DRAWN:,} images of CIFAR-10 at {SIDE} px, tf_efficientnet_lite0"
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
