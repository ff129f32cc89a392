"""Records the models of a run on their way, and extracts the features of images from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from collegium.core.dataset import Dataset
from collegium.core.message import Held, Message, unpack
from collegium.core.model_parts import head_layer
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.diagnostics.drift.distances import SiteFeatures
from collegium.errors import ConfigError
from collegium.runtime.distances import SENT_BACK, model_sent_back
from collegium.runtime.requests import Request, Response, Transport, answered
from collegium.tasks import Task
from collegium.training.alignment import pool


class SentModels:
    """A transport that looks at the models on their way to and from the sites.

    It looks at those of requests of training that hold the part ``model`` and are answered by
    ``model`` or ``model_update``.

    Args:
        inner: carries the messages.
        initial: the common initial model, for tensors that nobody has sent yet.

    Attributes:
        held: what messages leave out, the server's `ServerRuntime.held`.
    """

    def __init__(self, inner: Transport, initial: Tensors) -> None:
        self._inner, self._initial = inner, initial
        self.held: Held | None = None

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Deliver the requests and yield the answers, both as they are.

        Raises:
            ConfigError: the sites are sent something else than one model.
        """
        for request, response in answered(self._inner, requests):
            if request.stage == "train":
                self._look(request, response)
            yield response

    def close(self) -> None:
        """Release what the inner transport holds."""
        self._inner.close()

    def _look(self, request: Request, response: Response) -> None:
        reply = unpack(response.data, held=self.held).get("reply", {})
        if not SENT_BACK & reply.keys():
            return  # an exchange of something else, or a failure
        parts = unpack(request.payload, held=self.held)
        if not isinstance(parts.get("model"), Tensors):
            raise ConfigError(
                f"{request.method!r} sends each site {', '.join(parts) or 'nothing'} and not one "
                f"model that it trains and sends back; choose another algorithm"
            )
        received = self._initial | parts["model"]
        sent = model_sent_back({"model": received}, reply)
        assert sent is not None  # both are there
        self.see(request, parts, received, sent)

    def see(
        self, request: Request, parts: dict[str, Any], received: Tensors, sent: Tensors
    ) -> None:
        """Look at a site's training.

        Args:
            request: the request.
            parts: its parts.
            received: the whole model, initial where nothing was sent.
            sent: what the site sent back of it, as it trained it.
        """
        raise NotImplementedError


class RecordingTransport(SentModels):
    """A transport that records the models on their way to and from the sites.

    A method that keeps a part of the model at the site sends less than the site computes with: both
    models are then completed by the site's own tensors, those from before the training and those
    from after it.

    Args:
        inner: carries the messages.
        initial: the common initial model, for tensors that nobody has sent or kept yet.
        personal: called after a site has trained: gives the model with which it would predict on
            receiving a message, as `collegium.core.algorithm.Algorithm.personal_model` does.
        take: called with the round, the site, the model received and the model after training.
    """

    def __init__(
        self,
        inner: Transport,
        initial: Tensors,
        *,
        personal: Callable[[str, Message], Tensors | None],
        take: Callable[[int, str, Tensors, Tensors], None],
    ) -> None:
        super().__init__(inner, initial)
        self._personal, self._take = personal, take
        self._own: dict[str, Tensors] = {}

    def see(
        self, request: Request, parts: dict[str, Any], received: Tensors, sent: Tensors
    ) -> None:
        """Record both models, completed. See `SentModels.see`."""
        site = request.client
        before = self._own.get(site, Tensors())
        trained = self._completed(site, parts, received | sent, received.without(sent))
        self._take(request.round, site, received | before, trained)

    def _completed(
        self, site: str, parts: dict[str, Any], model: Tensors, kept: Tensors
    ) -> Tensors:
        """Put what a site keeps to itself, after its training, in place of the server's copy."""
        whole = self._personal(site, Message({**parts, "model": model})) if kept else None
        if whole is not None:
            self._own[site] = whole.select(kept).map(lambda tensor: tensor.cpu())
        return model | self._own.get(site, Tensors())


class FeatureExtractor:
    """Extracts the features of an image: the input of the network's head, mean over space.

    Args:
        network: makes the network.
        task: cuts an image into windows.
        device: where to compute.
    """

    def __init__(self, network: Callable[[], nn.Module], task: Task, device: str = "cpu") -> None:
        with ambient(0, "drift"):
            self._module = network().to(device).eval()
        self._task = task

    @torch.no_grad()
    def extract(self, model: Tensors, data: Dataset, *, limit: int) -> SiteFeatures:
        """Return what a model, in evaluation mode, sees in the windows of some cases.

        Args:
            model: a whole model.
            data: the cases; each gives equally many windows at most, spread evenly over it.
            limit: how many windows at most.

        Returns:
            The windows of the patients, the same ones for every model.
        """
        self._module.load_state_dict(dict(model))
        seen: list[torch.Tensor] = []
        patients: list[str] = []
        hook = head_layer(self._module).register_forward_pre_hook(
            lambda _, inputs: seen.append(pool(inputs[0]).cpu())
        )
        try:
            for patient, windows in self._windows(data, limit):
                self._module(windows)
                patients += [patient] * len(windows)
        finally:
            hook.remove()
        rows = torch.cat(seen).float().numpy() if seen else np.empty((0, 0), np.float32)
        return SiteFeatures(rows, np.unique(patients, return_inverse=True)[1])

    def _windows(self, data: Dataset, limit: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield some windows of each case, and whose they are, until there are enough."""
        share, left = -(-limit // max(len(data), 1)), limit
        for index in range(len(data)):
            if not left:
                return
            example = data.example(index)
            pieces = list(self._task.windows(self._module, example.batch["image"]))
            total = sum(map(len, pieces))
            count = min(share, total, left)
            left -= count
            chosen, start = {int((k + 0.5) * total / count) for k in range(count)}, 0
            for piece in pieces:
                rows = [row for row in range(len(piece)) if start + row in chosen]
                start += len(piece)
                if rows:
                    yield example.patient, piece[rows]
