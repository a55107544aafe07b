"""What a network learns from each row: its label, or a mixture of probabilities; and how rows are mixed."""

import torch

from trainer.acceleration.cuda_graphs import Inputs


def look_up(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the targets of the rows: labels, int64 [rows], or probabilities, float [rows, classes].

    table: by sample_id, one of the two; ids: -1 in fill rows, whose targets do not count. Needs no host-device sync.
    """
    return table[ids.clamp(min=0)]


def mix_images(inputs: Inputs) -> torch.Tensor:
    """Return the images of a step's rows, mixed with their partners' if the step mixes rows (mixup, CutMix)."""
    images = inputs["images"]
    if "shares" not in inputs:
        return images
    partners, shares = inputs["partners"], inputs["shares"]
    own, others = images[: len(shares)], images[partners]
    if "boxes" in inputs:
        return torch.where(_inside(inputs["boxes"], images), others, own)
    share = shares[:, None, None, None]
    return (own.float() * share + others.float() * (1 - share)).to(images.dtype)


def _inside(boxes: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Return which pixels are in each row's box: bool [rows, 1, height, width]."""
    left, top, right, bottom = boxes.unbind(dim=1)
    y, x = (torch.arange(size, device=images.device) for size in images.shape[2:])
    down = (y >= top[:, None]) & (y < bottom[:, None])
    across = (x >= left[:, None]) & (x < right[:, None])
    return (down[:, :, None] & across[:, None, :])[:, None]


def mix_targets(inputs: Inputs, targets: torch.Tensor, part: slice, classes: int) -> torch.Tensor:
    """Return the targets of the rows in `part`, mixed like their images.

    targets: of all rows and guest rows of the step, as `look_up` returns them.
    """
    if "shares" not in inputs:
        return targets[part]
    return mix_pairs(targets[part], targets[inputs["partners"][part]], inputs["shares"][part], classes)


def mix_pairs(own: torch.Tensor, others: torch.Tensor, shares: torch.Tensor, classes: int) -> torch.Tensor:
    """Return `shares` of the own target and the rest of the other, as probabilities: float [rows, classes].

    own, others: labels, int64 [rows], or probabilities, float [rows, classes]; shares: float32 [rows]. Needs no
    host-device sync and no atomic addition.
    """
    share = shares[:, None]
    return one_hot(own, classes) * share + one_hot(others, classes) * (1 - share)


def one_hot(targets: torch.Tensor, classes: int) -> torch.Tensor:
    """Return labels as probabilities, bool [rows, classes]; probabilities as they are."""
    if targets.is_floating_point():
        return targets
    return targets[:, None] == torch.arange(classes, device=targets.device)


def agreement(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the share of its target that the most likely class has: [rows]; for labels, 0 or 1."""
    predicted = logits.argmax(1)
    if not targets.is_floating_point():
        return predicted == targets
    return targets.gather(1, predicted[:, None])[:, 0]
