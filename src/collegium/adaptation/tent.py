"""Tent: test-time entropy minimisation (Wang et al., 2021, https://arxiv.org/abs/2006.10726)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from collegium.adaptation._losses import class_logits, counted_pixels, entropy_loss
from collegium.adaptation._norms import affine, require_batch_norms, use_batch_statistics
from collegium.adaptation.base import (
    GLOBAL,
    AdaptationRecord,
    AdaptationResult,
    Adapter,
    Cases,
    Deliver,
    Sources,
    batch_windows,
    case_batches,
    copies_of,
    optimizer_step,
    overwrite,
    predict_batch,
)
from collegium.core.dataset import full_mask
from collegium.core.lazy import nn, torch
from collegium.core.optimizers import unmarked
from collegium.core.settings import Fraction, Positive, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor


@settings
class Tent(Adapter):
    """Entropy minimisation over scale and shift of batch normalisation.

    Batch normalisation uses each batch's own statistics. Every batch of cases, in order, is first
    predicted; then one step of Adam is taken on the mean entropy of the softmax over batch and
    pixels. So a prediction depends on the cases before it, not on those after it.

    Deviation: a case larger than the inference window is predicted window by window and then
    learnt from window by window; the released code has no windows. Vectors are never alone in a
    batch if the site has two or more, see `collegium.adaptation.base.case_batches`.

    Attributes:
        lr: learning rate.
        beta: Adam's first beta.
        steps: optimiser steps for each batch.
        episodic: whether every batch starts from the deployed model, instead of continuing from the
            batch before (online).
        batch_size: cases, slices or windows in one batch.
        field_of_view: whether only pixels inside the field of view count in the entropy.
        record_steps: whether the predictions of each batch before and after each of its steps are
            scored for the record; see `collegium.adaptation.outside.adapt_and_score`.
    """

    lr: Positive = 1e-3
    beta: Fraction = 0.9
    steps: PositiveInt = 1
    episodic: bool = False
    batch_size: PositiveInt = 4
    field_of_view: bool = False
    record_steps: bool = False

    def check(self, module: nn.Module) -> None:
        """Refuse a network without batch normalisation."""
        require_batch_norms(module, "tent")

    def check_output(self, task: Task, images: Tensor, output: Tensor) -> None:
        """Refuse a field of view if the output has no pixels. See `Adapter.check_output`."""
        if self.field_of_view:
            counted_pixels(full_mask(images), class_logits(output, task, "tent"), "tent")

    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        """Predict and learn batch by batch. See `Adapter.adapt`."""
        module = sources.load(sources.require_global("tent"))
        layers = require_batch_norms(module, "tent")
        use_batch_statistics(module)
        module.requires_grad_(False)
        trained = [parameter.requires_grad_(True) for parameter in affine(layers)]
        if not trained:
            raise ConfigError(
                "tent trains scale and shift, and the network's batch normalisation has none; "
                "choose dsbn, or train with them"
            )
        start = copies_of(trained)
        adam = partial(unmarked(torch.optim.Adam), trained, lr=self.lr, betas=(self.beta, 0.999))
        optimizer = adam()
        task = sources.task.with_batch_size(self.batch_size)
        record = AdaptationRecord([GLOBAL])
        for indices, example in case_batches(cases, self.batch_size):
            if self.episodic:
                overwrite(trained, start)
                optimizer = adam()
            predictions = partial(predict_batch, task, module, indices, example)
            if self.record_steps:
                sources.watch(0, predictions())
            for index, prediction in predictions():
                deliver("", index, prediction)
            for step in range(self.steps):
                for window in batch_windows(
                    task, module, example.batch, field_of_view=self.field_of_view
                ):
                    if not window.counts:
                        continue
                    logits = class_logits(module(window.images), task, "tent")
                    counted = counted_pixels(window.inside, logits, "tent")
                    loss = entropy_loss(logits.softmax(dim=1), counted)
                    entropy = optimizer_step(optimizer, loss, "tent")
                    row = {"step": record.steps, "total": entropy, "entropy": entropy}
                    record.losses.append(row)
                    record.steps += 1
                if self.record_steps:
                    sources.watch(step + 1, predictions())
        return AdaptationResult(record, Tensors(module.state_dict()).clone())
