"""Differential privacy: its settings, what it has cost so far, and noise on the update of a site.

Abadi et al., 2016, https://arxiv.org/abs/1607.00133, for single cases (the steps are those of
`collegium.training.private_steps`); McMahan et al., 2018, https://arxiv.org/abs/1710.06963, for
whole sites, with the noise added by each site to its own update instead of by a trusted server to
their sum.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from collegium.core.optional import import_optional
from collegium.core.settings import NonNegative, OpenUnitInterval, Positive, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

if TYPE_CHECKING:
    import torch

EXTRA, PURPOSE = "privacy", "training.privacy"
"""The extra that installs Opacus, and what needs it."""

Mechanism = tuple[float, float, int]
"""Noise multiplier, sampling rate, and how many steps were made with them."""


@settings
class PrivacyConfig:
    """Differential privacy of what leaves a site.

    Attributes:
        unit: whose part in the training stays hidden: "case", that of one training case of a site,
            or "site", that of a whole site.
        noise_multiplier: standard deviation of the noise as a multiple of ``max_grad_norm``.
        target_epsilon: the epsilon that each site may spend in the whole run, from which its noise
            multiplier follows; instead of ``noise_multiplier``.
        max_grad_norm: largest Euclidean norm of the gradient of one case; with unit "site", of the
            update of the model, which is what a server optimiser takes for a gradient. None, not
            clipped, is for ``noise_multiplier`` 0 alone: training is the plain one then.
        delta: the probability with which the guarantee may fail; well below 1 divided by the number
            of cases.
        noise_seed: where the noise and the choice of cases come from: "secret", a key that each
            site draws and keeps for itself, or "run", the run's seed, which the server knows too.
            "run" protects nobody: it makes runs repeatable, for simulations and tests.
    """

    unit: Literal["case", "site"] = "case"
    noise_multiplier: NonNegative | None = None
    target_epsilon: Positive | None = None
    max_grad_norm: Positive | None = None
    delta: OpenUnitInterval = 1e-5
    noise_seed: Literal["secret", "run"] = "secret"

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ConfigError("give either noise_multiplier or target_epsilon")
        if self.max_grad_norm is None and self.noise_multiplier != 0:
            raise ConfigError("give max_grad_norm, without which no noise hides anything")

    @property
    def is_plain(self) -> bool:
        """Whether nothing is clipped and no noise is added."""
        return self.noise_multiplier == 0 and self.max_grad_norm is None

    def noise_for(self, rate: float, steps: int) -> float:
        """Return the noise multiplier.

        Args:
            rate: the probability with which a case takes part in a step.
            steps: how many steps the run has in all, for ``target_epsilon``.

        Raises:
            ConfigError: Opacus is not installed, or no noise is large enough.
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.target_epsilon is not None
        return _noise_of(self.target_epsilon, self.delta, rate, steps)


@lru_cache(maxsize=64)
def _noise_of(epsilon: float, delta: float, rate: float, steps: int) -> float:
    accounting = import_optional("opacus.accountants.utils", EXTRA, PURPOSE)
    with warnings.catch_warnings(action="ignore"):  # see `epsilon_of`
        try:
            found: float = accounting.get_noise_multiplier(
                target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps
            )
        except ValueError as error:
            raise ConfigError(
                f"training.privacy.target_epsilon is {epsilon:g}, which no noise reaches in "
                f"{steps} steps with delta {delta:g}; raise it, or train for fewer rounds"
            ) from error
    return found


def add_steps(history: Sequence[Sequence[Any]], noise: float, rate: float, steps: int) -> list[Any]:
    """Return a history of steps with further ones, those of equal noise and rate as one entry.

    Args:
        history: `Mechanism` entries as lists, which a state can hold.
        noise: noise multiplier of the further steps.
        rate: their sampling rate.
        steps: how many there are.
    """
    counts = {(sigma, q): count for sigma, q, count in history}
    counts[noise, rate] = counts.get((noise, rate), 0) + steps
    return [[sigma, q, count] for (sigma, q), count in counts.items()]


def epsilon_of(history: Sequence[Sequence[Any]], delta: float) -> float:
    """Return the epsilon that steps have cost, by Opacus' accountant of Renyi privacy.

    It is that of the Gaussian mechanism on a Poisson sample: neighbours differ by one unit that is
    there or not. It is an upper bound; the accountant's remark that other orders might give a
    tighter one changes nothing in that.

    Args:
        history: see `add_steps`.
        delta: see `PrivacyConfig`.

    Returns:
        Epsilon; infinity if a step had no noise.

    Raises:
        ConfigError: Opacus is not installed.
    """
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    if not any(steps for *_, steps in history):
        return 0.0
    orders = import_optional("opacus.accountants", EXTRA, PURPOSE).RDPAccountant.DEFAULT_ALPHAS
    spending = import_optional("opacus.accountants.analysis.rdp", EXTRA, PURPOSE)
    rdp = sum(steps * _divergence_of_step(noise, rate) for noise, rate, steps in history)
    with warnings.catch_warnings(action="ignore"):
        return float(spending.get_privacy_spent(orders=orders, rdp=rdp, delta=delta)[0])


@lru_cache(maxsize=64)
def _divergence_of_step(noise: float, rate: float) -> Any:
    """Return the Renyi divergence of one step by order; that of several is their sum."""
    orders = import_optional("opacus.accountants", EXTRA, PURPOSE).RDPAccountant.DEFAULT_ALPHAS
    spending = import_optional("opacus.accountants.analysis.rdp", EXTRA, PURPOSE)
    return spending.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


@dataclass(frozen=True)
class Generators:
    """Random generators from a seed that may be a secret.

    Attributes:
        seed: the seed.
        path: name of the fit.
    """

    seed: int
    path: tuple[str | int, ...]

    def __call__(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a new generator.

        Args:
            purpose: a name.
            device: where it draws.
        """
        import torch

        from collegium.core.randomness import seed_of

        seed = seed_of(self.seed, *self.path, "privacy", purpose)
        return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class CaseNoise:
    """The clipping and the noise of the steps of one fit.

    Attributes:
        noise: noise multiplier.
        max_grad_norm: see `PrivacyConfig`.
        rate: the probability with which a case takes part in a step.
        generators: returns the generator of a purpose on a device; "noise" and "sample" are used.
    """

    noise: float
    max_grad_norm: float
    rate: float
    generators: Generators


def private_update(
    start: Tensors,
    trained: Tensors,
    names: Collection[str],
    *,
    noise: float,
    max_norm: float,
    generators: Generators,
) -> Tensors:
    """Return a trained model whose update is clipped, and has Gaussian noise.

    The update u of all named tensors together becomes u min(1, C / ||u||) + N(0, (noise C)^2).

    Args:
        start: the model as received.
        trained: the model after training.
        names: the names of the trainable tensors; the others stay as trained.
        noise: noise multiplier.
        max_norm: C.
        generators: "noise" is used.
    """
    import torch

    after = trained.select(names)
    first = after.first_names()  # tied weights count and move once
    before = start.select({*first.values()})
    update = after.select(before) - before
    norm = math.sqrt(update.dot(update))
    update = (max_norm / norm if norm > max_norm else 1.0) * update
    device = next(iter(update.values())).device
    generator = generators("noise", device)

    def noised(tensor: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(tensor.shape, generator=generator, device=device, dtype=tensor.dtype)
        return tensor + noise * max_norm * drawn

    moved = before + (update.map(noised) if noise else update)
    return trained | Tensors((name, moved[own]) for name, own in first.items())
