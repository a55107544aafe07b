"""The ablation of the recipes `*_plus`: how each row changes them, and the data it uses; overrides of recipes."""

_VALIDATION = "{source: cifar10, split: validation, root: data/cifar10, shards: data/shards/cifar10-validation}"
WITHOUT_TEST_SET = (
    "data.train.split=fit",
    "data.train.shards=data/shards/cifar10-fit",
    f"data.eval={{validation: {_VALIDATION}}}",
)
"""Train on 45,000 images and evaluate on the other 5,000 of the training set, so that a choice may follow from it."""

# The rates of the paper's INCV with SGD, on WebVision (halved after 20 and 30 epochs, a tenth after 40), and those of
# DeVries and Taylor (2017) for 200 epochs (a fifth after 60, 120 and 160).
_MILESTONES = (
    "incv.optimizer.schedule=milestones",
    "incv.optimizer.milestones=[[20, 0.025], [30, 0.0125], [40, 0.005]]",
    "coteaching_incv.optimizer.schedule=milestones",
    "coteaching_incv.optimizer.milestones=[[60, 0.02], [120, 0.004], [160, 0.0008]]",
)
_ADAM = "{kind: adam, learning_rate: 0.001, weight_decay: 0.0002, decay_scope: residual_convs, schedule: cosine}"

CHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "plus_without_cosine": ("plus, with milestones instead of the cosine", _MILESTONES),
    "plus_without_cutout": ("plus, without Cutout", ("image.cutout=0",)),
    "plus_without_ema": ("plus, without weight averaging", ("coteaching_incv.ema=null",)),
    "plus_with_adam": (
        "plus, with the paper's Adam instead of SGD",
        (f"incv.optimizer={_ADAM}", f"coteaching_incv.optimizer={_ADAM}"),
    ),
    "plus_with_formula": (
        "plus, with the paper's formula for the noise of S",
        ("coteaching_incv.noise_of_selected=formula",),
    ),
    # Of asymmetric noise, only the formula reads the estimate.
    "plus_with_paper_estimate": (
        "plus, with the paper's formula and noise estimate",
        ("coteaching_incv.noise_of_selected=formula", "incv.noise_estimate=paper"),
    ),
    "plus_with_early_candidates": (
        "plus, with candidates after 80 epochs instead of 160",
        ("coteaching_incv.warmup_epochs=from_noise",),
    ),
}
"""By the name of the row: its title, and the overrides that take one part of plus away."""
