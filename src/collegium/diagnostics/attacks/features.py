"""Feature inversion: an image rebuilt from what a known network makes of it.

After Mahendran and Vedaldi, "Understanding deep image representations by inverting them" (CVPR
2015, https://arxiv.org/abs/1412.0035): of all images the one is searched for whose features are
nearest to those that were sent, and which is smooth:

    argmin_x  ||f(x) - z||^2 / ||z||^2 + alpha TV(x)

with TV the mean absolute difference of neighbouring pixels.

Deviations: Adam, whose learning rate falls as that of gradient inversion, in place of gradient
descent with momentum; TV with the exponent 1; no penalty on the range of intensities, since a
network here sees normalised ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from collegium.core.model_parts import head_layer
from collegium.core.randomness import generator
from collegium.diagnostics.attacks.inversion import (
    DECAYS,
    DEFAULT,
    TINY,
    Inversion,
    total_variation,
)
from collegium.errors import DataError
from collegium.heterogeneity.embeddings import COMPONENTS, Encoder
from collegium.training.alignment import pool

LR = 0.1
"""Learning rate at first, in units of the image; half of that of an inversion of gradients."""


def invert_features(
    features_of: Callable[[Tensor], Tensor],
    sent: Tensor,
    shape: Sequence[int],
    settings: Inversion = DEFAULT,
    *,
    start: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the image, of a given shape, whose features are nearest to known ones.

    Args:
        features_of: returns the features of an image, differentiably.
        sent: what was sent, of the shape that ``features_of`` returns.
        shape: of the image, (1, C, *spatial).
        settings: steps, weight of the total variation and restarts; see `Inversion`.
        start: what the first search starts from, (1, C, *spatial), such as a mean of similar
            images; None: noise, as the other searches.
        seed: names the generator of the noise.

    Raises:
        DataError: the features are all zero or not finite.
    """
    wanted = sent.double()
    length = float(wanted.square().sum())
    if not 0 < length < float("inf"):
        raise DataError("the features that the site sent are all zero, or not finite")
    best, least = torch.zeros(*shape, dtype=torch.float64), float("inf")
    for number in range(settings.restarts):
        rng = generator(seed, "attack", "features", number)
        image = torch.randn(*shape, generator=rng, dtype=torch.float64)
        if start is not None and number == 0:
            image = start.double().clone()
        image.requires_grad_()
        optimizer = torch.optim.Adam([image], lr=LR)
        falls = [round(settings.steps * share) for share in DECAYS]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, gamma=0.1)
        for _ in range(settings.steps):
            misfit = (features_of(image) - wanted).square().sum() / (length + TINY)
            objective = misfit + settings.total_variation * total_variation(image)
            if float(objective.detach()) < least:
                least, best = float(objective.detach()), image.detach().clone()
            (image.grad,) = torch.autograd.grad(objective, [image])
            optimizer.step()
            schedule.step()
    return best


def embedding_of(image: Tensor, encoder: Encoder, grid: int) -> Tensor:
    """Return the embedding of an image, differentiably; the numbers are those of `embed_image`.

    The derivative of the components v, with eigenvalues l of the covariance K, is that of
    perturbation theory, dv = (l I - K)^+ dK v.

    Args:
        image: (1, C, *spatial).
        encoder: see `collegium.heterogeneity.embeddings.embed_image`, as are those below.
        grid: the side of the grid.
    """
    resized = functional.interpolate(image, (grid,) * (image.ndim - 2), mode="area")
    table = encoder(resized.float())[0].double().flatten(1)
    centred = table - table.mean(0)
    covariance = centred.T @ centred
    with torch.no_grad():
        values, vectors = torch.linalg.eigh(covariance)
        identity = torch.eye(len(values), dtype=values.dtype)
    columns = []
    for place in range(1, COMPONENTS + 1):
        v = vectors[:, -place]
        v = v * torch.sign(v[v.abs().argmax()])
        inverse = torch.linalg.pinv(values[-place] * identity - covariance.detach(), hermitian=True)
        moved = inverse @ (covariance @ v)
        columns.append(centred @ (v + moved - moved.detach()))
    return torch.stack(columns, 1).flatten()


def latent_of(image: Tensor, module: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return what enters the head of a network, differentiably, or its mean over space.

    Args:
        image: (1, C, *spatial).
        module: the network, in the mode and precision in which it computes.
        shape: of what was sent of one image; the mean over space is taken if it has one axis.
    """
    seen: list[Tensor] = []
    hook = head_layer(module).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        module(image)
    finally:
        hook.remove()
    return (pool(seen[0]) if len(shape) == 1 else seen[0])[0]
