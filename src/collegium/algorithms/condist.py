"""ConDistFL (Wang et al., 2023, https://arxiv.org/abs/2308.04070)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.dataset import Batch
from collegium.core.lazy import functional, torch
from collegium.core.message import Message
from collegium.core.settings import NonNegative, Positive, settings
from collegium.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork, Objective

EPS = 1e-5


@settings
class ConDistFL(FedAvg):
    """FedAvg for sites that annotate different organs, with conditional distillation.

    A client minimises L + lambda_t L_cd. L is the task's loss, which at a site that annotates some
    of the classes only is the marginal loss; L_cd is between its predictions for the other classes
    and those of the model received, the teacher, both given that a pixel is none of its own
    classes; see `conditional_distillation`. lambda_t grows in a straight line from ``start`` in the
    first round to ``end`` in the last: the first teacher knows nothing. A site that annotates all
    classes has no such term, and where all sites do, the method is FedAvg.

    What could be read: the abstracts and the released code (NVIDIA FLARE). Deviations from the
    code. Its marginal loss takes a softmax of probabilities in the cross-entropy; the one here is
    of merged log-probabilities. Every class is a group of its own; there an organ and its tumour
    are one. A batch without any pixel that counts adds 0, there 1. With one round lambda is
    ``start``; there the schedule divides by 0. The server averages models by examples
    (``weighting: uniform`` weighs sites alike, as there), without the code's momentum, which
    ``condist+fedavgm`` adds; optimiser, their schedules and clipping are the recipe's, and there is
    no deep supervision. With ``form: dice``, L_cd is neither 0 nor least where both models agree,
    as a soft Dice rewards a prediction that is surer than the teacher's; ``form: kl``, ours, is. A
    step costs one forward pass more than FedAvg's.

    Attributes:
        start: lambda in the first round.
        end: lambda in the last.
        temperature: divides the logits of both models in L_cd.
        form: "dice" as in the released code, or "kl", the Kullback-Leibler divergence.
    """

    tasks: ClassVar[frozenset[str] | None] = frozenset({"segmentation"})
    neutral: ClassVar[Mapping[str, Any] | None] = {"start": 0.0, "end": 0.0}

    start: NonNegative = 0.01
    end: NonNegative = 1.0
    temperature: Positive = 2.0
    form: Literal["dice", "kl"] = "dice"

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model on L + lambda_t L_cd.

        Args:
            client: the site.
            request: ``model``, the global model and the teacher.
        """
        passed = (client.round - 1) / max(client.rounds - 1, 1)
        lam = self.start + (self.end - self.start) * passed
        objective = self.objective(request["model"], lam) if lam > 0 else None
        model = client.fit(request["model"], objective=objective)
        return Message.of(model=model, num_examples=client.num_examples)

    def objective(self, teacher: Tensors, lam: float) -> Objective:
        """Return the objective of local training.

        Args:
            teacher: the model received.
            lam: lambda_t.
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor | None]:
            output = network.forward(batch["image"])
            loss = network.loss(output, batch)
            labelled = getattr(network.task, "labelled", None)
            if labelled is None:
                return loss, None
            theirs = network.reference(batch["image"], teacher).prediction
            term = conditional_distillation(
                output.prediction, theirs, batch, labelled,
                temperature=self.temperature, form=self.form,
            )  # fmt: skip
            return loss, lam * term

        return losses


def conditional_distillation(
    student: Tensor,
    teacher: Tensor,
    batch: Batch,
    labelled: Collection[int],
    *,
    temperature: float = 2.0,
    form: Literal["dice", "kl"] = "dice",
) -> Tensor:
    """Return L_cd, between two predictions of the classes that a site does not annotate.

    With p the softmax of the logits / temperature and F the annotated classes, a class g outside F,
    the background among them, has r_g = p_g / (1 - sum over F of p + 1e-5). Pixels count where
    neither the label nor the teacher's most probable class is in F. "dice" is the mean over g of
    1 - 2 sum r_g r_g^T / (sum r_g + sum r_g^T + 1e-5), r^T the teacher's, summed over batch and
    space; "kl" the mean over pixels of sum r_g^T log(r_g^T / r_g), without the 1e-5.

    Args:
        student: logits (B, C, *spatial), with gradients.
        teacher: logits of the same shape.
        batch: with "label" (B, *spatial) and, optionally, "mask".
        labelled: F, without the background.
        temperature: divides the logits.
        form: "dice" or "kl".

    Returns:
        A scalar; 0 if no pixel counts.
    """
    known = torch.tensor(sorted(labelled), device=student.device)
    counts = ~torch.isin(batch["label"], known) & ~torch.isin(teacher.argmax(dim=1), known)
    if "mask" in batch:
        counts = counts & batch["mask"]
    outside = [index for index in range(student.shape[1]) if index not in labelled]
    if form == "kl":
        logs, wanted = (
            torch.stack([(logits / temperature).unbind(1)[g] for g in outside], 1).log_softmax(1)
            for logits in (student, teacher)
        )
        each = functional.kl_div(logs, wanted, reduction="none", log_target=True).sum(dim=1)
        return each.masked_fill(~counts, 0.0).sum() / counts.sum().clamp(min=1)
    r, wanted = (
        conditional((logits / temperature).softmax(dim=1), outside) * counts.unsqueeze(1)
        for logits in (student, teacher)
    )
    space = [dim for dim in range(r.ndim) if dim != 1]
    overlap = 2 * (r * wanted).sum(dim=space) / ((r + wanted).sum(dim=space) + EPS)
    return (1 - overlap).mean() * counts.any()


def conditional(p: Tensor, outside: Collection[int]) -> Tensor:
    """Return the probabilities of some classes, given that a pixel is one of these.

    Args:
        p: (B, C, *spatial).
        outside: the classes.

    Returns:
        (B, classes, *spatial); 1e-5 is added to the sum that divides them.
    """
    channels = p.unbind(dim=1)
    chosen = torch.stack([channels[index] for index in outside], dim=1)
    return chosen / (chosen.sum(dim=1, keepdim=True) + EPS)
