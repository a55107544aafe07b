"""Whether an audit takes minutes: from the table of backbones on a GPU, measured on a CPU."""

from collections.abc import Callable

from shards.errors import InputError
from trainer.auditing.backbones import find_backbone
from trainer.auditing.settings import Start

_FEW_MINUTES = 4 * 60
_GPU_MINUTES = 10 * 60
"""On the modest GPU of the table; others take a fraction of it."""
_CERTAIN = 2.0
"""How far from the limit the time must be, by the GMACs of what was measured, for it not to be measured too."""


class Duration:
    """Called with the network of an audit and its size of images, tells whether the audit takes minutes."""

    def __init__(self, device: str, samples: int, measure: Callable[[Start], float]) -> None:
        """measure: returns the seconds on this CPU; may raise InputError, such as for a network of one size only."""
        self._device, self._samples, self._measure = device, samples, measure
        self._latest = 0.0
        """Seconds per GMAC of an image, of the backbone that was measured last."""
        self._seconds_per_gmac: dict[str, float] = {}
        """The same of each backbone."""
        self._measured: dict[tuple[str, int], bool] = {}

    def __call__(self, start: Start) -> bool:
        size = start.image.get("size")
        backbone = find_backbone(start.model)
        if size is None:
            return True
        if self._device != "cpu":
            return backbone is None or backbone.gpu_seconds(self._samples, size) <= _GPU_MINUTES
        key = (start.model, size)
        if key not in self._measured:
            gmacs = backbone.gmacs_at(size) if backbone is not None else None
            self._measured[key] = self._decide(start, gmacs)
        return self._measured[key]

    def _decide(self, start: Start, gmacs: float | None) -> bool:
        if gmacs and gmacs * self._latest > _CERTAIN * _FEW_MINUTES:
            return False
        own = self._seconds_per_gmac.get(start.model)
        if gmacs and own and gmacs * own * _CERTAIN <= _FEW_MINUTES:
            return True
        try:
            seconds = self._measure(start)
        except InputError:
            return False
        if gmacs:
            self._latest = self._seconds_per_gmac[start.model] = seconds / gmacs
        return seconds <= _FEW_MINUTES
