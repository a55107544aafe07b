"""F-correction (Patrini et al. 2017): cross-entropy of the given label, whose noise a transition matrix T explains.

T is estimated from the network that the method `standard` trained, so that cross-entropy is not trained twice. A new
network then learns the true labels: its predictions p, multiplied by T, have to explain the given ones.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from shards.durable import read_json
from trainer.acceleration.cuda_graphs import Inputs
from trainer.methods.inputs import MethodInputs, MethodTraining
from trainer.methods.losses import at_least_fp32
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.methods.transition import Transition, estimate_transition


def forward_losses(logits: torch.Tensor, labels: torch.Tensor, log_columns: torch.Tensor) -> torch.Tensor:
    """Return -log((Tᵀp)_y) of each row, in fp32 at any precision (fp64 for fp64 logits): [rows].

    labels: int64 [rows]; log_columns: log T_ij at [j, i]. Computed from logarithms, so that neither a small p nor a
    small T_ij is rounded to 0.
    """
    logits = at_least_fp32(logits)
    return -torch.logsumexp(logits.log_softmax(dim=1) + log_columns[labels].to(logits.dtype), dim=1)


class ForwardCorrectionTask(StandardTask):
    def __init__(self, module: nn.Module, setting: TaskSettings, transition: npt.NDArray[np.float64]) -> None:
        """transition: T_ij at [i, j]."""
        super().__init__(module, setting)
        smallest = torch.finfo(torch.float32).tiny  # a logarithm of 0 would make gradients NaN
        matrix = torch.tensor(transition, dtype=torch.float32)
        self._log_columns = matrix.clamp(min=smallest).log().T.contiguous().to(self.device)

    def row_losses(self, logits: torch.Tensor, targets: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return forward_losses(logits, targets, self._log_columns)


def _find_transition(inputs: MethodInputs) -> Transition:
    """Return T: as an earlier start recorded it, else estimated from the reference's network."""
    record = inputs.folder / "training.json"
    if inputs.world.broadcast_from_rank0(record.exists):
        facts = read_json(record)
        return Transition(np.array(facts["transition"]), np.array(facts["anchors"], np.int64))
    (network,) = inputs.trained_networks("standard")
    table = inputs.passes.run(network, inputs.samples, doing="predicting the training set")
    return estimate_transition(table.rows(table.usable), inputs.config.percentile)


def build(inputs: MethodInputs) -> MethodTraining:
    transition, plan = _find_transition(inputs), inputs.plan(inputs.samples)
    task = ForwardCorrectionTask(inputs.module(), inputs.settings(plan), transition.matrix)
    facts = {"transition": transition.matrix.tolist(), "anchors": transition.anchors.tolist()}
    return MethodTraining(task, facts)
