"""How far a routed layer's weights are from the equal mix of its sources (IOP-FL, Fig. 9).

With S sources and a case's coefficients r, the weight variation is ||W(r) - W(e)|| / ||W(e)||. W(r)
is the sum of r_k W_k (Eq. 6), e is 1 / S for every source, the norm is Frobenius' and biases do not
count. No case's weights are made: the norms follow from the sources' products with each other.
"""

import torch
from torch import Tensor

AT_ONCE = 2**16
"""How many entries of a source are taken to double precision at once."""


def products(weights: Tensor) -> Tensor:
    """Return the inner products of the sources' weights with each other, their Gram matrix.

    Args:
        weights: (S, *shape).

    Returns:
        (S, S), float64 on the CPU.
    """
    found = torch.zeros(len(weights), len(weights), dtype=torch.float64)
    for piece in torch.split(weights.detach().flatten(1), AT_ONCE, dim=1):
        exact = piece.double()
        found += (exact @ exact.T).cpu()
    return found


def weight_variation(weights: Tensor, coefficients: Tensor) -> Tensor:
    """Return how far the mixed weights of each case are from the equal mix.

    With G the products and d = r - e, the squared distance is d G d and the squared norm e G e.

    Args:
        weights: (S, *shape), the layer's weights in every source.
        coefficients: (cases, S).

    Returns:
        (cases,), float64; 0 where all sources hold nothing but zeros.
    """
    gram = products(weights)
    equal = torch.full((len(weights),), 1 / len(weights), dtype=torch.float64)
    apart = coefficients.cpu().double() - equal
    squared = ((apart @ gram) * apart).sum(dim=1).clamp(min=0)
    norm = (equal @ gram @ equal).clamp(min=torch.finfo(torch.float32).tiny)
    return (squared / norm).sqrt()
