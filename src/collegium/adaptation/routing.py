"""IOP-FL's test-time routing (Jiang et al., 2023, https://arxiv.org/abs/2204.08467)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np

from collegium.adaptation._losses import (
    class_logits,
    consistency_loss,
    counted_pixels,
    entropy_loss,
    shape_loss,
)
from collegium.adaptation._norms import affine, batch_norms, use_batch_statistics
from collegium.adaptation.base import (
    GLOBAL,
    AdaptationRecord,
    AdaptationResult,
    Adapter,
    Cases,
    Deliver,
    LayerSpread,
    Sources,
    Window,
    batch_windows,
    case_batches,
    case_windows,
    copies_of,
    optimizer_step,
    overwrite,
    predict_batch,
)
from collegium.core.dataset import Example, full_mask
from collegium.core.lazy import nn, torch
from collegium.core.optimizers import unmarked
from collegium.core.randomness import ambient, generator
from collegium.core.settings import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    rule,
    settings,
)
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.adaptation._routed_layers import RoutedLayer

Term = Literal["consistency", "shape", "entropy"]

TERMS: tuple[Term, ...] = ("consistency", "shape", "entropy")

Losses = dict[str, float]


def _any_weight(weights: Mapping[Term, float]) -> bool:
    return any(weight > 0 for weight in weights.values())


@settings
class Routing(Adapter):
    """Test-time routing, which mixes the weights of all models layer by layer (Eq. 5-10).

    Every convolution, transposed or not, and every linear layer uses the sum of the weights and
    biases of the personal models and the global one, times coefficients that depend on its input,
    separately for every sample (Eq. 5-6). Other tensors, such as the scale of a normalisation, come
    from the global model, or from the mean of the personal models if there is none. Batch
    normalisation uses the statistics of the batch. The routers are trained by Adam on L_cons + beta
    (L_shape + L_entropy) (Eq. 7-10) of the images and of the images with Gaussian noise; the state
    with the lowest mean loss over all cases, measured with equal noise and without dropout,
    predicts.

    Deviations: the coefficients start at exactly 1 / (K + 1), as Algorithm 1 says, but not the
    released code; noise and dropout differ from step to step, whereas the released code draws the
    same ones in every step; the losses average over pixels (see `docs/algorithms/iopfl.md`); the
    state is selected by the loss, as the paper says, and not by the Dice on labels; the released
    code leaves out the bottleneck's routers and the fifth model by mistake. A case larger than the
    inference window is learnt from and predicted window by window, each with its own coefficients.
    Images and noisy images pass one after the other, so that each has its own statistics.

    Attributes:
        epochs: passes over the cases; in the modes other than "all", steps for each batch.
        lr: learning rate of Adam.
        beta: weight of the shape and the entropy loss.
        terms: the losses that count.
        weights: the weight of each loss that counts, instead of `terms` and `beta`.
        noise: standard deviation of the noise; the images are z-scored.
        transforms: whether the noisy images are also flipped and rotated at random, which is undone
            on their predictions, as in the released code.
        radius: radius of the window of the shape loss, in pixels.
        granularity: "layer", or "model" for one coefficient per model, the same in all layers and
            for all images.
        mode: "all" adapts to all cases, then predicts them (the paper); "episodic" starts from the
            deployed models for every batch of cases and predicts it; "online" continues from batch
            to batch.
        selection: "lowest" keeps the state with the lowest loss, "last" the last one.
        dropout: dropout of the routers, while they are trained.
        adapt_bn_affine: whether scale and shift of batch normalisation are trained too, as in the
            released code.
        batch_size: cases, slices or windows in one step.
        field_of_view: whether only pixels inside the field of view count in the losses.
        record_steps: whether the predictions at the start and after every pass are scored for the
            record, see `collegium.adaptation.outside.adapt_and_score`, beside the deviations of the
            losses over samples.
    """

    needs: ClassVar[Collection[str]] = ("personal",)

    epochs: PositiveInt = 10
    lr: Positive = 1e-3
    beta: NonNegative = 0.01
    terms: Annotated[tuple[Term, ...], rule(bool, "one or more terms")] = TERMS
    weights: (
        Annotated[Mapping[Term, NonNegative], rule(_any_weight, "one or more weights above 0")]
        | None
    ) = None
    noise: NonNegative = 0.5
    transforms: bool = False
    radius: NonNegativeInt = 10
    granularity: Literal["layer", "model"] = "layer"
    mode: Literal["all", "episodic", "online"] = "all"
    selection: Literal["lowest", "last"] = "lowest"
    dropout: Fraction = 0.2
    adapt_bn_affine: bool = False
    batch_size: PositiveInt = 4
    field_of_view: bool = False
    record_steps: bool = False

    def __post_init__(self) -> None:
        """Refuse weights beside their short form."""
        if self.weights is not None and (self.terms != TERMS or self.beta != Routing.beta):
            raise ConfigError(
                "routing.weights replaces terms and beta; give either the weights, or terms and "
                "beta"
            )

    @property
    def term_weights(self) -> dict[str, float]:
        """The weight of each loss that counts, in the order of `TERMS`."""
        if self.weights is not None:
            return {term: self.weights[term] for term in TERMS if term in self.weights}
        paper = {"consistency": 1.0, "shape": self.beta, "entropy": self.beta}
        return {term: paper[term] for term in TERMS if term in self.terms}

    def check_output(self, task: Task, images: Tensor, output: Tensor) -> None:
        """Refuse rows and classes of whole images if a setting needs spatial axes.

        See `Adapter.check_output`.
        """
        if self.transforms and "consistency" in self.term_weights:
            _FlipAndRotation.draw(torch.Generator(), images)
        if "shape" in self.term_weights:
            shape_loss(class_logits(output, task, "routing"), self.radius)
        if self.field_of_view:
            counted_pixels(full_mask(images), class_logits(output, task, "routing"), "routing")

    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        """Train the routers, and predict with the mixed network. See `Adapter.adapt`."""
        with ambient(sources.seed, "routing"):
            network = self._build(sources)
            per = "pass" if self.mode == "all" else "batch"
            record = AdaptationRecord(network.names, losses_per=per)
            if self.mode == "all":
                self._adapt_to_all(network, sources, cases, record)
                for indices, example in case_batches(cases, self.batch_size):
                    network.deliver(indices, example, deliver)
            else:
                self._adapt_by_batch(network, sources, cases, record, deliver)
        network.write_coefficients(record)
        # no copy: nothing else holds these tensors
        return AdaptationResult(record, Tensors(network.module.state_dict()))

    def _build(self, sources: Sources) -> _RoutedNetwork:
        """Build the mixed network."""
        from collegium.adaptation._routed_layers import (
            fill_weights,
            replace_layers,
            router_factory,
            routing_parameters,
        )

        names = sources.require_personal("routing")
        if GLOBAL in sources.models:
            names = [GLOBAL, *names]
        module = sources.load(sources.starting_model()[0])
        shared = self.granularity == "model"
        router = router_factory(len(names), self.dropout, shared=shared)
        layers = replace_layers(module, len(names), router)
        fill_weights(layers, sources.models, names)
        module.to(sources.device)
        use_batch_statistics(module)
        module.requires_grad_(False)
        trained = list(routing_parameters(layers))
        if self.adapt_bn_affine:
            trained += [p for p in affine(batch_norms(module)) if isinstance(p, nn.Parameter)]
        for parameter in trained:
            parameter.requires_grad_(True)
        task = sources.task.with_batch_size(self.batch_size)
        return _RoutedNetwork(module, layers, trained, names, task, sources.seed)

    def _adapt_to_all(
        self, network: _RoutedNetwork, sources: Sources, cases: Cases, record: AdaptationRecord
    ) -> None:
        """Train on all cases for `epochs`, and keep the selected state."""
        optimizer = unmarked(torch.optim.Adam)(network.trained, lr=self.lr, foreach=False)
        windows = partial(
            case_windows, network.task, network.module, cases, self.batch_size,
            field_of_view=self.field_of_view,
        )  # fmt: skip
        best, lowest = copies_of(network.trained), math.inf
        for epoch in range(self.epochs + 1):
            if epoch:
                for number, window in enumerate(windows()):
                    record.steps += self._step(network, optimizer, window, ("epoch", epoch, number))
            row = self._mean_losses(network, windows())
            record.losses.append({"step": epoch, **row})
            if self.record_steps:
                sources.watch(epoch, self._look(network, cases, windows, record))
            if self.selection == "last" or row["total"] < lowest:
                overwrite(best, network.trained)
                lowest, record.chosen = row["total"], epoch
        overwrite(network.trained, best)

    def _look(
        self,
        network: _RoutedNetwork,
        cases: Cases,
        windows: Callable[[], Iterable[Window]],
        record: AdaptationRecord,
    ) -> Iterator[tuple[int, Tensor]]:
        """Record the deviations of the losses, and yield the predictions of all cases.

        Dropout is off since the mean losses were computed.
        """
        deviations = self._loss_deviations(network, windows())
        record.loss_deviations.append({"step": record.losses[-1]["step"], **deviations})
        for indices, example in case_batches(cases, self.batch_size):
            yield from predict_batch(network.task, network.module, indices, example)

    def _adapt_by_batch(
        self,
        network: _RoutedNetwork,
        sources: Sources,
        cases: Cases,
        record: AdaptationRecord,
        deliver: Deliver,
    ) -> None:
        """Train on one batch of cases after the other, and predict each."""
        adam = partial(unmarked(torch.optim.Adam), network.trained, lr=self.lr, foreach=False)
        start, optimizer = copies_of(network.trained), adam()
        for number, (indices, example) in enumerate(case_batches(cases, self.batch_size)):
            if self.mode == "episodic":
                overwrite(network.trained, start)
                optimizer = adam()
            fov, batch = self.field_of_view, example.batch
            windows = list(batch_windows(network.task, network.module, batch, field_of_view=fov))
            best, row = copies_of(network.trained), self._mean_losses(network, windows)
            predictions = partial(predict_batch, network.task, network.module, indices, example)
            if self.record_steps:
                sources.watch(0, predictions())
            for step in range(self.epochs):
                for place, window in enumerate(windows):
                    record.steps += self._step(
                        network, optimizer, window, ("batch", number, step, place)
                    )
                new = self._mean_losses(network, windows)
                if self.record_steps:
                    sources.watch(step + 1, predictions())
                if self.selection == "last" or new["total"] < row["total"]:
                    overwrite(best, network.trained)
                    row = new
            overwrite(network.trained, best)
            record.losses.append({"step": number, **row})
            network.deliver(indices, example, deliver)

    def _step(
        self,
        network: _RoutedNetwork,
        optimizer: torch.optim.Optimizer,
        window: Window,
        path: tuple[str | int, ...],
    ) -> int:
        """Take one step on a batch if any of its pixels counts; return how many were taken."""
        if not window.counts:
            return 0
        for layer in network.layers.values():
            layer.router.train()
        total, _ = self._loss(network, window, path)
        optimizer_step(optimizer, total, "routing")
        return 1

    def _mean_losses(self, network: _RoutedNetwork, windows: Iterable[Window]) -> Losses:
        """Return the mean losses over what counts, with equal noise at every call."""
        with torch.no_grad():
            for layer in network.layers.values():
                layer.router.eval()
            sums: Losses = {}
            count = 0
            for number, window in enumerate(windows):
                total, terms = self._loss(network, window, ("selection", number))
                weight = len(window.images) if window.inside is None else int(window.inside.sum())
                for name, value in {"total": total, **terms}.items():
                    sums[name] = sums.get(name, 0.0) + float(value) * weight
                count += weight
            return {name: value / max(count, 1) for name, value in sums.items()}

    def _loss_deviations(self, network: _RoutedNetwork, windows: Iterable[Window]) -> Losses:
        """Return the standard deviations over samples of the losses that `_mean_losses` averages.

        A sample is an image or, of a large image, a window; it weighs as in the mean, and the
        squares are divided by the sum of the weights.
        """
        weights: list[int] = []
        losses: dict[str, list[float]] = {}
        with torch.no_grad():
            for number, window in enumerate(windows):
                clean, *others = self._views(network, window, ("selection", number))
                rows = len(clean) // len(window.images)  # of a sample: one for each region
                for sample in range(len(window.images)):
                    own = slice(sample * rows, (sample + 1) * rows)
                    total, terms = self._terms(
                        clean[own], *(None if view is None else view[own] for view in others)
                    )
                    inside = window.inside
                    weights.append(1 if inside is None else int(inside[sample].sum()))
                    for name, value in {"total": total, **terms}.items():
                        losses.setdefault(name, []).append(float(value))
        if not sum(weights):
            return dict.fromkeys(losses, 0.0)
        means = {name: np.average(values, weights=weights) for name, values in losses.items()}
        squares = {name: (np.array(values) - means[name]) ** 2 for name, values in losses.items()}
        return {n: math.sqrt(np.average(values, weights=weights)) for n, values in squares.items()}

    def _loss(
        self, network: _RoutedNetwork, window: Window, path: tuple[str | int, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss (Eq. 10) and its terms for images (B, C, *spatial)."""
        return self._terms(*self._views(network, window, path))

    def _views(
        self, network: _RoutedNetwork, window: Window, path: tuple[str | int, ...]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return z, z' if the consistency counts, and the pixels of both that count."""
        images = window.images
        rng = generator(network.seed, "routing", *path)
        clean, perturbed = network.probabilities(images), None
        if "consistency" in self.term_weights:
            noisy = images + self.noise * torch.randn(images.shape, generator=rng).to(images)
            transform = (
                _FlipAndRotation.draw(rng, images) if self.transforms else _FlipAndRotation()
            )
            perturbed = transform.invert(network.probabilities(transform.apply(noisy)))
        return clean, perturbed, counted_pixels(window.inside, clean, "routing")

    def _terms(
        self, clean: Tensor, perturbed: Tensor | None, counted: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss (Eq. 10) and its terms for views of `_views`."""
        weights = self.term_weights
        terms: dict[str, Tensor] = {}
        if perturbed is not None:
            terms["consistency"] = consistency_loss(clean, perturbed, counted)
        if "shape" in weights:
            terms["shape"] = shape_loss(clean, self.radius, counted)
        if "entropy" in weights:
            terms["entropy"] = entropy_loss(clean, counted)
        total = torch.stack([weights[name] * value for name, value in terms.items()]).sum()
        return total, terms


_ROUTER_SUFFIXES = (".router.output.bias", ".router.logits")
"""The name of a router's last tensor: of one for each layer, and of one for all layers."""


def has_routers(model: Mapping[str, Tensor]) -> bool:
    """Return whether `Routing` wrote a model."""
    return any(name.endswith(_ROUTER_SUFFIXES) for name in model)


def routed_network(network: nn.Module, model: Mapping[str, Tensor]) -> nn.Module:
    """Return the mixed network of an adaptation, to predict more images.

    Batch normalisation uses the statistics of the batch, so predict as many images at once as in
    the adaptation.

    Args:
        network: a new network, as from `Sources.network`; it is changed and returned.
        model: `AdaptationResult.model`, or what `collegium.models.files.import_model` read of it.

    Raises:
        ConfigError: the model was not written by `Routing`, or belongs to another network.
    """
    from collegium.adaptation._routed_layers import replace_layers, router_factory

    if not has_routers(model):
        raise ConfigError("the model holds no routers; give one that the adapter routing wrote")
    sources = next(len(tensor) for name, tensor in model.items() if name.endswith(_ROUTER_SUFFIXES))
    shared = any(name.endswith(_ROUTER_SUFFIXES[1]) for name in model)
    replace_layers(network, sources, router_factory(sources, 0.0, shared=shared))
    use_batch_statistics(network)
    try:
        network.load_state_dict(dict(model))
    except RuntimeError as error:
        raise ConfigError(
            f"the model does not belong to {type(network).__name__} with its present settings; "
            f"give the network that was adapted"
        ) from error
    return network.requires_grad_(False)


@dataclass
class _RoutedNetwork:
    """The mixed network, its trained parameters, and the coefficients of the cases so far.

    Attributes:
        module: the network.
        layers: its routed layers by name.
        trained: the parameters that are trained.
        names: the names of the sources.
        task: how a case is predicted.
        seed: seed of the noise.
        coefficients: those of the predicted cases, by layer, (B, sources) for each batch.
    """

    module: nn.Module
    layers: dict[str, RoutedLayer]
    trained: list[nn.Parameter]
    names: list[str]
    task: Task
    seed: int
    coefficients: dict[str, list[Tensor]] = field(default_factory=dict)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities of the classes, see `class_logits`."""
        return class_logits(self.module(images), self.task, "routing").softmax(dim=1)

    def deliver(self, indices: list[int], example: Example, deliver: Deliver) -> None:
        """Predict a batch of cases, and record the coefficients."""
        for layer in self.layers.values():
            layer.router.eval()
        hooks = [
            layer.register_forward_hook(partial(self._record, name))
            for name, layer in self.layers.items()
        ]
        try:
            for index, prediction in predict_batch(self.task, self.module, indices, example):
                deliver("", index, prediction)
        finally:
            for hook in hooks:
                hook.remove()

    def _record(self, name: str, layer: RoutedLayer, *_: object) -> None:
        assert layer.coefficients is not None
        self.coefficients.setdefault(name, []).append(layer.coefficients.cpu().double())

    def write_coefficients(self, record: AdaptationRecord) -> None:
        """Record the mean coefficients of the cases, and their differences, by layer."""
        from collegium.adaptation._routed_layers import weight_variation

        for name, batches in self.coefficients.items():
            coefficients = torch.cat(batches)
            record.coefficients[name] = self._by_source(coefficients.mean(dim=0))
            variation = weight_variation(self.layers[name].get_buffer("weight"), coefficients)
            deviation, mean = torch.std_mean(variation, correction=0)
            deviations = self._by_source(coefficients.std(dim=0, correction=0))
            record.spreads[name] = LayerSpread(deviations, float(mean), float(deviation))

    def _by_source(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))


@dataclass(frozen=True)
class _FlipAndRotation:
    """A flip along the first spatial axis, and a rotation in the plane by quarter turns."""

    flip: bool = False
    turns: int = 0

    @classmethod
    def draw(cls, rng: torch.Generator, images: Tensor) -> _FlipAndRotation:
        """Draw a transform for images (B, C, *spatial); only squares are rotated.

        Raises:
            ConfigError: the images are rows of a table.
        """
        if images.ndim == 2:
            raise ConfigError("routing.transforms rotates images, not rows; set it to false")
        square = images.ndim > 3 and images.shape[2] == images.shape[3]
        flip = bool(torch.randint(2, (), generator=rng))
        return cls(flip, int(torch.randint(4, (), generator=rng)) if square else 0)

    def apply(self, images: Tensor) -> Tensor:
        """Transform images."""
        flipped = images.flip(2) if self.flip else images
        return torch.rot90(flipped, self.turns, (2, 3)) if self.turns else flipped

    def invert(self, maps: Tensor) -> Tensor:
        """Transform predictions back; classes of whole images stay as they are."""
        if maps.ndim == 2:
            return maps
        rotated = torch.rot90(maps, -self.turns, (2, 3)) if self.turns else maps
        return rotated.flip(2) if self.flip else rotated
