"""Local work: training models on the data of one place, and looking at what they make of them.

A site works on its own data (`collegium.runtime.client`), the server on public ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collegium.core.algorithm import Seen, State
from collegium.core.dataset import Batch, Dataset, SampleTransform, unchanged
from collegium.core.model_parts import ModelParts
from collegium.core.randomness import claim, generator
from collegium.core.tensors import Tensors
from collegium.training.fisher import diagonal_fisher
from collegium.training.loop import LocalTraining, Progress, count_steps
from collegium.training.objectives import Objective, Output
from collegium.training.privacy import (
    CaseNoise,
    Generators,
    PrivacyConfig,
    add_steps,
    epsilon_of,
    private_update,
)

logger = logging.getLogger(__name__)

SPENT = "privacy"
"""Where the state of a client holds the steps of private training; see `add_steps`."""


class LocalWork:
    """Trains and examines models on the data of one place, with random generators of its own.

    Args:
        training: network, task and recipe.
        examples: the training examples.
        seed: of the run.
        rounds: how many rounds the run has.
        owner: whose the examples are, for messages.
    """

    def __init__(
        self, training: LocalTraining, examples: Dataset, *, seed: int, rounds: int, owner: str
    ) -> None:
        self.training, self.examples = training, examples
        self.seed, self.rounds, self._owner = seed, rounds, owner
        self.state: State = {}
        self.round = 0
        self.progress: dict[str, Progress] = {}
        """Of every `fit` since the work began, by stream."""
        self.private_fits = 0
        """How many fits a round makes; see `collegium.core.algorithm.Algorithm.private_fits`."""
        self.final_epochs = 0
        """See `collegium.core.algorithm.Algorithm.final_epochs`."""
        self._path: tuple[str | int, ...] = ()
        self._purposes: set[str] = set()

    def begin_work(self, *path: str | int) -> None:
        """Begin a piece of work, in which every purpose of a generator may be used once.

        Args:
            *path: from which all its generators follow.
        """
        self._path, self._purposes, self.progress = path, set(), {}

    @property
    def parts(self) -> ModelParts:
        """The roles of the model's tensors."""
        return self.training.parts

    @property
    def num_examples(self) -> int:
        """Number of training examples."""
        return len(self.examples)

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps that one `fit` takes."""
        return count_steps(self.num_examples, self.training.config)

    @property
    def lr(self) -> float:
        """Learning rate of this round."""
        return self.training.config.lr_of(self.round, self.rounds)

    @property
    def local_steps(self) -> int | None:
        """Optimiser steps per round; None if the recipe counts in epochs."""
        return self.training.config.local_steps

    @property
    def noise_seed(self) -> int:
        """The seed of the noise of private training."""
        return self.seed

    @property
    def epsilon(self) -> float | None:
        """The cost of private training so far; None without privacy, or where it has no limit."""
        privacy = self.training.config.privacy
        if privacy is None or SPENT not in self.state:
            return None
        spent = epsilon_of(self.state[SPENT], privacy.delta)
        return spent if math.isfinite(spent) else None

    def rng(self, purpose: str) -> torch.Generator:
        """Return the generator for ``purpose``; it may be used once in a piece of work."""
        return generator(self.seed, *self._path_of(purpose))

    def _path_of(self, purpose: str) -> tuple[str | int, ...]:
        claim(self._purposes, purpose, "handler")
        return (*self._path, purpose)

    def fit(
        self,
        model: Tensors,
        *,
        penalty: Callable[[Tensors], Tensor] | None = None,
        correct: Callable[[Tensors, Tensors], Tensors] | None = None,
        objective: Objective | None = None,
        trainable: Collection[str] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        data: Dataset | None = None,
        recipe: Mapping[str, Any] | None = None,
        stream: str = "fit",
    ) -> Tensors:
        """Train ``model`` on the data; return it as it is if nothing is to be trained.

        See `collegium.core.algorithm.LocalWork.fit`.
        """
        path = self._path_of(stream)
        examples = self.examples if data is None else data
        if len(examples) == 0:
            logger.warning("%s has no training examples; the model stays as it was", self._owner)
            return model
        if trainable is not None and not self.parts.trainable.intersection(trainable):
            return model
        training = self.training.under(recipe or {})
        keep = training.config.optimizer_state == "keep"
        key = f"optimizer/{stream}"
        moments = dict(self.state.get(key, {})) if keep else None
        privacy = training.config.privacy
        if privacy is not None and privacy.is_plain:
            privacy = None
        private = None
        if privacy is not None and privacy.unit == "case":
            private = self._case_noise(privacy, training, len(examples), path)
        trained, progress = training.fit(
            model,
            examples,
            seed=self.seed,
            path=path,
            lr=training.config.lr_of(self.round, self.rounds),
            epochs=epochs,
            steps=steps,
            penalty=penalty,
            correct=correct,
            objective=objective,
            trainable=trainable,
            optimizer_state=moments,
            private=private,
        )
        if privacy is not None:
            trained = self._account(privacy, private, model, trained, progress, path)
        if moments is not None:
            self.state[key] = moments
        self.progress[stream] = progress
        return trained

    def _case_noise(
        self,
        privacy: PrivacyConfig,
        training: LocalTraining,
        count: int,
        path: tuple[str | int, ...],
    ) -> CaseNoise:
        """Return the clipping and the noise of a fit on so many examples."""
        assert privacy.max_grad_norm is not None
        rate = min(1.0, training.config.batch_size / count)
        steps = self.rounds * self.private_fits * count_steps(count, training.config)
        steps += count_steps(count, training.config, epochs=self.final_epochs)
        noise = privacy.noise_for(rate, steps)
        return CaseNoise(noise, privacy.max_grad_norm, rate, Generators(self.noise_seed, path))

    def _account(
        self,
        privacy: PrivacyConfig,
        private: CaseNoise | None,
        start: Tensors,
        trained: Tensors,
        progress: Progress,
        path: tuple[str | int, ...],
    ) -> Tensors:
        """Note the steps of a fit, and return the model that it may show.

        With unit "site" that is one step in which the site surely takes part: the server, to which
        every site sends its own update, sees who does.
        """
        noise, rate, steps = 0.0, 1.0, 1
        if private is not None:
            noise, rate, steps = private.noise, private.rate, progress.steps
        else:
            assert privacy.max_grad_norm is not None
            fits = self.rounds * self.private_fits + (self.final_epochs > 0)
            noise = privacy.noise_for(1.0, fits)
            trained = private_update(
                start,
                trained,
                self.parts.trainable,
                noise=noise,
                max_norm=privacy.max_grad_norm,
                generators=Generators(self.noise_seed, path),
            )
        self.state[SPENT] = add_steps(self.state.get(SPENT, []), noise, rate, steps)
        return trained

    def collect(
        self,
        model: Tensors,
        look: Callable[[Batch, Output], Seen],
        *,
        data: Dataset | None = None,
        whole: bool = False,
        stream: str = "collect",
    ) -> list[Seen]:
        """Return what a function makes of every batch of one pass over the data.

        See `collegium.core.algorithm.LocalWork.collect`.
        """
        path = self._path_of(stream)
        examples = self.examples if data is None else data
        return self.training.collect(model, look, examples, seed=self.seed, path=path, whole=whole)

    def loss(self, model: Tensors) -> float:
        """Return the mean loss of ``model`` on the training data, in evaluation mode.

        All models of a request see the same crops.
        """
        return self.training.loss(model, self.examples, seed=self.seed, path=(*self._path, "loss"))

    def fisher(
        self,
        model: Tensors,
        *,
        views: Sequence[SampleTransform] = (unchanged,),
        limit: int | None = None,
        stream: str = "fisher",
    ) -> list[Tensors]:
        """Return the diagonal Fisher information of ``model`` on the training data.

        See `collegium.training.fisher.diagonal_fisher`.
        """
        path = self._path_of(stream)
        return diagonal_fisher(
            self.training,
            model,
            self.examples,
            seed=self.seed,
            path=path,
            limit=limit,
            views=views,
        )
