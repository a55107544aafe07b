"""An engine for DeepSpeed's ZeRO-1 and ZeRO-2, and the settings that `accelerate launch` passes for them.

Every rank holds all weights in fp32. ZeRO-1 shards the optimiser's moments over the ranks; ZeRO-2 also shards the
gradients.
"""

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from shards.errors import ConfigError, DataError
from trainer.distributed.world import World
from trainer.training.optim import set_learning_rate

_LARGEST_BUCKET = 25_000_000
"""Maximum elements of a gradient bucket (100 MB). DeepSpeed allocates a whole bucket even for a small model."""


def deepspeed_stage(environ: Mapping[str, str]) -> int | None:
    """Return the ZeRO stage set by `accelerate launch`, None without DeepSpeed; raise ConfigError if unsupported."""
    if environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file != "none":
        raise ConfigError(
            f"accelerate's deepspeed_config_file ({file}) is not supported: remove it and set zero_stage to 1 or 2 "
            "instead, as recipes/accelerate/deepspeed_zero2.yaml does"
        )
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")  # accelerate's own default
    if stage not in ("1", "2"):
        raise ConfigError(
            f"accelerate's zero_stage is {stage}, but only stages 1 and 2 are supported: set zero_stage to one of "
            "them, or start accelerate without DeepSpeed"
        )
    for what in ("optimizer", "param"):
        place = environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE", "none")
        if place not in ("none", ""):
            raise ConfigError(
                f"accelerate's offload_{what}_device is {place}: offloading is not supported; set it to none"
            )
    clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "none")
    if not _no_clipping(clipping):
        raise ConfigError(
            f"accelerate's gradient_clipping is {clipping}, which DeepSpeed applies to both networks of a pair "
            "together: set gradient_clipping to 0.0 (to clip each network separately, set optimizer.clip in the "
            "recipe and start accelerate without DeepSpeed)"
        )
    return int(stage)


def _no_clipping(clipping: str) -> bool:
    if clipping in ("none", "auto", ""):
        return True
    try:
        return float(clipping) == 0.0
    except ValueError:
        return False


