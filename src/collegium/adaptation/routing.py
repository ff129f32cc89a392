"""IOP-FL's test-time routing (Jiang et al., 2023, https://arxiv.org/abs/2204.08467)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from collegium.adaptation._losses import consistency_loss, entropy_loss, exclusive, shape_loss
from collegium.adaptation._norms import affine, batch_norms, use_batch_statistics
from collegium.adaptation._routed import (
    RoutedLayer,
    SharedRouter,
    fill,
    layer_router,
    make_routed,
    routing_parameters,
)
from collegium.adaptation._variation import weight_variation
from collegium.adaptation.base import (
    GLOBAL,
    Account,
    Adapted,
    Adapter,
    Deliver,
    Images,
    Sources,
    Spread,
    descend,
    groups,
    predict,
)
from collegium.core.dataset import Example
from collegium.core.randomness import ambient, generator
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import Task

Term = Literal["consistency", "shape", "entropy"]

TERMS: tuple[Term, ...] = ("consistency", "shape", "entropy")

Losses = dict[str, float]
State = list[Tensor]


@dataclass(frozen=True)
class Routing(Adapter):
    """Mixes the weights of all personal models and the global one, layer by layer (Eq. 5-10).

    Every convolution, transposed or not, and every linear layer uses the sum of the models' weights
    and biases times coefficients that depend on its input, a set of its own for every sample (Eq.
    5-6). What has no weights of this kind, such as the scale of a normalisation, comes from the
    global model, or from the mean of the personal models where there is none. Batch normalisation
    uses the statistics of the batch. The routers are trained by Adam on L_cons + beta (L_shape +
    L_entropy) (Eq. 7-10) of the images and of the images with Gaussian noise; the state with the
    least mean loss over all cases, measured with equal noise and without dropout, predicts.

    Deviations: the coefficients start at exactly 1 / (K + 1), as Algorithm 1 says, and the released
    code does not do; noise and dropout differ from step to step, where the released code draws the
    same ones in every step; the losses average over pixels (see `docs/algorithms/iopfl.md`); the
    state is chosen by the loss, as the paper says, and not by the Dice on labels; the released code
    leaves the bottleneck's routers and the fifth model out by mistake. A case larger than the
    inference window is learnt from and predicted window by window, each with coefficients of its
    own. Images and noisy images pass one after the other, so that each has its own statistics.

    Attributes:
        epochs: passes over the cases; in the modes other than "all", steps for each batch.
        lr: learning rate of Adam.
        beta: weight of the shape and the entropy loss.
        terms: which losses count.
        noise: standard deviation of the noise; the images are z-scored.
        transforms: whether the noisy images are also mirrored and turned at random, which is undone
            on their predictions, as the released code does.
        radius: of the window of the shape loss, in pixels.
        granularity: "layer", or "model" for one coefficient per model, the same in all layers and
            for all images.
        mode: "all" adapts to all cases, then predicts them (the paper); "episodic" starts anew for
            every batch of cases and predicts it; "online" goes on from batch to batch.
        selection: "lowest" keeps the state with the least loss, "last" the last one.
        dropout: of the routers, while they are trained.
        adapt_bn_affine: whether scale and shift of batch normalisation are trained too, as in the
            released code.
        batch_size: cases, slices or windows in one step.
    """

    needs: ClassVar[Collection[str]] = ("personal",)

    epochs: int = 10
    lr: float = 1e-3
    beta: float = 0.01
    terms: tuple[Term, ...] = TERMS
    noise: float = 0.5
    transforms: bool = False
    radius: int = 10
    granularity: Literal["layer", "model"] = "layer"
    mode: Literal["all", "episodic", "online"] = "all"
    selection: Literal["lowest", "last"] = "lowest"
    dropout: float = 0.2
    adapt_bn_affine: bool = False
    batch_size: int = 4

    def __post_init__(self) -> None:
        for name, good in (
            ("epochs", self.epochs >= 1),
            ("lr", 0 < self.lr < math.inf),
            ("beta", 0 <= self.beta < math.inf),
            ("terms", bool(self.terms) and set(self.terms) <= {*TERMS}),
            ("noise", 0 <= self.noise < math.inf),
            ("radius", self.radius >= 0),
            ("dropout", 0 <= self.dropout < 1),
            ("batch_size", self.batch_size >= 1),
        ):
            if not good:
                raise ConfigError(
                    f"routing.{name} is {getattr(self, name)!r}, which cannot be; see its defaults"
                )

    def check_output(self, task: Task, images: Tensor, output: Tensor) -> None:
        """Refuse rows and classes of whole images where `transforms` and `terms` need axes."""
        if self.transforms and "consistency" in self.terms:
            _Move(torch.Generator(), images)
        if "shape" in self.terms:
            shape_loss(exclusive(output, task, "routing"), self.radius)

    def adapt(self, sources: Sources, cases: Images, deliver: Deliver) -> Adapted:
        """Train the routers, and predict with the mixed network."""
        with ambient(sources.seed, "routing"):
            network = self._open(sources)
            account = Account(network.names, over="pass" if self.mode == "all" else "batch")
            if self.mode == "all":
                self._adapt_to_all(network, cases, account)
                for members, example in groups(cases, self.batch_size):
                    network.deliver(members, example, deliver)
            else:
                self._adapt_by_batch(network, cases, account, deliver)
        account.coefficients, account.spreads = network.mean_coefficients(), network.spreads()
        return Adapted(account, Tensors(network.module.state_dict()))  # nobody else holds them

    def _open(self, sources: Sources) -> _Network:
        """Build the mixed network."""
        names = sources.require_personal("routing")
        if GLOBAL in sources.models:
            names = [GLOBAL, *names]
        module = sources.open(sources.starting_model()[0])
        shared = SharedRouter(len(names)) if self.granularity == "model" else None
        make = (lambda _: shared) if shared else layer_router(len(names), self.dropout)
        layers = make_routed(module, len(names), make)
        fill(layers, sources.models, names)
        module.to(sources.device)
        use_batch_statistics(module)
        module.requires_grad_(False)
        moving = list(routing_parameters(layers))
        if self.adapt_bn_affine:
            moving += [p for p in affine(batch_norms(module)) if isinstance(p, nn.Parameter)]
        for parameter in moving:
            parameter.requires_grad_(True)
        task = sources.task.batched(self.batch_size)
        return _Network(module, layers, moving, names, task, sources.seed)

    def _adapt_to_all(self, network: _Network, cases: Images, account: Account) -> None:
        """Train on all cases for some epochs, and keep the state that is chosen."""
        optimizer = torch.optim.Adam(network.moving, lr=self.lr, foreach=False)
        best, least = network.state(), math.inf
        for epoch in range(self.epochs + 1):
            if epoch:
                for number, images in enumerate(network.windows(cases, self.batch_size)):
                    self._step(network, optimizer, images, ("epoch", epoch, number))
                    account.steps += 1
            row = self._measure(network, network.windows(cases, self.batch_size))
            account.losses.append({"step": epoch, **row})
            if self.selection == "last" or row["total"] < least:
                network.keep(best)
                least, account.chosen = row["total"], epoch
        network.restore(best)

    def _adapt_by_batch(
        self, network: _Network, cases: Images, account: Account, deliver: Deliver
    ) -> None:
        """Train on one batch of cases after the other, and predict each."""
        start = network.state()
        optimizer = torch.optim.Adam(network.moving, lr=self.lr, foreach=False)
        for number, (members, example) in enumerate(groups(cases, self.batch_size)):
            if self.mode == "episodic":
                network.restore(start)
                optimizer = torch.optim.Adam(network.moving, lr=self.lr, foreach=False)
            windows = list(network.task.windows(network.module, example.batch["image"]))
            best, row = network.state(), self._measure(network, windows)
            for step in range(self.epochs):
                for piece, images in enumerate(windows):
                    self._step(network, optimizer, images, ("batch", number, step, piece))
                    account.steps += 1
                now = self._measure(network, windows)
                if self.selection == "last" or now["total"] < row["total"]:
                    network.keep(best)
                    row = now
            network.restore(best)
            account.losses.append({"step": number, **row})
            network.deliver(members, example, deliver)

    def _step(
        self,
        network: _Network,
        optimizer: torch.optim.Optimizer,
        images: Tensor,
        path: tuple[str | int, ...],
    ) -> None:
        """Take one step on a batch."""
        for layer in network.layers.values():
            layer.router.train()
        total, _ = self._loss(network, images, path)
        descend(optimizer, total, "routing")

    @torch.no_grad()
    def _measure(self, network: _Network, windows: Collection[Tensor] | Iterator[Tensor]) -> Losses:
        """Return the mean losses over all images, with equal noise at every call."""
        for layer in network.layers.values():
            layer.router.eval()
        sums: Losses = {}
        count = 0
        for number, images in enumerate(windows):
            total, parts = self._loss(network, images, ("selection", number))
            for name, value in {"total": total, **parts}.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(images)
            count += len(images)
        return {name: value / count for name, value in sums.items()}

    def _loss(
        self, network: _Network, images: Tensor, path: tuple[str | int, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss (Eq. 10) and its terms for images (B, C, *spatial)."""
        rng = generator(network.seed, "routing", *path)
        clean = network.chances(images)
        parts: dict[str, Tensor] = {}
        if "consistency" in self.terms:
            noisy = images + self.noise * torch.randn(images.shape, generator=rng).to(images)
            moved = _Move(rng, images) if self.transforms else _Stay()
            perturbed = moved.undo(network.chances(moved.do(noisy)))
            parts["consistency"] = consistency_loss(clean, perturbed)
        if "shape" in self.terms:
            parts["shape"] = shape_loss(clean, self.radius)
        if "entropy" in self.terms:
            parts["entropy"] = entropy_loss(clean)
        weights = {"consistency": 1.0, "shape": self.beta, "entropy": self.beta}
        total = torch.stack([weights[name] * value for name, value in parts.items()]).sum()
        return total, parts


