"""The shipped accelerate configs: accelerate reads them, they name their launch command and fit the project."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.support import RECIPES
from trainer.distributed.launch import check_launcher_options
from trainer.training.engines.deepspeed import deepspeed_stage

FILES = sorted((RECIPES / "accelerate").glob("*.yaml"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)


def environment(file: Path) -> dict[str, str]:
    """What accelerate's launcher would make of the file's DeepSpeed section."""
    content = yaml.safe_load(file.read_text())
    if content["distributed_type"] != "DEEPSPEED":
        return {}
    named = {
        "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
        "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    }
    section = content["deepspeed_config"]
    said = {variable: str(section[key]) for key, variable in named.items() if key in section}
    return said | {"ACCELERATE_USE_DEEPSPEED": "true"}


def test_there_is_a_file_for_each_way_of_starting() -> None:
    ways = {"one_node", "many_nodes", "deepspeed_zero1", "deepspeed_zero2", "cpu", "cpu_deepspeed"}
    assert {file.stem for file in FILES} == ways


@each_file
def test_accelerate_reads_the_file(file: Path) -> None:
    """It raises on keys it does not know."""
    settings = load_config_from_file(str(file))
    assert settings.mixed_precision == "no"
    assert settings.num_processes >= 2


@each_file
def test_the_file_opens_with_its_command(file: Path) -> None:
    header = file.read_text().partition("\ncompute_environment")[0]
    assert f"accelerate launch --config_file recipes/accelerate/{file.name}" in header
    assert "-m trainer run -c recipes/" in header
    assert "execution.world=" in header


@each_file
def test_the_file_asks_for_nothing_that_would_be_refused(file: Path) -> None:
    said = environment(file)
    stages = {"deepspeed_zero1": 1, "deepspeed_zero2": 2, "cpu_deepspeed": 2}
    assert deepspeed_stage(said) == stages.get(file.stem)
    check_launcher_options("bf16", {"ACCELERATE_MIXED_PRECISION": "no"} | said)