class DeepSpeedEngine:
    """Runs steps with ZeRO over all ranks, in the existing process group.

    ZeRO uses our own optimiser, but replaces the parameters of each group with a single flat parameter: this rank's
    part of the group's concatenated weights, padded with zeros at the end.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, world: World, stage: int) -> None:
        deepspeed = _import_deepspeed(world.device)
        self.module, self.optimizer, self._world = module, optimizer, world
        self._groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # ZeRO fails on channels_last weights
        self._inside = _CallersAutocast(module, world.device.type)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=world.device.index or 0),
            model=self._inside,
            optimizer=optimizer,
            config=_settings(stage, sum(parameter.numel() for parameter in module.parameters())),
            mpu=_DataParallel(world),
        )
        ranks = (self._engine.world_size, self._engine.dp_world_size)
        assert ranks == (world.size, world.size), f"DeepSpeed sees {ranks} ranks, but there are {world.size}"
        self._require_layout()

    def forward(self, *inputs: torch.Tensor, last: bool = True) -> Any:
        self._inside.remember()
        return self._engine(*inputs)

    def zero_grad(self) -> None:
        """Clear the gradients, including those that ZeRO still holds after a skipped step."""
        self._zero.zero_grad(set_to_none=True)
        for held in (self._zero.averaged_gradients, self._zero.all_grad_tensors):
            for group in held:
                held[group] = None

    def backward(self, share: torch.Tensor, last: bool = True) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(share * self._world.size)  # ZeRO averages over ranks, but shares must be summed

    def unreduced_gradients(self) -> tuple[torch.Tensor, ...]:
        return ()

    def scale_gradients(self, factor: torch.Tensor) -> None:
        torch._foreach_mul_(self._own_gradients(), factor)

    def clip(self, norm: float, networks: Sequence[nn.Module]) -> None:
        raise ConfigError(
            "optimizer.clip is not supported with DeepSpeed, where no rank holds a network's whole gradient: set "
            "optimizer.clip to null, or start accelerate without DeepSpeed"
        )

    def gradients_finite(self) -> torch.Tensor:
        strange = (~torch.isfinite(torch.nn.utils.get_total_norm(self._own_gradients()))).to(torch.int32)
        return self._world.all_reduce(strange) == 0

    def set_rate(self, rate: float) -> None:
        set_learning_rate(self.optimizer, rate)

    def step(self, ok: torch.Tensor) -> None:
        if not bool(ok):  # this host-device sync is acceptable: ZeRO's step has one anyway
            return
        self._engine.step()
        assert self._engine.was_step_applied(), "DeepSpeed skipped a step whose gradients are finite"

    def moments(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        first = 0
        for parameters, own in zip(self._groups, self._own_parts(), strict=True):
            for name, value in self.optimizer.state.get(own, {}).items():
                if value is not None:
                    values = [value] * len(parameters) if name == "step" else self._whole(value, parameters)
                    found |= {f"optimizer.{first + i}.{name}": values[i] for i in range(len(parameters))}
            first += len(parameters)
        return found

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        first = 0
        for parameters, own in zip(self._groups, self._own_parts(), strict=True):
            numbers = range(first, first + len(parameters))
            prefix = f"optimizer.{first}."
            names = [key.removeprefix(prefix) for key in tensors if key.startswith(prefix)]
            missing = [f"optimizer.{i}.{n}" for i in numbers for n in names if f"optimizer.{i}.{n}" not in tensors]
            if missing:
                raise DataError(
                    f"the checkpoint does not contain {missing[0]}, which DeepSpeed needs: resume without DeepSpeed"
                )
            state = {name: [tensors[f"optimizer.{i}.{name}"] for i in numbers] for name in names}
            self.optimizer.state[own] = {
                name: values[0].clone() if name == "step" else self._own_part(values, own)
                for name, values in state.items()
            }
            first += len(parameters)

    def sync_weights(self) -> None:
        for parameters, own in zip(self._groups, self._own_parts(), strict=True):
            own.data.copy_(self._own_part(parameters, own))

    def _own_gradients(self) -> list[torch.Tensor]:
        """Return this rank's part of the gradients, summed over the ranks."""
        return [gradient for group in self._zero.averaged_gradients.values() for gradient in group]

    def _own_parts(self) -> list[torch.Tensor]:
        """Return this rank's flat parameter of each group: float32 [padded size of the group / ranks]."""
        return [group["params"][0] for group in self.optimizer.param_groups]

    def _own_part(self, tensors: Sequence[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        """Extract this rank's part from full tensors, of which there is one per parameter of a group."""
        whole = torch.zeros(own.numel() * self._world.size, dtype=own.dtype, device=own.device)
        end = 0
        for tensor in tensors:
            whole[end : end + tensor.numel()] = tensor.detach().reshape(-1)
            end += tensor.numel()
        start = self._world.rank * own.numel()
        return whole[start : start + own.numel()].clone()

    def _whole(self, part: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Gather the parts of all ranks and split them into one full tensor per parameter.

        The result is in host memory, because every rank of a node holds a copy.
        """
        whole = torch.cat(self._world.all_gather(part)).cpu()
        numbers = [parameter.numel() for parameter in parameters]
        pieces = whole[: sum(numbers)].split(numbers)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]

    def _require_layout(self) -> None:
        """Verify that ZeRO lays out the weights as saving and loading of moments assumes."""
        for parameters, own in zip(self._groups, self._own_parts(), strict=True):
            if not torch.equal(own.detach(), self._own_part(parameters, own)):
                raise RuntimeError("this version of DeepSpeed lays out weights in an unknown order: install 0.19.8")


class _CallersAutocast(nn.Module):
    """Runs the module under the caller's autocast setting, which DeepSpeed's forward would switch off."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        super().__init__()
        self.module, self._kind = module, kind
        self.remember()

    def remember(self) -> None:
        self._enabled = torch.is_autocast_enabled(self._kind)
        self._dtype = torch.get_autocast_dtype(self._kind)

    def forward(self, *inputs: torch.Tensor) -> Any:
        with torch.autocast(self._kind, self._dtype, enabled=self._enabled):
            return self.module(*inputs)


class _DataParallel:
    """Presents the world through the `mpu` interface of DeepSpeed, which would otherwise create its own process group
    with its own timeout."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get_data_parallel_group(self) -> Any:
        return self._world.group

    def get_data_parallel_world_size(self) -> int:
        return self._world.size

    def get_data_parallel_rank(self) -> int:
        return self._world.rank

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(range(self._world.size))

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def _import_deepspeed(device: torch.device) -> ModuleType:
    # DeepSpeed reads this at import only. Without it, DeepSpeed would use a GPU even if the recipe says cpu.
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"accelerate was started with DeepSpeed, but deepspeed cannot be imported ({error}): run "
            "pip install 'incv[deepspeed]', or start accelerate without DeepSpeed"
        ) from error
    # Hides warnings about our optimiser, which is tested, and about autocast, which _CallersAutocast handles.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # DeepSpeed's shared-memory all-reduce is for inference only, and compiling it now would take 45 s.
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    return deepspeed


def _settings(stage: int, numbers: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # only used for DeepSpeed's own throughput figures
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": min(numbers, _LARGEST_BUCKET),
            "overlap_comm": False,
            "round_robin_gradients": False,
            "compute_grad_norm": False,  # we check the norm before the step; ZeRO's check would skip steps silently
        },
    }
