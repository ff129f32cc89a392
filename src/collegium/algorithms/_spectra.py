"""The exchange of spectra in pFL-ResFIM and FedDG, and images in the style of another site."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Lt

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Server, handler
from collegium.core.dataset import Batch, SampleTransform
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.payloads import PartSchema, Spectra
from collegium.core.settings import Share, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError
from collegium.heterogeneity.spectra import amplitude_window, as_images, transfer

if TYPE_CHECKING:
    from torch import Tensor


@settings
class SpectraExchange(FedAvg):
    """FedAvg before which every client receives low-frequency amplitudes of the others' images.

    Attributes:
        window: L, ratio of the window's radius to the images' smallest side; 0 exchanges the mean
            intensity alone.
        spectra_share: share of a site's training images whose amplitudes are sent.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"spectra": Spectra()}
    neutral: ClassVar[Mapping[str, Any] | None] = None

    window: Annotated[float, Ge(0), Lt(0.5)] = 0.01
    spectra_share: Share = 1.0

    def require_others(self, clients: Sequence[str], instead: str = "") -> None:
        """Refuse a single site.

        Args:
            clients: the sites.
            instead: what could be done beside adding sites, for the message.

        Raises:
            ConfigError: there is one site only.
        """
        if len(clients) == 1:
            raise ConfigError(
                f"{clients[0]!r} is the only site, so that there is no other whose style its "
                f"images could take; add sites, {instead}or choose local"
            )

    def exchange_spectra(self, server: Server) -> None:
        """Send every client the amplitudes of the others, unnamed.

        Raises:
            ProtocolError: fewer than two sites have training images, or their sizes differ.
        """
        replies = server.ask(self.show_spectra).items()
        spectra = {client: reply["spectra"] for client, reply in replies if "spectra" in reply}
        others = windows_of_others(spectra, server.clients)
        server.ask(self.keep_spectra, each={c: {"spectra": own} for c, own in others.items()})

    @handler
    def show_spectra(self, client: Client, request: Message) -> Message:
        """Send the low-frequency amplitudes of training images, of crops if training crops.

        Args:
            client: the site.
            request: nothing.
        """
        spectra = windows_of(client, share=self.spectra_share, ratio=self.window)
        return Message.of() if spectra is None else Message.of(spectra=spectra)

    @handler
    def keep_spectra(self, client: Client, request: Message) -> Message:
        """Keep the amplitudes of the other sites.

        Args:
            client: the site.
            request: ``spectra``, a list with those of each other site.
        """
        client.state["spectra"] = request["spectra"]
        return Message.of()

    def spectra_of_others(self, client: Client) -> list[Tensors]:
        """Return the amplitudes of each other site.

        Args:
            client: the site.

        Raises:
            ProtocolError: the site missed the exchange of spectra.
        """
        if "spectra" not in client.state:
            raise ProtocolError(
                f"site {client.id!r} never received the spectra of the other sites; start the run "
                f"again while it answers"
            )
        found: list[Tensors] = client.state["spectra"]
        return found


def windows_of(client: Client, *, share: float, ratio: float) -> Tensors | None:
    """Return low-frequency amplitudes of a site's training images; None if it has none.

    Args:
        client: lends its examples, as crops if training crops.
        share: share of the images that are taken, drawn at random.
        ratio: see `collegium.heterogeneity.spectra.window_radius`.

    Raises:
        ProtocolError: an image holds NaN or infinite intensities, or images differ in size.
    """
    count = math.ceil(share * client.num_examples)
    if count == 0:
        return None
    rng = client.rng("spectra")
    windows, shape = [], None
    for index in torch.randperm(client.num_examples, generator=rng)[:count].tolist():
        image = as_images(client.examples.batch([index], [rng])["image"])
        if not torch.isfinite(image).all():
            raise ProtocolError(
                f"a training image of site {client.id!r} holds NaN or infinite intensities, "
                f"so that it has no spectrum; correct it or leave its case out"
            )
        shape = shape or image.shape
        _require_equal(f"site {client.id!r}", shape[1:], image.shape[1:])
        windows.append(amplitude_window(image, ratio))
    size = torch.tensor(shape[2:] if shape else ())
    return Tensors({"windows": torch.cat(windows), "size": size})


