"""The base sections of a recipe: frozen, typed, strict. Training methods bring their own sections (trainer/methods).

A result key changes what is computed. An execution key, marked by `execution`, only changes where and how fast.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Precision = Literal["fp32", "bf16", "fp16"]


def execution(default: Any, **limits: Any) -> Any:
    """A key that does not change results: it is in no hash and may differ between two starts of a run."""
    return Field(default, json_schema_extra={"execution": True}, **limits)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class DataConfig(Section):
    """One packed split of a data set."""

    source: str
    """Name of a source in shards/sources: webvision, ilsvrc12, image_folder, cifar10, digits."""
    split: str = "train"
    subset: str | None = None
    """A part the source knows by name (webvision: google, flickr or all); null: the source's default."""
    classes: Positive | None = None
    """Only the first so many classes of the source; null: all."""
    resize: Positive | None = None
    """Shorter side of the images as packed; null: packed as they are."""
    shards: str = execution(...)
    """Folder of the packed split; made by the `pack` stage where it does not exist."""
    root: str | None = execution(None)
    """Where the raw images are; only packing reads it."""
    limit: Positive | None = None
    """Use only this many samples, chosen evenly over the classes; null: all."""


class DataSections(Section):
    train: DataConfig
    eval: dict[str, DataConfig] = Field(default_factory=dict)
    """Evaluation sets by the name they have in the report."""
    max_unreadable: Ratio = execution(0.01)
    """More unreadable images than this share of the training samples, met in training, end the run with an error."""


class LabelsConfig(Section):
    """The labels a run trains on: the source's, a file's, or the source's made noisy."""

    noise: str = "none"
    """none, or a kind that trainer/run/noise_kinds.py registers: symmetric, asymmetric (pair flip), matrix."""
    ratio: Ratio = 0.0
    """Share of labels flipped (symmetric: to any other class; asymmetric: y -> y + 1)."""
    matrix: tuple[tuple[float, ...], ...] | None = None
    """T[i][j] = P(label j | class i), for `noise: matrix`."""
    seed: int | None = None
    """Seed of the corruption; null: the run's seed."""
    file: str | None = execution(None)
    """CSV with columns key,label; or one label a line in the source's order. Replaces the source's labels.

    Its checksum stands for it among the result keys.
    """
    source_is_true: bool | None = None
    """Whether the source's own labels are the truth that selections are measured against.

    null: they are where this recipe makes them noisy, and nobody knows where it takes them from the web or a file.
    """

    @property
    def truth_is_known(self) -> bool:
        return self.noise != "none" if self.source_is_true is None else self.source_is_true

    @model_validator(mode="after")
    def _check_consistency(self) -> "LabelsConfig":
        if self.file is not None and self.noise != "none":
            raise ValueError("labels.file and labels.noise exclude each other: set labels.noise: none")
        return self


class ImageConfig(Section):
    size: Positive
    """Pixels of the network's square input."""
    resize: Positive | None = None
    """Cut as if the shorter side were resized to this first (the paper's 256 for WebVision)."""
    pad: Annotated[int, Field(ge=0)] = 0
    """Pixels of padding a training crop may reach into (the paper's 4 for CIFAR-10)."""
    fill: Literal["zero", "edge"] = "zero"
    flip: bool = True
    chroma: Literal["smooth", "fast"] = "smooth"
    """How a GPU decoder upsamples the colours of a JPEG: smooth, as CPU decoders do; fast, by repeating them."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @model_validator(mode="after")
    def _check_consistency(self) -> "ImageConfig":
        if min(self.std) <= 0:
            raise ValueError("image.std must be above 0 for each channel: pixels are divided by it")
        if self.pad and self.resize is not None:
            raise ValueError("image.pad is for images cut as they are: set image.resize to null or image.pad to 0")
        if self.resize is not None and self.resize < self.size:
            raise ValueError("image.resize is smaller than image.size: no crop of that size would fit")
        return self


class ModelConfig(Section):
    name: str
    """Any timm name, or one of ours: cifar_resnet20, cifar_resnet32, cifar_resnet110, digits_cnn."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of timm.create_model."""
    sync_batchnorm: bool = False
    """BatchNorm over the rows of all ranks instead of each rank's own; GPUs only."""


class BatchConfig(Section):
    global_: Positive = Field(alias="global")
    """Rows of S in a step, over all ranks."""
    micro: Positive | None = execution(None)
    """Most rows a GPU holds at once; gradients of the parts of a batch are added up. null: all its rows at once.

    BatchNorm sees a part at a time: manifest.json records how many rows that were.
    """


class OrderConfig(Section):
    """In which order an epoch goes through its samples."""

    kind: Literal["shuffled", "windowed"] = "shuffled"
    """windowed: shards in random order, a few at a time, samples shuffled inside; for storage that reads slowly."""
    window: Positive = 16
    """Shards in a window; each holds something of every class, since shards are cut across the source's list."""


