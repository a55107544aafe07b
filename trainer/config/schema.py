"""The base sections of a recipe: frozen, typed, strict. Training methods define their own sections (trainer/methods).

A result key changes what is computed. An execution key, declared with `execution`, changes only where it is computed
and how fast.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config.augmentation import (
    AugmentOptions,
    ColorJitterConfig,
    MixupConfig,
    RandAugmentConfig,
    RandomResizedCropConfig,
)
from trainer.config.data import DataSections, LabelsConfig
from trainer.config.losses import AnyLoss, LossConfig
from trainer.config.optimisation import EmaConfig, EvaluationConfig, OptimizerConfig
from trainer.config.section import PathText, Positive, Precision, Ratio, Section, execution


class ImageConfig(Section):
    """Crops, flips and normalisation of images."""

    size: Positive
    """Side of the network's square input, in pixels; may be left out if the recipe names initial weights.

    With `model.pretrained` or `model.weights`, the keys size, mean and std default to the values of the weights.
    """
    resize: Positive | None = None
    """Crop as if the shorter side had first been resized to this many pixels (the paper: 256 for WebVision)."""
    pad: Annotated[int, Field(ge=0)] = 0
    """Pixels of padding that a training crop may include (the paper: 4 for CIFAR-10)."""
    fill: Literal["zero", "edge"] = "zero"
    """Pixels of the padding: zero is black, edge repeats the outermost pixels."""
    flip: bool = True
    """Mirror training crops horizontally, with probability 1/2."""
    random_resized_crop: RandomResizedCropConfig | None = None
    """Training crops of random area and aspect ratio; null: of one size. Predict passes always use centre crops."""
    auto_augment: Literal["cifar10", "imagenet"] | None = None
    """AutoAugment (Cubuk et al. 2018): up to two operations per image, by the policy found for this data set.

    Applied before RandAugment.
    """
    rand_augment: RandAugmentConfig = RandAugmentConfig()
    color_jitter: ColorJitterConfig = ColorJitterConfig()
    """Applied after RandAugment."""
    augment: AugmentOptions = Field(default_factory=dict)
    """Options of augmentations that installed packages offer, by name; applied after all others, in order of name."""
    cutout: Annotated[int, Field(ge=0)] = 0
    """Side of the square, in pixels, that is blanked out at a random place in each training image; 0: none.

    It is set to the mean, and may lie partly outside the image (Cutout, DeVries and Taylor 2017).
    """
    chroma: Literal["smooth", "fast"] = "smooth"
    """Chroma upsampling of the GPU's JPEG decoder. smooth: as CPU decoders do it; fast: by repeating pixels."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of each channel (red, green, blue), subtracted from pixels in the range 0 to 1."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, by which pixels are then divided."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "ImageConfig":
        if min(self.std) <= 0:
            raise ValueError("image.std must be above 0 for each channel: pixels are divided by it")
        if self.pad and self.resize is not None:
            raise ValueError("image.pad and image.resize cannot both be set: make image.resize null or image.pad 0")
        if self.pad and self.random_resized_crop is not None:
            raise ValueError(
                "image.pad and image.random_resized_crop cannot both be set: make image.pad 0, or "
                "image.random_resized_crop null"
            )
        if self.cutout > self.size:
            raise ValueError("image.cutout is larger than image.size: it would blank out most of the image")
        if self.resize is not None and self.resize < self.size:
            raise ValueError("image.resize is smaller than image.size: no crop of that size would fit")
        return self


Trainable = Literal["all", "classifier"]
NO_NETWORK = "none"
"""`model.name` of a recipe that runs no network."""


