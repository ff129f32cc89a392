"""pFL-ResFIM (Zhu et al., ISBI 2026, https://arxiv.org/abs/2603.14848)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Server, handler
from collegium.core.dataset import Batch, SampleTransform, unchanged
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Bits, Numbers, Part, Spectra
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ClientError, ConfigError, ProtocolError
from collegium.heterogeneity.spectra import amplitude_window, transfer
from collegium.training.fisher import (
    Normaliser,
    mean_information,
    pack_mask,
    residual_information,
    top_mask,
    unpack_mask,
)

_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "delta": (lambda value: 0 <= value <= 100, "a percentage from 0 to 100"),
    "window": (lambda value: 0 <= value < 0.5, "a number from 0 to below 0.5, such as 0.01"),
    "spectra_share": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "fim_max_samples": (lambda value: value >= 1, "at least 1"),
    "eps": (lambda value: 0 < value < math.inf, "a number above 0, such as 0.001"),
}


@dataclass(frozen=True)
class ResFIM(FedAvg):
    """FedAvg in which a client keeps those parameters that depend on its images' style.

    Once, before training: every client sends the low-frequency amplitudes of its training images
    and receives those of the others. Then in every round, with F the diagonal Fisher information
    (see `collegium.training.fisher`), F' the same over each image under the amplitudes of one
    random image of each other client, and e = eps * mean of F:

    W_c  = trained from V_c
    R_c  = |F - F'| / max(F, F', e)
    M_c  = 1 for the delta percent of the trainable parameters with the largest R_c, else 0
    V_c  = M_c W_c + (1 - M_c) mean_i W_i

    V_c is the client's personal model, the mean the global one.

    Deviations. Eq. 1 as printed divides |F - F'| by max(|F - F'|, e), which is 1 nearly everywhere
    and ranks nothing; the denominators tried are options. Eq. 2 as printed sums the W_i where only
    a mean keeps their scale. The printed expectation over the model's own predictions (the true
    Fisher information) contradicts its arguments; true labels are used. Only the window of
    amplitudes that is replaced leaves a site, which gives the same images as whole spectra. The
    client forms V_c from the mean and what it kept, so that masks need not travel: the same
    numbers, and one model for all on the way down. Running statistics, which have no gradient, are
    averaged. There is no released code.

    Attributes:
        weighting: "uniform" (the paper's objective) or "examples", for the mean.
        delta: percentage of the trainable parameters that stay personal; at 0 the method is FedAvg
            and no spectra are exchanged. The paper prints no value.
        window: L, ratio of the window's radius to the images' smallest side; 0 exchanges the mean
            intensity alone. The paper prints no value.
        spectra_share: share of a site's training images whose amplitudes are sent.
        fim_max_samples: most training images that a Fisher information is estimated from, drawn
            anew in every round; each takes one backward pass per client.
        normaliser: denominator of R_c: "max" as above, "source" max(F, e), "absolute" none.
        eps: relative to the mean of F.
        invariant_only: average every parameter over the clients alone that do not keep it, for
            which the masks travel, one bit for a parameter.
        bn_buffers: whether a personal model takes the "average" running statistics of
            normalisation layers or keeps its "local" ones.
    """

    sends: ClassVar[Mapping[str, Part]] = {
        "spectra": Spectra(),
        "mask": Bits(says="which parameters stay personal"),
        "masking_rates": Numbers(says="share of each tensor that stays personal", record=True),
    }
    neutral: ClassVar[Mapping[str, Any] | None] = {
        "delta": 0.0,
        "weighting": "examples",
        "bn_buffers": "average",
    }

    weighting: Literal["examples", "uniform"] = "uniform"
    delta: float = 20.0
    window: float = 0.01
    spectra_share: float = 1.0
    fim_max_samples: int = 64
    normaliser: Normaliser = "max"
    eps: float = 1e-3
    invariant_only: bool = False
    bn_buffers: Literal["average", "local"] = "average"

    def __post_init__(self) -> None:
        for name, (fits, wanted) in _RANGES.items():
            if not fits(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; choose {wanted}")

    def unused_sends(self) -> Collection[str]:
        """Masks unless the server needs them; nothing but FedAvg's parts where none stays."""
        if self.delta == 0:
            return {"spectra", "mask", "masking_rates"}
        return set() if self.invariant_only else {"mask"}

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a single site."""
        if self.delta and len(clients) == 1:
            raise ConfigError(
                f"{clients[0]!r} is the only site, so that there is no other whose style "
                f"its images could take; add sites, set delta to 0, or choose local"
            )

    def setup(self, server: Server) -> None:
        """Exchange amplitudes: every client receives those of the others, unnamed.

        Raises:
            ProtocolError: fewer than two sites have training images, or their sizes differ.
        """
        super().setup(server)
        if self.delta == 0:
            return
        replies = server.ask(self.show_spectra).items()
        shown = {client: reply["spectra"] for client, reply in replies if "spectra" in reply}
        _require_one_size(shown)
        order = sorted(shown, key=lambda client: shown[client]["windows"].numpy().tobytes())
        others = {
            client: [shown[other].select({"windows"}) for other in order if other != client]
            for client in server.clients
        }
        server.ask(self.keep_spectra, each={c: {"spectra": list_} for c, list_ in others.items()})

    def round(self, server: Server) -> None:
        """Average the models, or of each parameter those whose client does not keep it."""
        if not (self.invariant_only and self.delta):
            super().round(server)
            return
        models, invariant, shares = Mean(), Mean(), Mean()
        for client, reply in server.ask(self.train, model=server.state["model"]):
            parameters = reply["model"].select(server.parts.trainable)
            free = unpack_mask(reply["mask"], parameters).map(torch.logical_not)
            weight = reply[self.weight] if self.weight else 1.0
            models.add(reply["model"], weight, f"client {client!r}")
            invariant.add(parameters.map(torch.mul, free), weight)
            shares.add(parameters.map(lambda t, m: m.to(t.dtype), free), weight)
        mean = models.result()
        server.state["model"] = mean | mean.select(server.parts.trainable).map(
            lambda whole, part, share: torch.where(share > 0, part / share, whole),
            invariant.result(),
            shares.result(),
        )

    @handler
    def show_spectra(self, client: Client, request: Message) -> Message:
        """Send the low-frequency amplitudes of training images (crops where training crops)."""
        count = math.ceil(self.spectra_share * client.num_examples)
        if count == 0:
            return Message.of()
        rng = client.rng("spectra")
        windows, shape = [], None
        for index in torch.randperm(client.num_examples, generator=rng)[:count].tolist():
            image = _as_image(client.examples.batch([index], [rng])["image"])
            if not torch.isfinite(image).all():
                raise ProtocolError(
                    f"a training image of site {client.id!r} holds NaN or infinite intensities, "
                    f"so that it has no spectrum; correct it or leave its case out"
                )
            shape = shape or image.shape
            if image.shape != shape:
                raise ProtocolError(_unequal(f"site {client.id!r}", shape, image.shape))
            windows.append(amplitude_window(image, self.window))
        size = torch.tensor(shape[2:] if shape else ())
        return Message.of(spectra=Tensors({"windows": torch.cat(windows), "size": size}))

    @handler
    def keep_spectra(self, client: Client, request: Message) -> Message:
        """Keep the amplitudes of the other sites."""
        client.state["spectra"] = request["spectra"]
        return Message.of()

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the personal model, and keep what of it depends on the images' style."""
        model = client.fit(self.personal_model(client, request))
        reply = {"model": model, "num_examples": client.num_examples}
        if self.bn_buffers == "local":
            client.state["statistics"] = model.select(client.parts.norm_statistics)
        if self.delta:
            mask = self._mask(client, model)
            reply["masking_rates"] = {
                name: float(marks.double().mean()) for name, marks in mask.distinct().items()
            }
            client.state["mask"] = pack_mask(mask)
            client.state["own"] = model.select(mask).map(lambda t, marks: t[marks], mask)
            if self.invariant_only:
                reply["mask"] = client.state["mask"]
        return Message(reply)

    def _mask(self, client: Client, model: Tensors) -> Tensors:
        """Return M_c; a site without training images keeps nothing."""
        parameters = model.select(client.parts.trainable)
        if client.num_examples == 0:
            return parameters.map(lambda t: torch.zeros_like(t, dtype=torch.bool))
        if "spectra" not in client.state:
            raise ProtocolError(
                f"site {client.id!r} never received the spectra of the other sites; start the run "
                f"again while it answers"
            )
        own, simulated = client.fisher(
            model,
            views=(unchanged, _in_the_style_of(client.state["spectra"])),
            limit=self.fim_max_samples,
        )
        if mean_information(own) == 0:
            raise ClientError(
                f"the Fisher information of site {client.id!r} is zero everywhere: no parameter "
                f"moves the loss on its images; look at their labels and fields of view, or set "
                f"delta to 0"
            )
        residual = residual_information(own, simulated, self.normaliser, self.eps)
        return top_mask(Tensors((name, residual[name]) for name in parameters), self.delta)

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """V_c: the mean under what the client kept; before its first round the received model."""
        model: Tensors = request["model"]
        statistics: Tensors = client.state.get("statistics", Tensors())
        if "mask" not in client.state:
            return model | statistics
        mean = model.select(client.parts.trainable)
        mask = unpack_mask(client.state["mask"], mean)
        return model | mean.map(Tensor.masked_scatter, mask, client.state["own"]) | statistics


def _in_the_style_of(others: list[Tensors]) -> SampleTransform:
    """Return the view that shows a sample under one random image's amplitudes of each client."""

    def view(sample: Batch, rng: torch.Generator) -> Batch:
        sets = [other["windows"] for other in others]
        picks = [int(torch.randint(len(windows), (), generator=rng)) for windows in sets]
        chosen = torch.stack([w[pick] for w, pick in zip(sets, picks, strict=True)])
        image = sample["image"]
        styled = transfer(_as_image(image), chosen).reshape(-1, *image.shape[1:])
        return {key: t.expand(len(styled), *t.shape[1:]) for key, t in sample.items()} | {
            "image": styled
        }

    return view


def _as_image(images: Tensor) -> Tensor:
    """Take rows of a table (B, features) and signals (B, C, length) as images of one row."""
    images = images.unsqueeze(1) if images.ndim == 2 else images
    return images.unsqueeze(2) if images.ndim == 3 else images


def _require_one_size(shown: Mapping[str, Tensors]) -> None:
    """Say why the amplitudes of these sites cannot be exchanged."""
    if len(shown) < 2:
        who = f"only site {min(shown)!r} has" if shown else "no site has"
        raise ProtocolError(
            f"{who} training images to take amplitudes from, which takes two sites; set delta to "
            f"0 or add training cases"
        )
    (first, one), *rest = sorted(shown.items())
    for client, spectra in rest:
        found, wanted = ((s["windows"].shape[1], *s["size"].tolist()) for s in (spectra, one))
        if found != wanted:
            raise ProtocolError(
                _unequal(f"sites {first!r} and {client!r}", (1, *wanted), (1, *found))
            )


def _unequal(where: str, one: tuple[int, ...], other: tuple[int, ...]) -> str:
    shapes = [" x ".join(map(str, shape[1:])) for shape in (one, other)]
    return (
        f"training images of {where} have different sizes, {shapes[0]} and {shapes[1]} (channels "
        f"first), so that amplitudes do not fit; set sampling.crop or image.size (and "
        f"image.channels where the first numbers differ)"
    )