def windows_of_others(
    spectra: Mapping[str, Tensors], clients: Collection[str]
) -> dict[str, list[Tensors]]:
    """Return by client the windows of all others, in an order that only their content determines.

    Args:
        spectra: by client what `windows_of` returned.
        clients: all clients.

    Raises:
        ProtocolError: fewer than two clients have spectra, or their images differ in size.
    """
    _require_one_size(spectra)
    order = sorted(spectra, key=lambda client: spectra[client]["windows"].numpy().tobytes())
    return {
        client: [spectra[other].select({"windows"}) for other in order if other != client]
        for client in clients
    }


def in_the_style_of(others: Sequence[Tensors]) -> SampleTransform:
    """Return the view of a sample under the amplitudes of one random image of each other client.

    Args:
        others: ``windows`` of each of them.
    """

    def view(sample: Batch, rng: torch.Generator) -> Batch:
        sets = [other["windows"] for other in others]
        picks = [int(torch.randint(len(windows), (), generator=rng)) for windows in sets]
        chosen = torch.stack([w[pick] for w, pick in zip(sets, picks, strict=True)])
        image = sample["image"]
        styled = transfer(as_images(image), chosen).reshape(-1, *image.shape[1:])
        return {key: t.expand(len(styled), *t.shape[1:]) for key, t in sample.items()} | {
            "image": styled
        }

    return view


def interpolated(
    images: Tensor, others: Sequence[Tensor], ratio: float, rng: torch.Generator
) -> Tensor:
    """Return images whose low-frequency amplitudes are mixed with those of other sites' images.

    Each image draws a site, one of its images, and the share l of its amplitudes from U(0, 1): the
    amplitudes become (1 - l) own + l other, and the phases stay.

    Args:
        images: (B, C, *spatial).
        others: by site its windows, (images, C, 2b + 1, ...).
        ratio: of the windows; see `collegium.heterogeneity.spectra.window_radius`.
        rng: the generator.
    """
    pixels = as_images(images)
    windows = []
    for _ in range(len(pixels)):
        site = others[int(torch.randint(len(others), (), generator=rng))]
        windows.append(site[int(torch.randint(len(site), (), generator=rng))])
    other, own = torch.stack(windows).to(pixels), amplitude_window(pixels, ratio)
    shares = torch.rand(len(pixels), generator=rng, dtype=torch.float64).to(pixels)
    shares = shares.reshape(-1, *[1] * (own.ndim - 1))
    return transfer(pixels, (1 - shares) * own + shares * other).reshape(images.shape)


def _require_one_size(spectra: Mapping[str, Tensors]) -> None:
    """Check that the amplitudes of these sites can be exchanged."""
    if len(spectra) < 2:
        who = f"only site {min(spectra)!r} has" if spectra else "no site has"
        raise ProtocolError(
            f"{who} training images to take amplitudes from, which takes two sites; add training "
            f"cases, or choose another algorithm"
        )
    (first, one), *rest = sorted(spectra.items())
    for client, other in rest:
        sizes = [(s["windows"].shape[1], *s["size"].tolist()) for s in (one, other)]
        _require_equal(f"sites {first!r} and {client!r}", *sizes)


def _require_equal(where: str, one: Sequence[int], other: Sequence[int]) -> None:
    """Check that images have as many channels and the same spatial shape."""
    if tuple(one) == tuple(other):
        return
    shapes = [" x ".join(map(str, shape)) for shape in (one, other)]
    raise ProtocolError(
        f"training images of {where} have different sizes, {shapes[0]} and {shapes[1]} (channels "
        f"first), so that amplitudes do not fit; set sampling.crop or image.size (and "
        f"image.channels where the first numbers differ)"
    )