class ModelConfig(Section):
    """The network; all folds and methods train it."""

    name: str
    """Any timm model, or a built-in network: cifar_resnet20, cifar_resnet32, cifar_resnet110 or digits_cnn.

    none: no network, if `incv.features_file` or `incv.predictions_file` takes its place and no method is trained.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments for timm.create_model."""
    pretrained: bool = execution(False)
    """Start from timm's weights of `name`, with a new classifier; downloaded if the hub's cache does not have them.

    The checksum of the file counts as a result key, whether `pretrained` or `weights` names it.
    """
    weights: PathText | None = execution(None)
    """Start from the weights in this file, with a new classifier: .safetensors, or .pth or .pt without pickled code.

    Its checksum counts as a result key; its path does not.
    """
    trainable: Trainable = "all"
    """classifier: train the last layer only, on the features of the initial weights, which stay as they are.

    The backward pass then costs almost nothing, and wrong labels can hardly be memorised, but the network is only as
    good as its initial weights.
    """
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the rows of all ranks instead of each rank's own; GPUs only."""

    @property
    def has_initial_weights(self) -> bool:
        """Whether networks start from given weights and not from random ones."""
        return self.pretrained or self.weights is not None

    @property
    def is_none(self) -> bool:
        """Whether there is no network."""
        return self.name == NO_NETWORK

    @model_validator(mode="after")
    def _check_consistency(self) -> "ModelConfig":
        if self.is_none and self.has_initial_weights:
            raise ValueError(
                "`model.name: none` has no weights: name their network, or remove model.weights and model.pretrained"
            )
        if self.pretrained and self.weights is not None:
            raise ValueError(
                "model.pretrained and model.weights exclude each other: set model.pretrained to false to use the "
                "file, or model.weights to null to use timm's weights"
            )
        if self.trainable == "classifier" and not self.has_initial_weights:
            raise ValueError(
                "model.trainable is 'classifier', but random features are of no use: set model.pretrained or "
                "model.weights, or set model.trainable to 'all'"
            )
        if taken := sorted({"model_name", "name", "num_classes", "seed"} & self.options.keys()):
            raise ValueError(f"model.options.{taken[0]} is set from other keys or from the data: remove it")
        return self


class BatchConfig(Section):
    """The number of samples in a step."""

    global_: Literal["auto"] | Positive = Field(alias="global")
    """Rows of the selected set S per step, summed over all ranks.

    auto: the largest power of two from 16 to 128 that gives a fold at least 8 steps per epoch. It is determined when
    the data is known; config.resolved.yaml has the number.
    """
    micro: Positive | None = execution(None)
    """Rows per micro-batch, the most a GPU processes at once; gradients are accumulated. null: all its rows.

    BatchNorm sees one micro-batch at a time; manifest.json records its number of rows.
    """

    @property
    def rows(self) -> int:
        """`batch.global` as a number; `auto` must have been resolved before."""
        assert isinstance(self.global_, int), "batch.global is auto: call trainer.config.fitting.resolve_batch first"
        return self.global_


class OrderConfig(Section):
    """The order of samples in an epoch."""

    kind: Literal["shuffled", "windowed"] = "shuffled"
    """windowed, for slow storage: shards in random order, samples shuffled within a window of a few shards."""
    window: Positive = 16
    """Shards per window. Each shard has samples of all classes, since it takes every n-th sample of the source."""


