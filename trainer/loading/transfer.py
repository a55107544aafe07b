"""Small arrays on their way to the device, without anybody waiting for them."""

import numpy as np
import numpy.typing as npt
import torch

_ALIGNED = 16


def copy_to_device(device: torch.device, *arrays: npt.NDArray[np.generic]) -> list[torch.Tensor]:
    """The arrays as tensors there: to a GPU in one copy from pinned memory, which the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts = np.cumsum([0] + [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays])
    pinned = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=True)
    memory = pinned.numpy()
    for start, array in zip(starts, arrays, strict=False):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_TYPES[array.dtype.name]).view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    ]


_TYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}
