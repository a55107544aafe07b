"""Estimates time and memory of a recipe's trainings and predict passes on N GPUs, from FLOPs and measured rates."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from shards.errors import ConfigError
from trainer import theory
from trainer.acceleration.policy import should_compile
from trainer.config.fitting import count_steps, fit_section
from trainer.config.schema import Recipe, TrainingConfig
from trainer.distributed.world import SINGLE_PROCESS
from trainer.estimate import measured
from trainer.estimate.probe import NetworkCost
from trainer.incv.folds import folds_side_by_side
from trainer.incv.noise_estimates import remove_ratio, uses_best_epoch
from trainer.loading.resident_loader import MAX_RESIDENT_BYTES
from trainer.loading.sample_order import candidate_rows
from trainer.methods.method import Epochs, ExpectedSizes
from trainer.methods.registry import get_method, methods_of
from trainer.passes.forward import WORTH_COMPILING
from trainer.run.preflight import check_rows
from trainer.run.stage_graph import find_stage, stages_of


def all_reduce_seconds(parameters: int, gpus: int) -> float:
    """Return the seconds per step of a ring all-reduce of fp32 gradients, not overlapped with the backward."""
    sent = 2 * (gpus - 1) / gpus * 4 * parameters  # bytes, by each GPU
    one_node = gpus <= measured.GPUS_PER_NODE
    bandwidth = measured.NVLINK_BYTES_PER_S if one_node else measured.NETWORK_BYTES_PER_S
    latency = measured.COLLECTIVES_PER_STEP * 2 * math.log2(gpus) * measured.HOP_S
    return sent / bandwidth + latency


@dataclass(frozen=True)
class PhaseCost:
    """The cost, on each GPU involved, of training steps of equal shape or of predict passes over one set."""

    stage: str
    count: float
    """Number of steps or passes; of both folds together if they share GPUs."""
    images: int
    """Images per step or pass; the seconds below are also per step or pass."""
    compute_s: dict[str, float]
    """Seconds by resource; these do not overlap."""
    decoding_s: float
    compiled: bool
    rows_at_once: int = 0
    """Rows whose activations are in memory at once; 0 for predict passes."""
    memory_bytes: float = 0.0

    @property
    def seconds_by(self) -> dict[str, float]:
        """Total seconds by resource. Decoding overlaps with compute, so only the slower of the two counts."""
        decodes = self.decoding_s > sum(self.compute_s.values())
        slower = {"decoding": self.decoding_s} if decodes else self.compute_s
        return {name: seconds * self.count for name, seconds in slower.items()}

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by.values())

    @property
    def images_per_s(self) -> float:
        return self.images * self.count / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class CostModel:
    """The cost of a recipe as a function of the number of GPUs."""

    recipe: Recipe
    network: NetworkCost
    samples: int
    classes: int
    eval_samples: tuple[int, ...] = ()
    """Number of samples of each evaluation set."""
    probed: measured.MeasuredNetwork | None = None
    """The network as measured on this machine; None: estimate for H200 GPUs."""

    @property
    def reference(self) -> measured.MeasuredNetwork:
        """The network as probed on this machine, or the measured one with the nearest image size."""
        size = self.recipe.image.size
        return self.probed or min(measured.NETWORKS, key=lambda one: abs(math.log(one.pixels / size)))

    @property
    def decoded_per_s(self) -> float:
        """Decoded images/s per GPU; infinite if the decoded images stay in GPU memory."""
        image, execution = self.recipe.image, self.recipe.execution
        small = image.resize is None and self.samples * 3 * image.size**2 <= MAX_RESIDENT_BYTES
        if execution.loader == "resident" or (execution.loader == "auto" and small):
            return math.inf
        if execution.loader == "cpu" or not self.reference.on_gpu:
            return measured.WORKER_IMAGES_PER_S * execution.workers
        return measured.DALI_IMAGES_PER_S[image.chroma]

    @property
    def noise(self) -> float:
        """The noise ratio ε by Eq. 4 or 5 for the assumed agreement; 0 without INCV."""
        classes, incv = max(self.classes, 2), self.recipe.incv
        return theory.noise_from_accuracy(measured.AGREEMENT, classes, incv.noise_kind) if incv else 0.0

    def expect_rounds(self) -> list[tuple[int, int]]:
        """Return |S| and |C| before each round and after the last, if a share AGREEMENT of the labels agrees."""
        incv = self.recipe.incv
        if incv is None:
            return [(self.samples, 0)]
        sizes = [(0, self.samples * incv.halves // 2)]
        while len(sizes) <= incv.rounds and sizes[-1][1] >= 2:
            selected, candidates = sizes[-1]
            agreeing = round(measured.AGREEMENT * candidates)
            removed = min(int(remove_ratio(incv, self.noise) * agreeing), candidates - agreeing)
            sizes.append((selected + agreeing, candidates - agreeing - removed))
        return sizes

    def scale_rates(self, compiled: bool) -> tuple[float, float, float]:
        """Return, for one network, a step's seconds per row and fixed seconds, and a forward pass's share of it."""
        reference, network = self.reference, self.network
        rates = reference.compiled if compiled else reference.eager
        slowdown = measured.FP32_SLOWDOWN if self.probed is None and self.recipe.precision == "fp32" else 1.0
        row_s = rates.row_s * slowdown * network.step_flops / reference.step_flops
        forward_share = network.forward_flops / network.step_flops / rates.forward_efficiency
        return row_s, rates.fixed_s * network.layers / reference.layers, forward_share

    def cost_run(self, gpus: int) -> list[PhaseCost]:
        """Return the cost of all trainings and predict passes; raises ConfigError if the run would be refused."""
        recipe = self.recipe
        if gpus > recipe.batch.rows:
            raise ConfigError(f"batch.global = {recipe.batch.rows} rows are fewer than one per GPU")
        check_rows(recipe, gpus)
        estimates = {name: find_stage(name).estimate for name in stages_of(recipe)}
        named = {name: resolve_name(each) for name, each in estimates.items() if each is not None}
        return [phase for name, estimate in named.items() for phase in estimate(self, name, gpus)]

    def cost_method(self, name: str, gpus: int) -> Iterator[PhaseCost]:
        """Yield the cost of a method's training, its predict passes and its evaluations after epochs."""
        method, every = get_method(name), self.recipe.evaluation.every
        sizes = ExpectedSizes(self.samples, *self.expect_rounds()[-1], self.noise, self.recipe.incv)
        config: TrainingConfig = method.config(self.recipe)
        first = method.expect_epochs(self.recipe, config, sizes)[0]
        config = fit_section(config, count_steps(first.selected, self.recipe.batch.rows))
        epochs = method.expect_epochs(self.recipe, config, sizes)
        yield from self.cost_training(name, epochs, method.networks, gpus)
        for passes, samples in method.expect_passes(config, sizes):
            yield self.cost_predicting(name, samples, passes, method.networks, gpus)
        if every:
            count = -(-sum(each.count for each in epochs) // every)
            yield from (self.cost_predicting(name, n, count, method.networks, gpus) for n in self.eval_samples)

    def cost_evaluation(self, name: str, gpus: int) -> Iterator[PhaseCost]:
        """Yield the cost of the last evaluation, which loads the networks: loaded networks are never compiled."""
        for method in methods_of(self.recipe):
            yield from (self.cost_predicting(name, n, 1, method.networks, gpus) for n in self.eval_samples)

    def cost_features(self, name: str, gpus: int) -> Iterator[PhaseCost]:
        """Yield the cost of the pass that computes the features of all images."""
        yield self.cost_predicting(name, self.samples, 1, 1, gpus)

    def cost_incv(self, name: str, gpus: int) -> Iterator[PhaseCost]:
        """Yield the cost of INCV. Each half of the GPUs trains every second fold, or all GPUs train all folds: in
        turn, or at once."""
        incv = self.recipe.incv
        assert incv is not None
        if incv.judge == "features":
            return  # seconds to minutes
        execution, folds = self.recipe.execution, incv.trained_folds
        apart = gpus > 1 and folds_side_by_side(folds, execution, replace(SINGLE_PROCESS, size=gpus))
        alone = gpus == 1 and self.reference.on_gpu
        at_once = alone and folds > 1 and execution.folds != "in_turn" and self.decoded_per_s == math.inf
        turns = folds / 2 if apart else folds * (measured.FOLDS_AT_ONCE if at_once else 1.0)
        gpus = gpus // 2 if apart else gpus
        for number, (selected, candidates) in enumerate(self.expect_rounds()[:-1]):
            held_out = -(-candidates // folds)
            trained = selected + (candidates if incv.halves == 1 else incv.largest_fold(candidates))
            epochs = fit_section(incv, count_steps(trained, self.recipe.batch.rows)).epochs
            (training,) = self.cost_training(name, [Epochs(epochs, trained)], 1, gpus)
            each_epoch = uses_best_epoch(incv, number, self.noise if number else None)
            passes = 1 + (epochs if each_epoch else 0)
            predicting = self.cost_predicting(name, held_out, passes, 1, gpus, training.compiled)
            yield from (replace(phase, count=phase.count * turns) for phase in (training, predicting))

    def cost_training(self, stage: str, passes: Sequence[Epochs], networks: int, gpus: int) -> Iterator[PhaseCost]:
        """Yield the cost of a training's epochs, assuming that every row is trained on (none dropped)."""
        batch, parameters = self.recipe.batch.rows, networks * self.network.parameters
        steps = [epochs.count * -(-epochs.selected // batch) for epochs in passes]
        compiled = should_compile(self.recipe.execution, sum(steps))
        row_s, fixed_s, forward_share = self.scale_rates(compiled)
        # The fixed times of a pair of networks overlap on a GPU.
        fixed_s *= measured.PAIR_FIXED if networks == 2 and self.reference.on_gpu else networks
        row_bytes = networks * self.network.saved_numbers * (4 if self.recipe.precision == "fp32" else 2)
        for epochs, count in zip(passes, steps, strict=True):
            candidates = candidate_rows(batch, epochs.selected, epochs.candidates)
            rows = -(-batch // gpus) + -(-candidates // gpus)
            trained = batch if epochs.ranks_first and gpus == 1 else rows  # one GPU trains only on the chosen rows
            at_once = min(trained, self.recipe.batch.micro or trained)
            forward = forward_share if epochs.ranks_first else 0.0
            parts = -(-trained // at_once) + forward * -(-rows // at_once)
            compute_s = {
                "arithmetic": networks * row_s * (trained + forward * rows),
                "fixed part": fixed_s * parts,
                "all-reduce": all_reduce_seconds(parameters, gpus),
            }
            memory = measured.BYTES_PER_PARAMETER * parameters + at_once * row_bytes
            decoding_s = rows / self.decoded_per_s
            yield PhaseCost(stage, count, rows, compute_s, decoding_s, compiled, at_once, memory)

    def cost_predicting(
        self, stage: str, samples: int, passes: int, networks: int, gpus: int, compiled: bool = False
    ) -> PhaseCost:
        """Return the cost of predict passes. compiled: whether the training was; short passes are never compiled."""
        share = -(-samples // gpus)
        compiled = compiled and share >= WORTH_COMPILING
        row_s, fixed_s, forward_share = self.scale_rates(compiled)
        batches = -(-share // self.recipe.execution.predict_batch)
        forward = networks * forward_share
        compute_s = {"arithmetic": forward * share * row_s, "fixed part": forward * batches * fixed_s}
        return PhaseCost(stage, passes, share, compute_s, share / self.decoded_per_s, compiled)
