"""The paper's own numbers, for comparison: Chen, Liao, Chen, Zhang, ICML 2019 (arXiv:1905.05040)."""

from typing import NamedTuple

_NOISE = ("sym20", "sym50", "sym80", "asym40")  # the columns of Table 1


class Reported(NamedTuple):
    """A mean with its standard deviation over 5 runs, in percent."""

    mean: float
    deviation: float


def _row(*values: tuple[float, float]) -> dict[str, Reported]:
    return {name: Reported(*each) for name, each in zip(_NOISE, values, strict=True)}


TABLE1 = {
    "forward_correction": _row((85.08, 0.43), (76.02, 0.19), (34.76, 4.53), (83.55, 2.15)),
    "decoupling": _row((86.72, 0.32), (79.31, 0.62), (36.90, 4.61), (75.27, 0.83)),
    "coteaching": _row((89.05, 0.32), (82.12, 0.59), (16.21, 3.02), (84.55, 2.81)),
    "mentornet": _row((88.36, 0.46), (77.10, 0.44), (28.89, 2.29), (77.33, 0.79)),
    "d2l": _row((86.12, 0.43), (67.39, 13.62), (10.02, 0.04), (85.57, 1.21)),
    "coteaching_incv": _row((89.71, 0.18), (84.78, 0.33), (52.27, 3.50), (86.04, 0.54)),
}
"""Table 1: average test accuracy (%, 5 runs) with standard deviation; ResNet-32 on corrupted CIFAR-10. The paper does
not report standard training."""

TABLE2: dict[str, tuple[str, str]] = {
    "forward_correction": ("61.12 (82.68)", "57.36 (82.36)"),
    "decoupling": ("62.54 (84.74)", "58.26 (82.26)"),
    "coteaching": ("63.58 (85.20)", "61.48 (84.70)"),
    "mentornet": ("63.00 (81.40)", "57.80 (79.92)"),
    "d2l": ("62.68 (84.00)", "57.80 (81.36)"),
    "coteaching_incv": ("65.24 (85.34)", "61.60 (84.98)"),
}
"""Table 2: top-1 (top-5) accuracy (%) on the validation sets of WebVision and ILSVRC12, first 50 classes."""
