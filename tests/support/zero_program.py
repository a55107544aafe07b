"""The program of each rank in test_deepspeed.py: the same trainings with several engines, and their differences.

python zero_program.py FOLDER (all | launcher); writes FOLDER/rank<r>.json, and what one process shall continue.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from shards.errors import ConfigError
from tests.support.twin_training import FURTHER, STEPS, Training, distance, optimizer_of, twin
from trainer.config.schema import ExecutionConfig
from trainer.distributed.process_group import join_world, leave_world
from trainer.distributed.world import World
from trainer.training.engines import Engine, make_engine
from trainer.training.engines.deepspeed import DeepSpeedEngine
from trainer.training.engines.plain import PlainEngine, wrap_with_ddp

Report = dict[str, object]


def training(world: World, engine: str, kind: str, normed: bool = False) -> Training:
    module = twin(normed)
    optimizer = optimizer_of(module, kind)
    made: Engine
    if engine == "ddp":
        made = PlainEngine(module, optimizer, world, wrap_with_ddp(module, world, find_unused=True))
    elif engine == "meetings":
        made = make_engine(module, optimizer, world, exact=True, allow_accelerate=False, graphs=True)
    elif engine == "launcher":
        made = make_engine(module, optimizer, world, exact=True, allow_accelerate=True)
    else:
        made = DeepSpeedEngine(module, optimizer, world, int(engine[-1]))
    return Training(made, world, kind)


def against_ddp(world: World, engine: str, kind: str, normed: bool) -> Report:
    expected = training(world, "ddp", kind, normed).steps(0, STEPS)
    found = training(world, engine, kind, normed).steps(0, STEPS)
    return {
        "engine": type(found.engine).__name__,
        "distance": distance(found.state(), expected.state()),
        "skipped": [found.skipped, expected.skipped],
    }


def round_trips(world: World, folder: Path, engine: str, kind: str) -> Report:
    """Saved here for one process, loaded here from one process, and resumed here in a new engine."""
    uninterrupted = training(world, engine, kind).steps(0, STEPS)
    saved = uninterrupted.state()
    uninterrupted.steps(STEPS, FURTHER)
    if world.is_rank0:
        save_file(saved, folder / f"{engine}-{kind}-saved.safetensors")
        save_file(uninterrupted.state(), folder / f"{engine}-{kind}-further.safetensors")
    else:
        uninterrupted.state()
    resumed = training(world, engine, kind).load(saved).steps(STEPS, FURTHER)
    taken_over = training(world, engine, kind).load(load_file(folder / f"alone-{kind}-saved.safetensors"))
    taken_over.steps(STEPS, FURTHER)
    expected = load_file(folder / f"alone-{kind}-further.safetensors")
    return {
        "resumed": distance(resumed.state(), uninterrupted.state()),
        "taken_over": distance(taken_over.state(), expected),
    }


def beginnings(world: World) -> Report:
    """Nothing has happened before the first step, nor after loading nothing, nor after half a step."""
    fresh = training(world, "zero2", "adam")
    same = distance(fresh.state(), {f"model.{name}": t for name, t in twin(normed=False).state_dict().items()})
    used = training(world, "zero2", "adam").steps(0, 3).load(fresh.state()).steps(0, STEPS)
    expected = fresh.steps(0, STEPS).state()
    broken_off = training(world, "zero2", "adam").broken_off().steps(0, STEPS)
    return {
        "fresh": same,
        "reused": distance(used.state(), expected),
        "broken_off": distance(broken_off.state(), expected),
    }


def autocast_is_the_callers(world: World) -> Report:
    engine = training(world, "zero2", "sgd").engine
    images = torch.zeros(2, 3, 6, 6)
    # DeepSpeed asks for CUDA's autocast alone, and then switches its own device's off.
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            inside = engine.forward(images)[0].dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
    return {"inside": str(inside), "outside": str(engine.forward(images)[0].dtype)}


def clipping_is_refused(world: World) -> Report:
    engine = training(world, "zero1", "sgd").engine
    try:
        engine.clip(1.0, [engine.module])
    except ConfigError as error:
        return {"error": str(error)}
    return {}


def main(folder: Path, what: str) -> None:
    world = join_world(ExecutionConfig(device="cpu", threads=1, world=2))
    report: Report = {"ranks": float(world.all_reduce(torch.ones(())))}
    cases = [(kind, normed) for kind in ("adam", "sgd") for normed in (False, True)]
    for engine in ["launcher"] if what == "launcher" else ["zero1", "zero2", "meetings"]:
        for kind, normed in cases:
            report[f"{engine} {kind} {'normed' if normed else 'bare'}"] = against_ddp(world, engine, kind, normed)
    if what == "all":
        for engine, kind in [("zero1", "sgd"), ("zero2", "adam"), ("zero2", "sgd")]:
            report[f"{engine} {kind} round trips"] = round_trips(world, folder, engine, kind)
        report["beginnings"] = beginnings(world)
        report["autocast"] = autocast_is_the_callers(world)
        report["clip"] = clipping_is_refused(world)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(report))
    leave_world(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