_ENDS = (".router.output.bias", ".router.logits")
"""What the last tensor of a router is called: of a layer's own, and of one for all layers."""


def holds_routers(model: Mapping[str, Tensor]) -> bool:
    """Whether it is a model that `Routing` ended with."""
    return any(name.endswith(_ENDS) for name in model)


def open_routed(network: nn.Module, model: Mapping[str, Tensor]) -> nn.Module:
    """Return the mixed network that an adaptation ended with, to predict more images.

    Batch normalisation uses the statistics of what is predicted at once, so predict as many images
    at once as the adaptation did.

    Args:
        network: a new network such as `Sources.network` makes; it is changed and returned.
        model: `Adapted.model`, or what `collegium.models.files.import_model` reads of it.

    Raises:
        ConfigError: the model is none that `Routing` ended with, or is that of another network.
    """
    if not holds_routers(model):
        raise ConfigError("the model holds no routers; give one that the adapter routing wrote")
    sources = next(len(tensor) for name, tensor in model.items() if name.endswith(_ENDS))
    shared = SharedRouter(sources) if any(name.endswith(_ENDS[1]) for name in model) else None
    make_routed(network, sources, (lambda _: shared) if shared else layer_router(sources, 0.0))
    use_batch_statistics(network)
    try:
        network.load_state_dict(dict(model))
    except RuntimeError as error:
        raise ConfigError(
            f"the model is not that of {type(network).__name__} with its present settings; give "
            f"the network that was adapted"
        ) from error
    return network.requires_grad_(False)