class OptimizerConfig(Section):
    kind: Literal["adam", "sgd"] = "adam"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    milestones: tuple[tuple[int, float], ...] = ()
    """[epoch, learning rate]: the rate after exactly that many epochs."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """Epochs of linear growth to `learning_rate`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 inside the gradient (never decoupled)."""
    decay_scope: Literal["all", "residual_convs"] = "all"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD only."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of a network's gradient, each network by itself; null: not clipped."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "OptimizerConfig":
        epochs = [epoch for epoch, _ in self.milestones]
        if epochs != sorted(set(epochs)) or any(epoch < 0 or rate <= 0 for epoch, rate in self.milestones):
            raise ValueError("optimizer.milestones are [epoch, learning rate], epochs rising, rates above 0")
        return self


class TrainingConfig(Section):
    epochs: Positive
    optimizer: OptimizerConfig = OptimizerConfig()


class IncvConfig(TrainingConfig):
    """Algorithm 2; with rounds: 1 and remove_ratio: 0 it is Algorithm 1."""

    rounds: Positive = 4
    init: Literal["same", "fresh"] = "same"
    """same: all folds start from one set of weights (released code); fresh: each from its own (paper)."""
    round_network: Literal["released_rule", "best", "last"] = "last"
    """Which epoch's network judges: see docs/architecture.md."""
    agree_top_k: Positive = 1
    """A sample agrees if its label is among the k likeliest."""
    noise_kind: Literal["symmetric", "asymmetric"] = "symmetric"
    """What we assume of the noise; never read from the corruption setting."""
    noise_estimate: Literal["paper", "confident"] = "paper"
    """Which estimate r, E0, the network rule and the noise of S use."""
    remove_ratio: Literal["from_noise"] | Annotated[float, Field(ge=0)] = "from_noise"
    """r: removed = floor(r * selected), a half; from_noise: min(2, ε/(1-ε)), and 0 for asymmetric noise."""
    min_per_class: Annotated[int, Field(ge=0)] = 0
    """A class with fewer selected samples is filled up by smallest loss."""
    max_unusable: Ratio = 0.01
    """More unreadable or non-finite predictions than this share end the run with an error."""


class ExecutionConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    world: Positive | None = execution(None)
    """The number of processes the launcher promised; another number is an error. null: whatever it starts."""
    backend: Literal["auto", "nccl", "gloo"] = execution("auto")
    """How ranks talk: auto is NCCL between GPUs and gloo between CPUs; gloo lets processes share a GPU."""
    folds: Literal["auto", "in_turn", "side_by_side"] = execution("auto")
    """Whether both folds of INCV are trained at once, by half of the ranks each or in one process, or in turn by all.

    auto: at once where the number of ranks is even, or where one GPU has a set small enough to be kept there.
    """
    start_timeout: Annotated[float, Field(gt=0)] = execution(1800.0)
    """Seconds ranks wait for each other until the first step: data sets are opened, programs compiled."""
    timeout: Annotated[float, Field(gt=0)] = execution(300.0)
    """The same after the first step."""
    lost_after: Annotated[float, Field(gt=0)] = execution(30.0)
    """A rank that gave no sign of life for so many seconds is taken for dead, and the others end."""
    graphs: Literal["auto"] | bool = execution("auto")
    """Replay the step from CUDA graphs; auto: on a GPU, where nothing in the recipe forbids it."""
    compile: Literal["auto"] | bool = execution("auto")
    """Compile the networks by block; auto: on a GPU, in trainings long enough to repay the minute it takes."""
    threads: Positive | None = execution(None)
    """CPU threads of torch; null: one a core."""
    loader: Literal["auto", "cpu", "resident", "dali"] = execution("auto")
    workers: Positive = execution(2)
    """Threads that decode, processes that pack."""
    predict_batch: Positive = execution(256)
    log_every: Positive = execution(20)
    """Steps between two lines of metrics."""
    checkpoint_every: Positive = execution(1000)
    """Steps between two checkpoints; at most a fifth of the training is ever at stake."""
    deterministic: bool = execution(False)
    """Bit-identical resume on a GPU, at some cost; a CPU always is."""
    trace: bool = execution(False)
    """Write each step's sample_ids, boxes and chosen rows to logs/trace-rank*.jsonl: to compare two runs."""


class Recipe(Section):
    """A whole run. `trainer.run.recipe` adds a section for each registered training method."""

    seed: Annotated[int, Field(ge=0)] = 0
    data: DataSections
    labels: LabelsConfig = LabelsConfig()
    image: ImageConfig
    model: ModelConfig
    batch: BatchConfig
    order: OrderConfig = OrderConfig()
    precision: Precision = "fp32"
    methods: Annotated[tuple[str, ...], Field(min_length=1)]
    """The training methods to run, by their registered names."""
    incv: IncvConfig | None = None
    execution: ExecutionConfig = ExecutionConfig()

    def section(self, name: str) -> Any:
        """The section of a training method; None where the recipe has none."""
        return getattr(self, name, None)
