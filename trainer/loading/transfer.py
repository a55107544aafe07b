"""Non-blocking copies of small arrays between host and device."""

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16


def copy_to_device(device: torch.device, *arrays: npt.NDArray[np.generic]) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`; for a GPU, with one non-blocking copy from pinned memory."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts = np.cumsum([0] + [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    pinned = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=True)
    buffer = pinned.numpy()
    for start, array in zip(starts, arrays, strict=False):
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = pinned.to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    ]


_DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}


class HostCopy:
    """A copy of a tensor on the host; for a tensor on a GPU, made once the GPU has computed it, without waiting."""

    def __init__(self, tensor: torch.Tensor) -> None:
        on_gpu = tensor.is_cuda
        self._copied = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
        self._copied.copy_(tensor, non_blocking=on_gpu)
        self._done = torch.cuda.current_stream(tensor.device).record_event() if on_gpu else None

    @property
    def is_ready(self) -> bool:
        return self._done is None or self._done.query()

    def get(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self._done is not None:
            self._done.synchronize()
        return self._copied
