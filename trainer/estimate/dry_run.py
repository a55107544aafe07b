"""Describes what a run would do: its stages, their state and work, and the estimated cost."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from shards.errors import InputError
from shards.pack import is_packed
from shards.sample_index import SampleIndex
from shards.sources import Source, published_size
from trainer.config.data import DataConfig
from trainer.config.fitting import count_trained, resolve_batch
from trainer.config.schema import Recipe
from trainer.distributed.process_group import select_device
from trainer.distributed.world import SINGLE_PROCESS
from trainer.estimate.table import EstimateOptions, SplitSize, estimate_text
from trainer.loading.image_set import limit_ids
from trainer.models.pretrained import describe_hub_location
from trainer.models.weights import Weights, find_weights
from trainer.records.manifest import INCV_FROM, Manifest
from trainer.records.run_directory import RunDirectory
from trainer.run.data_sets import (
    check_files,
    check_matches_recipe,
    find_folders,
    require_own_folder,
    require_same_classes,
    source_of,
)
from trainer.run.incv_takeover import check_takeover
from trainer.run.ledger import StageLedger
from trainer.run.preflight import check_rows, check_without_data, describe_trainings, preflight, refuse_own_list
from trainer.run.runner import checksum_keys
from trainer.run.stage_graph import DataSizes, find_stage, require_stages, stages_of

Made = TypeVar("Made")


def describe_plan(
    recipe: Recipe,
    name: str,
    root: Path,
    redo: Sequence[str] = (),
    options: EstimateOptions | None = None,
    check_source: bool = False,
    incv_from: Path | None = None,
    shares_incv: bool = False,
) -> str:
    """Describe the plan, and why the run would be refused, if so. Reads shards and run directory, writes nothing.

    shares_incv: whether it takes over the INCV stage of another variant, which is yet to run.
    """
    folders = find_folders(recipe, RunDirectory(root))
    packed = (SampleIndex.load(folder) if is_packed(folder) else None for folder in folders.values())
    indices = dict(zip(("train", *recipe.data.eval), packed, strict=True))
    train = indices["train"]
    samples = len(limit_ids(train, recipe.data.train.limit)) if train else recipe.data.train.limit
    samples = None if samples is None else count_trained(recipe, samples)
    unfitted, recipe = recipe, resolve_batch(recipe, samples)
    weights, unusable = _try(lambda: find_weights(recipe.model, download=False))
    states, obstacles = _find_states(recipe, RunDirectory(root), indices, redo, weights)
    obstacles += unusable
    is_noted = INCV_FROM in Manifest(RunDirectory(root)).content and states.get("incv") != "redo"
    taken_over = bool(incv_from or shares_incv or is_noted)
    if states.get("incv", "done") != "done" and taken_over:
        states["incv"] = "taken over"
    batch = f"{recipe.batch.rows}" if samples is not None else f"{unfitted.batch.global_}"
    lines = [f"recipe {name}, model {recipe.model.name}, batch {batch}, into {root}"]
    if recipe.model.has_initial_weights and not unusable:
        where = weights.path if weights else f"to be downloaded ({describe_hub_location(recipe.model.name)})"
        lines.append(f"  initial weights: {where}")
    sizes = DataSizes(samples, [name for name, index in indices.items() if index is None])
    for stage in stages_of(recipe):
        lines.append(f"  {stage:<16} {states[stage]:<10} {find_stage(stage).describe(recipe, sizes)}")
    if samples is not None:
        notes, warnings = describe_trainings(recipe, samples)
        lines += [f"note: {note}" for note in notes] + [f"warning: {warning}" for warning in warnings]
    device, no_device = _try(lambda: select_device(recipe.execution))
    world = replace(SINGLE_PROCESS, device=device or SINGLE_PROCESS.device)
    obstacles += no_device + _find_refusals(lambda: check_rows(recipe, world.size))
    if train is not None:
        labels, refusals = _try(lambda: preflight(recipe, train, world, weights))
        obstacles += refusals
        if incv_from is not None and labels is not None:
            ledger = _open_ledger(recipe, RunDirectory(root), indices, weights)
            obstacles += _find_refusals(partial(check_takeover, incv_from, ledger, RunDirectory(root), labels, redo))
    else:
        obstacles += _find_refusals(lambda: check_without_data(recipe))
    splits, refusals = _examine_splits(recipe, indices, "pack" in redo, check_source)
    obstacles += refusals
    lines += [f"would be refused: {obstacle}" for obstacle in dict.fromkeys(obstacles)]
    options = replace(options or EstimateOptions(), takes_incv_over=taken_over)
    return "\n".join([*lines, "", estimate_text(unfitted, splits, options)])


def _examine_splits(
    recipe: Recipe, indices: dict[str, SampleIndex | None], redo: bool, check_source: bool
) -> tuple[dict[str, SplitSize | None], list[str]]:
    """Return the sizes of the splits, and why a run on them would be refused.

    indices: None if not packed; redo: whether changed splits would be packed again.
    """
    sizes: dict[str, SplitSize | None] = {}
    obstacles: list[str] = []
    class_names = {}
    for (split, index), (key, config) in zip(indices.items(), recipe.data.splits().items(), strict=True):
        source = None
        if index is None:
            source, refusals = _try(partial(source_of, key, config))
            obstacles += refusals + _find_refusals(partial(require_own_folder, key, config))
        elif not redo:
            obstacles += _find_refusals(partial(check_matches_recipe, key, config, index))
            check = check_files(key, config, check_source)
            obstacles += _find_refusals(partial(check.require_current, index))
        sizes[split] = size_split(config, index, source)
        listed = index if index is not None else source
        if listed is not None:
            class_names[split] = listed.class_names
    if (known := class_names.pop("train", None)) is not None:
        for name, found in class_names.items():
            obstacles += _find_refusals(partial(require_same_classes, name, known, found))
    return sizes, obstacles


def size_split(config: DataConfig, index: SampleIndex | None, source: Source | None) -> SplitSize | None:
    """Return the size of a split: as packed, else as listed by the source, else as published; None if unknown."""
    if index is not None:
        return SplitSize(len(limit_ids(index, config.limit)), index.num_classes, "packed")
    if source is not None:
        size = SplitSize(len(source), len(source.class_names), "listed by the source")
    else:
        published = published_size(config.source, config.split, config.subset, config.classes)
        if published is None:
            return None
        size = SplitSize(*published, "published size")
    return replace(size, samples=min(size.samples, config.limit or size.samples))


def _try(make: Callable[[], Made]) -> tuple[Made | None, list[str]]:
    """Return the result of `make`, or None and the error message with which a run would be refused."""
    try:
        return make(), []
    except InputError as error:
        return None, [str(error)]


def _find_refusals(check: Callable[[], object]) -> list[str]:
    return _try(check)[1]


def _find_states(
    recipe: Recipe,
    run: RunDirectory,
    indices: dict[str, SampleIndex | None],
    redo: Sequence[str],
    weights: Weights | None,
) -> tuple[dict[str, str], list[str]]:
    """Return the state of each stage, and the reasons why a run in this directory would be refused."""
    own = stages_of(recipe)
    repeated = [stage for stage in own if find_stage(stage).is_repeated]
    packing = "to do" if None in indices.values() else "redo" if "pack" in redo else "done"
    states = dict.fromkeys(own, "to do") | dict.fromkeys(repeated, "always run") | {"pack": packing}
    obstacles = _find_refusals(run.require_run_directory) + _find_refusals(lambda: refuse_own_list(recipe, run))
    train = indices["train"]
    unknown = recipe.model.has_initial_weights and weights is None
    if not run.manifest.exists() or train is None or unknown or obstacles:
        return states, obstacles
    book = _open_ledger(recipe, run, indices, weights)
    states |= {stage: book.status(stage).state for stage in own if stage not in repeated}
    states |= {stage: "redo" for stage in book.with_followers(redo) if stage not in repeated}
    return states, _find_refusals(lambda: require_stages(redo, None, recipe)) or _find_refusals(
        lambda: book.require_unchanged(redo)
    )


def _open_ledger(
    recipe: Recipe, run: RunDirectory, indices: dict[str, SampleIndex | None], weights: Weights | None
) -> StageLedger:
    """Return the ledger of a run whose training set is packed."""
    train, *_ = indices.values()
    assert train is not None
    present = {name: index for name, index in indices.items() if index is not None and name != "train"}
    return StageLedger(recipe, checksum_keys(recipe, train, present, weights), run, Manifest(run))
