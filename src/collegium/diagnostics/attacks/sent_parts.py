"""Collects what sites send beside models, with the images that each of them looked at for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from collegium.core.algorithm import Algorithm
from collegium.core.dataset import Batch, Dataset, Example
from collegium.core.message import Held, unpack
from collegium.core.tensors import Tensors
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.runtime.requests import Request, Response, Transport, answered


@dataclass(frozen=True)
class SentPart:
    """A part as a site sent it, the first time.

    Attributes:
        value: the part.
        images: by number of the training case the image, (B, C, *spatial), that the site looked at
            last before it sent the part, in the order in which it did.
        model: the whole model that the site sent with it, or received before; what was neither is
            the initial one.
    """

    value: Any
    images: Mapping[int, torch.Tensor]
    model: Tensors


class ObservedDataset:
    """A dataset that notes the image of each case when it is looked at.

    Args:
        inner: the dataset.
        without: the number of a case that it lacks; None: none.
    """

    def __init__(self, inner: Dataset, without: int | None = None) -> None:
        self._inner = inner
        self._cases = [case for case in range(len(inner)) if case != without]
        self._images: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._cases)

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return samples. See `Dataset.batch`."""
        cases = [self._cases[index] for index in indices]
        found = self._inner.batch(cases, rngs)
        for row, case in enumerate(cases):
            self._note(case, found["image"][row : row + 1])
        return found

    def example(self, index: int) -> Example:
        """Return a whole case. See `Dataset.example`."""
        case = self._cases[index]
        found = self._inner.example(case)
        self._note(case, found.image)
        return found

    def _note(self, case: int, image: torch.Tensor) -> None:
        self._images.pop(case, None)  # the last look counts, and its place
        self._images[case] = image.clone()

    def forget(self) -> dict[int, torch.Tensor]:
        """Return the images that were looked at since this was last asked."""
        images, self._images = self._images, {}
        return images


class _Observer:
    """A transport that keeps the parts of the sites' replies, and what each looked at for them.

    Args:
        inner: carries the messages.
        data: the datasets of the sites.
        initial: the common initial model.

    Attributes:
        held: what messages leave out, the server's `ServerRuntime.held`.
    """

    def __init__(
        self, inner: Transport, data: Mapping[str, ObservedDataset], initial: Tensors
    ) -> None:
        self._inner, self._data, self._initial = inner, data, initial
        self.held: Held | None = None
        self.found: dict[tuple[str, str], SentPart] = {}

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Deliver the requests and yield the answers, both as they are."""
        for request, response in answered(self._inner, requests):
            received = unpack(request.payload, held=self.held)
            reply = unpack(response.data, held=self.held).get("reply", {})
            model, images = self._initial, self._data[response.client].forget()
            for message in (received, reply):
                own = message.get("model")
                model = model | own if isinstance(own, Tensors) else model
            for part, value in reply.items():
                self.found.setdefault((response.client, part), SentPart(value, images, model))
            yield response

    def close(self) -> None:
        """Release what the inner transport holds."""
        self._inner.close()


def collect_parts(
    method: Algorithm,
    federation: Federation,
    wanted: Collection[str],
    folder: Path,
    *,
    seed: int,
    rounds: int = 1,
    without: tuple[str, int] | None = None,
) -> dict[tuple[str, str], SentPart]:
    """Return what sites send before training, and in the first round if that holds not all.

    Args:
        method: the algorithm.
        federation: the sites.
        wanted: names of the parts.
        folder: an empty one, for the run's files.
        seed: of the run.
        rounds: how many rounds the run has.
        without: a site and the number of a training case that it lacks; None: all have all.

    Returns:
        By site and part what was sent; what nobody sent is not there.

    Raises:
        CollegiumError: in one sentence, whatever cannot work.
    """
    lacking, case = without or ("", None)
    data = {
        name: ObservedDataset(site.train, case if name == lacking else None)
        for name, site in federation.sites.items()
    }
    sites = {name: replace(site, train=data[name]) for name, site in federation.sites.items()}
    observed = replace(federation, sites=sites)
    clients = observed.clients(method, seed=seed, root=folder, rounds=rounds)
    initial = observed.initial_model(method, seed)
    transport = _Observer(InProcess(lambda: clients), data, initial)
    server = observed.server(method, transport, seed=seed, root=folder, rounds=rounds)
    transport.held = server.held
    server.begin()
    if not set(wanted) <= {part for _, part in transport.found}:
        server.advance()
    return {key: part for key, part in transport.found.items() if key[1] in wanted}
