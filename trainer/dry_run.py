"""What a run would do: stages, their state, and how much work each is."""

from pathlib import Path

from shards.sample_index import SampleIndex
from trainer.config import DataConfig, Recipe
from trainer.incv.noise_estimates import judged_by_best_epoch
from trainer.loading.image_set import limited_ids
from trainer.manifest import Manifest
from trainer.run import facts_of
from trainer.run_directory import RunDirectory
from trainer.stages import StageBook, stages_of


def planned(recipe: Recipe, name: str, root: Path) -> str:
    """The plan as text; reads shards and run directory where they exist, writes nothing."""
    run = RunDirectory(root)
    splits = {"train": recipe.data.train, **recipe.data.eval}
    indices = {split: _packed(config) for split, config in splits.items()}
    lines = [f"recipe {name}, model {recipe.model.name}, batch {recipe.batch.global_}, into {root}"]
    states = _states(recipe, run, indices)
    train = indices["train"]
    samples = len(limited_ids(train, recipe.data.train.limit)) if train else recipe.data.train.limit
    for stage in stages_of(recipe):
        work = _work(stage, recipe, samples, indices)
        lines.append(f"  {stage:<16} {states.get(stage, 'to do'):<10} {work}")
    return "\n".join(lines)


def _packed(config: DataConfig) -> SampleIndex | None:
    folder = Path(config.shards)
    return SampleIndex.load(folder) if (folder / "dataset.json").exists() else None


def _states(recipe: Recipe, run: RunDirectory, indices: dict[str, SampleIndex | None]) -> dict[str, str]:
    train = indices["train"]
    present = {name: index for name, index in indices.items() if index is not None and name != "train"}
    if not run.manifest.exists() or train is None:
        return {}
    book = StageBook(recipe, facts_of(recipe, train, present), run, Manifest(run))
    return {stage: book.status(stage).state for stage in stages_of(recipe)}


def _work(stage: str, recipe: Recipe, samples: int | None, indices: dict[str, SampleIndex | None]) -> str:
    if stage == "pack":
        missing = [name for name, index in indices.items() if index is None]
        return f"pack {', '.join(missing)}" if missing else "shards are there"
    if stage == "labels":
        ratio = f" {recipe.labels.ratio:g}" if recipe.labels.noise in ("symmetric", "asymmetric") else ""
        return f"file {recipe.labels.file}" if recipe.labels.file else f"noise {recipe.labels.noise}{ratio}"
    if stage == "incv" and recipe.incv is not None:
        each_epoch = judged_by_best_epoch(recipe.incv, 0, None)
        extra = ", a predict pass an epoch while the best epoch judges" if each_epoch else ""
        steps = _steps(samples, recipe.batch.global_, recipe.incv.epochs, 0.5)
        return f"{recipe.incv.rounds} rounds of 2 folds, {recipe.incv.epochs} epochs, {steps} a fold{extra}"
    if stage in ("standard", "coteaching", "coteaching_incv"):
        config = recipe.standard if stage == "standard" else recipe.coteaching
        assert config is not None
        networks = "1 network" if stage == "standard" else "2 networks"
        most = "at most " if stage == "coteaching_incv" and samples is not None else ""
        return f"{networks}, {config.epochs} epochs, {most}{_steps(samples, recipe.batch.global_, config.epochs)}"
    if stage == "evaluate":
        return f"{len(recipe.methods)} method(s) on {', '.join(recipe.data.eval)}"
    return ""


def _steps(samples: int | None, batch: int, epochs: int, share: float = 1.0) -> str:
    """Steps over `share` of the samples (a fold of round 1 trains on half of them)."""
    if samples is None:
        return "as many steps as the samples give"
    return f"{-(-round(samples * share) // batch) * epochs:,} steps"