@dataclass
class _Network:
    """The mixed network, what of it is trained, and what its routers have said of the cases."""

    module: nn.Module
    layers: dict[str, RoutedLayer]
    moving: list[nn.Parameter]
    names: list[str]
    task: Task
    seed: int
    noted: dict[str, list[Tensor]] = field(default_factory=dict)

    def windows(self, cases: Images, size: int) -> Iterator[Tensor]:
        """Yield what enters the network at once, in the order of the cases."""
        for _, example in groups(cases, size):
            yield from self.task.windows(self.module, example.batch["image"])

    def chances(self, images: Tensor) -> Tensor:
        """Return the probabilities of the classes, see `exclusive`."""
        return exclusive(self.module(images), self.task, "routing").softmax(dim=1)

    def state(self) -> State:
        """Return a copy of what is trained."""
        return [parameter.detach().clone() for parameter in self.moving]

    def keep(self, state: State) -> None:
        """Write what is trained over what `state` returned."""
        for parameter, value in zip(self.moving, state, strict=True):
            value.copy_(parameter.detach())

    def restore(self, state: State) -> None:
        """Put back what `state` returned."""
        with torch.no_grad():
            for parameter, value in zip(self.moving, state, strict=True):
                parameter.copy_(value)

    def deliver(self, members: list[int], example: Example, deliver: Deliver) -> None:
        """Predict a group of cases, and note the coefficients."""
        for layer in self.layers.values():
            layer.router.eval()
        hooks = [
            layer.register_forward_hook(partial(self._note, name))
            for name, layer in self.layers.items()
        ]
        try:
            for index, prediction in predict(self.task, self.module, members, example):
                deliver("", index, prediction)
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, layer: RoutedLayer, *_: object) -> None:
        assert layer.coefficients is not None
        self.noted.setdefault(name, []).append(layer.coefficients.cpu().double())

    def mean_coefficients(self) -> dict[str, dict[str, float]]:
        """Return the mean coefficients of the cases by layer, as they were called, and source."""
        return {
            name: self._by_source(torch.cat(noted).mean(dim=0))
            for name, noted in self.noted.items()
        }

    def spreads(self) -> dict[str, Spread]:
        """Return by layer how the cases differ."""
        found = {}
        for name, noted in self.noted.items():
            coefficients = torch.cat(noted)
            variation = weight_variation(self.layers[name].get_buffer("weight"), coefficients)
            deviation, mean = torch.std_mean(variation, correction=0)
            deviations = self._by_source(coefficients.std(dim=0, correction=0))
            found[name] = Spread(deviations, float(mean), float(deviation))
        return found

    def _by_source(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))


class _Stay:
    """Leaves images where they are."""

    def do(self, images: Tensor) -> Tensor:
        return images

    def undo(self, maps: Tensor) -> Tensor:
        return maps


class _Move(_Stay):
    """Mirrors images along the first spatial axis and turns them in the plane, at random."""

    def __init__(self, rng: torch.Generator, images: Tensor) -> None:
        if images.ndim == 2:
            raise ConfigError("routing.transforms turns images, not rows; set it to false")
        square = images.ndim > 3 and images.shape[2] == images.shape[3]
        self.mirror = bool(torch.randint(2, (), generator=rng))
        self.turns = int(torch.randint(4, (), generator=rng)) if square else 0

    def do(self, images: Tensor) -> Tensor:
        moved = images.flip(2) if self.mirror else images
        return torch.rot90(moved, self.turns, (2, 3)) if self.turns else moved

    def undo(self, maps: Tensor) -> Tensor:
        if maps.ndim == 2:  # classes of whole images
            return maps
        back = torch.rot90(maps, -self.turns, (2, 3)) if self.turns else maps
        return back.flip(2) if self.mirror else back
