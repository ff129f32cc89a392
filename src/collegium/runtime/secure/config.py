"""The settings of means of masked replies, and what excludes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import annotated_types as bounds

from collegium.core.settings import settings
from collegium.errors import ConfigError, NotInstalled

if TYPE_CHECKING:
    from collections.abc import Collection

    from collegium.core.algorithm import Algorithm
    from collegium.runtime.participation import Participation

IN_CLEAR = frozenset({"progress", "scores"})
"""The parts of every algorithm that are numbers about training, and leave as they are."""


@settings
class SecureMean:
    """The form in which sites send what the server averages, so that it sees the sum alone.

    Attributes:
        bits: Of the integers that are sent, 32 or 64. The sum over all sites of weight times value
            has to be below 2^(bits - 1 - fraction_bits); a site whose values are beyond its share
            refuses.
        fraction_bits: How many of the bits are behind the point: the step is 2^-fraction_bits, and
            a mean is off by at most half a step times the number of sites, divided by the sum of
            their weights.
        min_sites: The fewest sites in a sum. Of two, each can tell the other's model from the mean.
    """

    bits: Literal[32, 64] = 64
    fraction_bits: Annotated[int, bounds.Ge(0), bounds.Le(56)] = 24
    min_sites: Annotated[int, bounds.Ge(2)] = 3

    def __post_init__(self) -> None:
        if self.fraction_bits > self.bits - 8:
            raise ConfigError(
                f"fraction_bits is {self.fraction_bits} of {self.bits} bits, which leaves too few "
                f"before the point; lower it to {self.bits - 8} or less, or set bits to 64"
            )


def check_secure(
    algorithm: Algorithm,
    clients: int,
    *,
    least: int,
    coded: bool,
    participation: Participation,
    diagnostics: Collection[str],
) -> None:
    """Check before the first round that the server can do with means of masked replies.

    Args:
        algorithm: the algorithm.
        clients: how many clients take part.
        least: the fewest clients in a sum.
        coded: whether messages are coded.
        participation: who takes part in a round.
        diagnostics: what is recorded of single replies.

    Raises:
        ConfigError: it cannot; the sentence says what needs single replies.
        NotInstalled: the package `cryptography` is missing.
    """
    name = type(algorithm).__name__
    if algorithm.simulation_only:
        raise ConfigError(
            f"{name} trains on the data of all sites in one place, where secure_mean has nothing "
            f"to hide; leave out either secure_mean or {name}"
        )
    if algorithm.compares_replies:
        raise ConfigError(
            "secure_mean hides the replies of single sites, and a robust mean compares them; leave "
            "out either secure_mean or +robust"
        )
    averaged = algorithm.averaged_parts()
    single = sorted(
        part
        for part, schema in algorithm.all_sends().items()
        if not schema.opt_in and part not in averaged | IN_CLEAR
    )
    if single:
        raise ConfigError(
            f"secure_mean hides the replies of single sites, and {name} needs the part "
            f"{single[0]!r} of each; leave secure_mean out, or choose an algorithm that only "
            f"averages, such as fedavg"
        )
    if coded:
        raise ConfigError(
            "secure_mean sends integers under masks, which no codec can shorten; leave out either "
            "secure_mean or codec"
        )
    if diagnostics:
        raise ConfigError(
            f"secure_mean hides the replies of single sites, and diagnostics looks at each for "
            f"{min(diagnostics)}; leave out either secure_mean or diagnostics"
        )
    if not averaged:
        return
    asked = min(participation.clients_per_round or clients, clients)
    if asked < least:
        raise ConfigError(
            f"{asked} sites train in a round, and secure_mean.min_sites is {least}; have more take "
            f"part: of two, each can tell the other's model from the mean"
        )
    check_installed()


def check_installed() -> None:
    """Check that the package from which keys and masks come is there.

    Raises:
        NotInstalled: it is not.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise NotInstalled(
            f"secure_mean needs the package cryptography ({error}); install it with: "
            f"pip install 'collegium[secure]'"
        ) from error
