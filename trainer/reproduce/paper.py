"""The paper's own numbers, for comparison: Chen, Liao, Chen, Zhang, ICML 2019 (arXiv:1905.05040)."""

from typing import NamedTuple


class Reported(NamedTuple):
    """A mean with its standard deviation over 5 runs, in percent."""

    mean: float
    deviation: float


TABLE1: dict[str, dict[str, Reported]] = {
    "forward_correction": {
        "sym20": Reported(85.08, 0.43),
        "sym50": Reported(76.02, 0.19),
        "sym80": Reported(34.76, 4.53),
        "asym40": Reported(83.55, 2.15),
    },
    "decoupling": {
        "sym20": Reported(86.72, 0.32),
        "sym50": Reported(79.31, 0.62),
        "sym80": Reported(36.90, 4.61),
        "asym40": Reported(75.27, 0.83),
    },
    "coteaching": {
        "sym20": Reported(89.05, 0.32),
        "sym50": Reported(82.12, 0.59),
        "sym80": Reported(16.21, 3.02),
        "asym40": Reported(84.55, 2.81),
    },
    "mentornet": {
        "sym20": Reported(88.36, 0.46),
        "sym50": Reported(77.10, 0.44),
        "sym80": Reported(28.89, 2.29),
        "asym40": Reported(77.33, 0.79),
    },
    "d2l": {
        "sym20": Reported(86.12, 0.43),
        "sym50": Reported(67.39, 13.62),
        "sym80": Reported(10.02, 0.04),
        "asym40": Reported(85.57, 1.21),
    },
    "coteaching_incv": {
        "sym20": Reported(89.71, 0.18),
        "sym50": Reported(84.78, 0.33),
        "sym80": Reported(52.27, 3.50),
        "asym40": Reported(86.04, 0.54),
    },
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
