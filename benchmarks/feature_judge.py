"""Seconds of an audit by features after the pass, on made-up features; one JSON line per figure.

    python benchmarks/feature_judge.py [--rows 100000] [--classes 100] [--device cpu] [--append]

Rows are unit vectors around the middle of their class; 20 % of the labels are flipped at random. The figures: the
search for 30 neighbours, the regressions with the vote, and the AUROC of the losses.
"""

import argparse
import time

import numpy as np
import torch
from record import publish, record_runs

from trainer.distributed.world import World
from trainer.examine.folds import stratified_group_folds
from trainer.examine.neighbours import nearest
from trainer.incv.feature_judge import FOLDS, NEIGHBOURS, Examined, JudgedSamples, judge_samples


def make_up(rows: int, width: int, classes: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Return features in float16, true labels and given labels."""
    random = np.random.default_rng(0)
    true = random.integers(classes, size=rows)
    generator = torch.Generator().manual_seed(0)
    middles = torch.randn(classes, width, generator=generator)
    features = torch.empty(rows, width, dtype=torch.float16)
    for part in torch.arange(rows).split(100_000):
        noise = torch.randn(len(part), width, generator=generator)
        features[part] = (middles[torch.from_numpy(true[part.numpy()])] + 4.0 * noise).half()
    flips = random.random(rows) < 0.2
    return features, true, np.where(flips, (true + random.integers(1, classes, rows)) % classes, true)


def auroc(wrong: np.ndarray, losses: np.ndarray) -> float:
    ranks = np.empty(len(losses))
    ranks[np.argsort(losses, kind="stable")] = np.arange(1, len(losses) + 1)
    positive = int(wrong.sum())
    return float((ranks[wrong].sum() - positive * (positive + 1) / 2) / (positive * (len(wrong) - positive)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/feature_judge.jsonl")
    given = parser.parse_args()
    device = torch.device(given.device)
    features, true, labels = make_up(given.rows, given.width, given.classes)
    world = World(0, 1, device, torch.get_num_threads())
    began = time.perf_counter()
    near, _ = nearest(features.to(device), NEIGHBOURS)
    neighbours = near.int().cpu().numpy()
    searched = time.perf_counter()
    print(f"neighbours: {searched - began:.1f} s", flush=True)
    groups = np.arange(given.rows)
    folds = stratified_group_folds(labels, groups, FOLDS, seed=0)
    samples = JudgedSamples(
        Examined(groups, features, neighbours, groups), labels, folds, np.ones(given.rows, np.bool_)
    )
    grouped = time.perf_counter()
    verdict = judge_samples(samples, given.classes, world)
    judged = time.perf_counter()
    memory = f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB of GPU memory" if device.type == "cuda" else ""
    quality = auroc(labels != true, verdict.predictions.loss)
    size = f"{given.rows:,} x {given.width} made-up features, {given.classes} classes"
    note = f"{size}; reference: as asked; AUROC {quality:.4f}; {verdict.facts}{memory}"
    publish(
        [
            record_runs("feature_neighbours_s", [searched - began], [300.0], unit="s", note=note),
            record_runs("feature_judge_s", [judged - grouped], [300.0], unit="s", note=note),
        ],
        "feature_judge.jsonl" if given.append else None,
    )


if __name__ == "__main__":
    main()