class TrainingConfig(Section):
    """What every training has: the base of the section of a method."""

    epochs: Positive
    """Passes over the training samples."""
    min_steps: Annotated[int, Field(ge=0)] = 0
    """Raise `epochs` until the training has this many steps, so that few samples get enough of them.

    Milestones, warm-ups and ramps, which are counted in epochs, are stretched by the same factor.
    """
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread evenly over all classes in the training loss; 0: off.

    It affects neither the choice of samples by their loss nor the losses and probabilities of predictions.
    """
    ema: EmaConfig | None = None
    """Average the weights over the steps and use the average instead of the last weights; null: off."""
    optimizer: OptimizerConfig = OptimizerConfig()
    mixup: MixupConfig = MixupConfig()
    """Only for the folds of INCV (`incv`), `standard` and `standard_incv`: other methods need one label per image."""

    @model_validator(mode="after")
    def _check_warmup(self) -> "TrainingConfig":
        optimizer = self.optimizer
        if optimizer.schedule == "cosine" and optimizer.warmup_epochs >= self.epochs:
            raise ValueError(
                f"optimizer.warmup_epochs = {optimizer.warmup_epochs:g} leaves none of the {self.epochs} epochs for "
                "`optimizer.schedule: cosine`: lower optimizer.warmup_epochs, or raise epochs"
            )
        return self


class LabelTrainingConfig(TrainingConfig):
    """A training on the given labels, with a choice of the loss."""

    loss: AnyLoss = LossConfig()
    """The cross-entropy, or another loss of each row, such as one that is robust to wrong labels."""


class IncvConfig(LabelTrainingConfig):
    """INCV, the paper's Algorithm 2; with rounds: 1 and remove_ratio: 0 it is Algorithm 1."""

    judge: Literal["networks", "features"] = "networks"
    """networks: train a network in each fold, as in the paper.

    features: run the initial weights over all images once, and fit a logistic regression in each fold, multiplied by
    a vote of the nearest neighbours. It takes minutes where the training of networks takes hours, for one round.
    """
    features_file: PathText | None = execution(None)
    """`judge: features`: features from elsewhere, so that no network is run over the images.

    .npy: numbers [images, features], rows in the order of the data set (index.parquet beside its shards). .parquet: a
    column `key`, and one column of lists or columns of numbers. The checksum of the file counts as a result key; its
    path does not.
    """
    predictions_file: PathText | None = execution(None)
    """`judge: features`: held-out probabilities of all classes from elsewhere, in place of the logistic regression.

    .npy: [images, classes], rows as above, columns in the order of the class names. .parquet: a column `key`, and a
    column named by each class. The checksum of the file counts as a result key; its path does not.
    """
    against: str | None = None
    """`judge: features`: the evaluation set in which images of the training set are looked for, such as `test`.

    If no method is evaluated on it, its classes may differ.
    """
    epochs: Annotated[int, Field(ge=0)] = 0
    """Passes over the training samples in each fold; not used with `judge: features`."""
    rounds: Positive = 4
    """Rounds of noisy cross-validation."""
    folds: Annotated[int, Field(ge=2, le=64)] = 2
    """K: the candidates are split into K parts, and each part is judged by a network that is trained on the selected
    samples and the other parts (K-fold cross-validation). 2: halves, as in the paper.

    With more folds, each network is trained on more samples, and a round costs about K - 1 times as much.
    """
    halves: Literal[1, 2] = 2
    """How many halves are judged. 2: each, by the network that is trained on the other; 1: the second, by one network
    that is trained on the first, in a single round (section 5.1 of the paper)."""
    init: Literal["same", "fresh"] = "same"
    """same: all folds start from the same weights (released code); fresh: each from new ones (paper)."""
    round_network: Literal["released_rule", "best", "last"] = "last"
    """Which epoch's network predicts the held-out half; see docs/design-notes.md."""
    agree_top_k: Positive = 1
    """A prediction agrees with a label that is among its k most likely classes."""
    noise_kind: Literal["symmetric", "asymmetric"] = "symmetric"
    """The kind of noise that INCV assumes; independent of the `labels` section."""
    noise_estimate: Literal["paper", "confident", "confidence_curve", "combined"] = "paper"
    """Which noise estimate is used for r, E0, round_network's rule and the noise of S; see docs/design-notes.md."""
    remove_ratio: Literal["from_noise"] | Annotated[float, Field(ge=0)] = "from_noise"
    """r in removed = floor(r * selected), per fold; from_noise: min(2, ε/(1-ε)), or 0 for asymmetric noise."""
    min_per_class: Annotated[int, Field(ge=0)] = 0
    """A class with fewer selected samples is filled up with its samples of smallest loss."""
    max_unusable: Ratio = 0.01
    """The run fails if more than this fraction of predictions is non-finite or has an unreadable image."""

    @model_validator(mode="after")
    def _check_judge(self) -> "IncvConfig":
        if self.judge == "networks":
            if not self.epochs:
                raise ValueError("epochs is needed: the passes that the network of a fold makes over its samples")
            if self.noise_estimate == "combined":
                raise ValueError("`noise_estimate: combined` needs `judge: features`: set noise_estimate to another")
            for name in ("features_file", "predictions_file", "against"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs `judge: features`: set judge, or set {name} to null")
        elif self.rounds != 1 or self.halves != 2:
            raise ValueError("`judge: features` is for one round in which each fold is judged: set rounds to 1")
        return self

    @model_validator(mode="after")
    def _check_halves(self) -> "IncvConfig":
        if self.halves == 1 and self.rounds != 1:
            raise ValueError(f"halves = 1 is for one round, not for {self.rounds}: set rounds to 1, or halves to 2")
        if self.halves == 1 and self.folds != 2:
            raise ValueError(f"halves = 1 is for two folds, not for {self.folds}: set folds to 2, or halves to 2")
        return self

    @property
    def has_files(self) -> bool:
        """Whether features or predictions come from a file."""
        return self.features_file is not None or self.predictions_file is not None

    @property
    def trained_folds(self) -> int:
        """Number of networks, or classifiers, that a round trains; 1 if their predictions come from a file."""
        return 1 if self.halves == 1 or self.predictions_file is not None else self.folds

    def largest_fold(self, samples: int) -> int:
        """Number of samples that the largest fold trains on, of those that are split among the folds."""
        return samples - samples // self.folds


class ExecutionConfig(Section):
    """Where and how fast a run computes; no key changes results."""

    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device to compute on; auto: a GPU if there is one."""
    world: Positive | None = execution(None)
    """Required number of processes; any other number is an error. null: accept what the launcher starts."""
    backend: Literal["auto", "nccl", "gloo"] = execution("auto")
    """Communication backend. auto: NCCL on GPUs, gloo on CPUs. Processes that share a GPU need gloo."""
    folds: Literal["auto", "in_turn", "side_by_side"] = execution("auto")
    """How to train the folds of a round of INCV.

    side_by_side: every second fold on each half of the ranks, or all at once in one process; in_turn: one after the
    other on all ranks; auto: side by side if the numbers of ranks and folds are even, or on one GPU if the data set
    fits in its memory.
    """
    start_timeout: Annotated[float, Field(gt=0)] = execution(1800.0)
    """Seconds that ranks wait for each other up to the first step, which includes opening data and compiling."""
    timeout: Annotated[float, Field(gt=0)] = execution(300.0)
    """Seconds that ranks wait for each other after the first step."""
    lost_after: Annotated[float, Field(gt=0)] = execution(30.0)
    """A rank that sends no heartbeat for this many seconds counts as dead, and the others exit."""
    graphs: Literal["auto"] | bool = execution("auto")
    """Run training steps as CUDA graphs; auto: on a GPU, unless another setting rules it out."""
    compile: Literal["auto"] | bool = execution("auto")
    """Compile the networks block by block; auto: on a GPU, if the training is long enough for it to pay off."""
    threads: Positive | None = execution(None)
    """CPU threads that torch uses; null: one per core."""
    loader: Literal["auto", "cpu", "resident", "dali"] = execution("auto")
    """How images are decoded and cropped: on CPU threads, once into memory, or by DALI; see docs/webvision.md."""
    workers: Positive = execution(2)
    """Number of decoding threads, and of packing processes."""
    predict_batch: Positive = execution(256)
    """Rows per batch of a predict pass, on each rank."""
    log_every: Positive = execution(20)
    """Steps between two lines of metrics.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = execution(())
    """Also write the lines of metrics.jsonl for TensorBoard or Weights & Biases (offline, unless WANDB_MODE is set).

    Each needs the package extra of the same name.
    """
    checkpoint_every: Positive = execution(1000)
    """Steps between two checkpoints; never more than a fifth of the training run."""
    deterministic: bool = execution(False)
    """Resume bit-identically on a GPU, at some cost in speed. A CPU always resumes bit-identically."""
    features: PathText | None = execution(None)
    """Folder in which features of images are kept, and found by other runs; null: `features` in the run directory."""
    trace: bool = execution(False)
    """Log the sample_ids, draws and chosen rows of each step to logs/trace-rank*.jsonl, to compare runs."""


class Recipe(Section):
    """All settings of a run. `trainer.run.recipe` adds a section for each registered training method."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of initial weights, sample order, crops, folds and label noise."""
    data: DataSections
    labels: LabelsConfig = LabelsConfig()
    image: ImageConfig
    model: ModelConfig
    batch: BatchConfig
    order: OrderConfig = OrderConfig()
    precision: Precision = "fp32"
    """Number format of forward and backward passes; weights and optimiser state are always fp32."""
    methods: tuple[str, ...]
    """The training methods to run, by their registered names; []: INCV alone."""
    incv: IncvConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @model_validator(mode="after")
    def _check_judge(self) -> "Recipe":
        has_files = self.incv is not None and self.incv.has_files
        by_features = self.incv is not None and self.incv.judge == "features"
        if by_features and not has_files and not self.model.has_initial_weights:
            raise ValueError(
                "`incv.judge: features` needs the features of trained weights: set model.pretrained, "
                "model.weights or incv.features_file, or set incv.judge to networks and incv.epochs"
            )
        if self.model.is_none and (self.methods or not has_files):
            raise ValueError(
                "`model.name: none` is for runs without a network: set incv.features_file or incv.predictions_file "
                "and `methods: []`, or name a network"
            )
        if self.incv is not None and self.incv.against not in (None, *self.data.eval):
            raise ValueError(
                f"incv.against is {self.incv.against}, which is no evaluation set: add data.eval.{self.incv.against}"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> "Recipe":
        sets = self.data.evaluation_names()
        if self.evaluation.every and not sets:
            raise ValueError(
                "evaluation.every needs an evaluation set: add one to data.eval, or set data.eval_fraction"
            )
        if self.evaluation.choose_on not in (None, *sets):
            raise ValueError(
                f"evaluation.choose_on is {self.evaluation.choose_on}, which is no evaluation set: choose one of "
                f"{', '.join(sets)}"
            )
        return self

    def section(self, name: str) -> Any:
        """Return the section of a training method, or None if the recipe has none."""
        return getattr(self, name, None)
