from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.resfim import ResFIM
from collegium.core.algorithm import Client
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.data.site import EgressPolicy, Site
from collegium.errors import ClientError, ConfigError, EgressError, ProtocolError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.federation import Federation
from collegium.runtime.participation import SKIPPING
from collegium.tasks import SupervisedTask
from collegium.training.batches import plan_batches
from collegium.training.fisher import unflatten
from collegium.training.loop import TrainingConfig

ROUNDS = 3
DELTA = 40.0
TRAINABLE = ("bn_in.weight", "conv.weight", "conv.bias", "norm.weight", "norm.bias")
"""The parameters of the normed network in their order."""

Model = dict[str, Any]


def amplitudes_received(outcome: Any) -> dict[str, list[Any]]:
    """What every client was sent of the others: one array (rows,) of amplitudes for each."""
    return {
        request.client: [t["windows"].numpy().reshape(-1) for t in parts["spectra"]]
        for request, parts, _ in outcome.log
        if request.method == "keep_spectra"
    }


def styled(x: Any, amplitude: float) -> Any:
    """A row whose mean intensity has another row's amplitude, by way of the whole transform."""
    spectrum = np.fft.fft(x)
    spectrum[0] = amplitude * np.exp(1j * np.angle(spectrum[0]))
    return np.fft.ifft(spectrum).real


def samples(federation: Any, name: str, number: int, count: int) -> list[int]:
    """The rows that Fisher information is estimated from in a round."""
    path = ("client", name, number, "train", 0, "fisher")
    plan = plan_batches(
        federation.sizes[name], 1, epochs=1, steps=count, seed=federation.seed, path=path
    )
    return [index for [(_, index)] in plan]


def information(
    federation: Any, by_hand: Any, name: str, number: int, model: Model, received: Any, limit: int
) -> tuple[Model, Model]:
    """F and F' of a client's trained model, as concatenated vectors."""
    data = federation.data[name]
    chosen = samples(federation, name, number, min(limit, len(data.x)))
    own, other = [], []

    def square(x: Any, y: Any) -> Any:
        one = by_hand.Data(x[None], y[None])
        gradients = by_hand.gradient(model, one, batch_statistics=False)[1]
        return np.concatenate([gradients[key].ravel() ** 2 for key in TRAINABLE])

    for index in chosen:
        own.append(square(data.x[index], data.y[index]))
        path = ("client", name, number, "train", 0, "fisher", "view", 1, 0, index)
        rng = generator(federation.seed, *path)
        for amplitudes in received[name]:
            amplitude = amplitudes[int(torch.randint(len(amplitudes), (), generator=rng))]
            other.append(square(styled(data.x[index], amplitude), data.y[index]))
    return np.mean(own, 0), np.mean(other, 0)


def check_mask(mask: Any, f: Any, g: Any, normaliser: str = "max") -> None:
    """Fail unless round(delta %) parameters are marked and none of the others changes more.

    In a network that is linear up to its loss many residuals are equal, and rounding ranks them.
    """
    floor = 1e-3 * f.mean()
    below = {"max": np.maximum(np.maximum(f, g), floor), "source": np.maximum(f, floor)}
    residual = np.abs(f - g) / below.get(normaliser, 1.0)
    assert mask.sum() == round(DELTA / 100 * len(f))
    assert residual[mask].min() >= residual[~mask].max() * (1 - 1e-9)


def split(flat: Any, model: Model) -> Model:
    ends = np.cumsum([model[name].size for name in TRAINABLE])[:-1]
    parts = zip(TRAINABLE, np.split(flat, ends), strict=True)
    return {name: part.reshape(model[name].shape) for name, part in parts}


@dataclass
class Expected:
    """What the paper's equations give, round by round."""

    models: list[Model] = field(default_factory=list)
    personal: dict[str, list[Model]] = field(default_factory=dict)


def expected(
    federation: Any,
    by_hand: Any,
    outcome: Any,
    *,
    weights: Sequence[float] = (1, 1, 1),
    normaliser: str = "max",
    local_statistics: bool = False,
    invariant_only: bool = False,
    limit: int = 64,
) -> Expected:
    """Follow the equations, and check the masks of the library on the way."""
    model, received = federation.initial(), amplitudes_received(outcome)
    found = Expected([], {name: [] for name in federation.names})
    personal = dict.fromkeys(federation.names, model)
    for t in range(1, ROUNDS + 1):
        trained = {}
        masks = {name: bits_of(outcome, t, name).astype(bool) for name in federation.names}
        for name in federation.names:
            batches = federation.batches(name, t)
            lr = 0.1 * 0.8 ** (t - 1)
            trained[name], _ = by_hand.train(personal[name], federation.data[name], batches, lr)
            f, g = information(federation, by_hand, name, t, trained[name], received, limit)
            check_mask(masks[name], f, g, normaliser)
        model = by_hand.average(list(trained.values()), weights)
        if invariant_only:
            model |= invariant(model, trained, masks, weights)
        for name in federation.names:
            marks = split(masks[name], model)
            personal[name] = model | {
                key: np.where(marks[key], trained[name][key], model[key]) for key in TRAINABLE
            }
            if local_statistics:
                personal[name] |= by_hand.select(trained[name], by_hand.STATISTICS)
            found.personal[name].append(personal[name])
        found.models.append(model)
    return found


def invariant(model: Model, trained: Any, masks: Any, weights: Sequence[float]) -> Model:
    """Average every parameter over the clients that do not keep it."""
    result = {}
    for key in TRAINABLE:
        top, bottom = np.zeros_like(model[key]), np.zeros_like(model[key])
        for (name, own), weight in zip(trained.items(), weights, strict=True):
            free = ~split(masks[name], model)[key]
            top += weight * free * own[key]
            bottom += weight * free
        result[key] = np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1), model[key])
    return result


def bits_of(outcome: Any, number: int, name: str) -> Any:
    return np.unpackbits(outcome.clients[number][name]["mask"]["bits"].numpy(), count=13)


@pytest.mark.parametrize(
    ("options", "by_equations"),
    [
        ({}, {}),
        ({"weighting": "examples"}, {"weights": (5, 8, 11)}),
        ({"normaliser": "source"}, {"normaliser": "source"}),
        ({"normaliser": "absolute"}, {"normaliser": "absolute"}),
        ({"bn_buffers": "local"}, {"local_statistics": True}),
        ({"invariant_only": True}, {"invariant_only": True}),
        (
            {"invariant_only": True, "weighting": "examples"},
            {"invariant_only": True, "weights": (5, 8, 11)},
        ),
        ({"fim_max_samples": 4}, {"limit": 4}),
    ],
    ids=str,
)
def test_models_masks_and_personal_models_are_those_of_the_equations(
    federation: Any, by_hand: Any, options: dict[str, Any], by_equations: dict[str, Any]
) -> None:
    outcome = federation.run(ResFIM(delta=DELTA, **options), rounds=ROUNDS)
    found = expected(federation, by_hand, outcome, **by_equations)
    for t in range(1, ROUNDS + 1):
        by_hand.assert_same(outcome.server[t]["model"], found.models[t - 1], f"round {t}")
    for name in federation.names:
        best = by_hand.best(found.personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)
    assert outcome.deployed.keys() == {"global"}
    masks = {str(bits_of(outcome, t, name)) for t in (1, 2, 3) for name in federation.names}
    assert len(masks) > 3


def test_amplitudes_are_those_of_the_training_rows_and_go_to_the_others(federation: Any) -> None:
    outcome = federation.run(ResFIM(), rounds=1)
    truth = {
        name: np.sort(np.abs(np.fft.fft(data.x)[:, 0])) for name, data in federation.data.items()
    }
    for name, sets in amplitudes_received(outcome).items():
        found = sorted((np.sort(amplitudes) for amplitudes in sets), key=len)
        others = sorted((truth[other] for other in federation.names if other != name), key=len)
        for one, other in zip(found, others, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_share_of_the_spectra_is_rounded_up(federation: Any) -> None:
    outcome = federation.run(ResFIM(spectra_share=0.3), rounds=1)
    counts = [len(reply["spectra"]["windows"]) for reply in outcome.replies("show_spectra")]
    assert counts == [2, 3, 4]  # of 5, 8 and 11


def test_the_mean_alone_goes_down_and_masks_stay(federation: Any) -> None:
    outcome = federation.run(ResFIM(), rounds=2)
    for request, parts, reply in outcome.log:
        if request.method == "train":
            assert parts.keys() == {"model"}
            assert reply.keys() == {"model", "num_examples", "masking_rates", "progress"}
    assert "mask" not in ResFIM().all_sends()
    assert ResFIM(invariant_only=True).all_sends().keys() >= {"mask", "spectra", "masking_rates"}


def test_masks_travel_as_bits_where_the_server_needs_them(federation: Any) -> None:
    outcome = federation.run(ResFIM(invariant_only=True, delta=DELTA), rounds=1)
    for reply, name in zip(outcome.replies("train"), federation.names, strict=True):
        bits = reply["mask"]["bits"]
        assert bits.dtype == torch.uint8
        assert len(bits) == 2  # 13 parameters
        assert bits_of(outcome, 1, name).sum() == round(DELTA / 100 * 13)
        assert bits.numpy().tolist() == np.packbits(bits_of(outcome, 1, name)).tolist()


def test_masking_rates_stand_in_the_records(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(ResFIM(delta=DELTA), rounds=1)
    [record] = [record for record in outcome.records if record.round == 1]
    for name in federation.names:
        marks = split(bits_of(outcome, 1, name), federation.initial())
        rates = {f"masking_rates/{key}": marks[key].mean() for key in TRAINABLE}
        assert record.numbers[name] == pytest.approx(rates)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("invariant_only", [True, False])
def test_where_nothing_stays_personal_it_is_fedavg_bit_by_bit(
    federation: Any, weighting: Any, invariant_only: bool
) -> None:
    algorithm = ResFIM(delta=0, weighting=weighting, invariant_only=invariant_only)
    found = federation.run(algorithm, rounds=ROUNDS)
    plain = federation.run(FedAvg(weighting=weighting), rounds=ROUNDS)
    model = found.server[ROUNDS]["model"]
    assert all(model[name].equal(t) for name, t in plain.server[ROUNDS]["model"].items())
    sent = {part for _, _, reply in found.log for part in reply}
    assert sent == {"model", "num_examples", "progress", "scores"}


def test_where_all_stays_personal_parameters_are_never_averaged(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(ResFIM(delta=100), rounds=ROUNDS)
    for name in federation.names:
        model = federation.initial()
        for t in range(1, ROUNDS + 1):
            batches = federation.batches(name, t)
            model, _ = by_hand.train(model, federation.data[name], batches, 0.1 * 0.8 ** (t - 1))
            kept = outcome.clients[t][name]["own"]
            for key in TRAINABLE:
                np.testing.assert_allclose(kept[key], model[key].ravel(), rtol=1e-9, err_msg=key)


def test_who_misses_a_round_predicts_with_what_it_kept_under_the_new_mean(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(
        ResFIM(delta=DELTA), rounds=2, lose={2: "B"}, participation=SKIPPING, deploy=False
    )
    kept = outcome.clients[2]["B"]
    assert torch.equal(kept["mask"]["bits"], outcome.clients[1]["B"]["mask"]["bits"])
    personal = {name: t.numpy().copy() for name, t in outcome.server[2]["model"].items()}
    marks = split(bits_of(outcome, 2, "B").astype(bool), personal)
    for key in TRAINABLE:
        personal[key][marks[key]] = kept["own"][key].numpy()
    [scores] = [
        reply["scores"]["personal"]
        for request, _, reply in outcome.log
        if (request.method, request.client, request.round) == ("evaluate", "B", 2)
    ]
    for row, x, y in zip(scores, *federation.validation["B"], strict=True):
        loss = by_hand.loss(personal, by_hand.Data(x[None], y[None]))
        assert row["negative_loss"] == pytest.approx(-loss, rel=1e-9)


def image_sites(sizes: dict[str, tuple[int, ...]], **more: Any) -> list[Site]:
    """Sites with four random images each."""
    sites = []
    for name, size in sizes.items():
        rng = np.random.default_rng(ord(name))
        image = torch.from_numpy(rng.normal(1.0, 2.0, (4, *size)))
        data = TensorDataset({"image": image, "label": torch.zeros(4, 1, dtype=torch.float64)})
        sites.append(Site(name, data, data, data, **more))
    return sites


class FirstOutput:
    """A federation whose loss is the network's output, so that the gradient is the image."""

    task = SupervisedTask(lambda output, label: output.mean())

    @staticmethod
    def network(size: tuple[int, ...]) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(int(np.prod(size)), 1, bias=False)
        ).double()


@pytest.mark.parametrize(("size", "ratio", "radius"), [((2, 8, 7), 0.3, 2), ((1, 6, 6), 0.0, 0)])
def test_simulated_images_have_low_amplitudes_of_others_and_phases_of_their_own(
    federation: Any, size: tuple[int, ...], ratio: float, radius: int
) -> None:
    federation.task = FirstOutput.task
    sites = image_sites({"A": size, "B": size, "C": size})
    algorithm = ResFIM(window=ratio, delta=30, spectra_share=0.25)
    outcome = federation.run(algorithm, rounds=1, network=FirstOutput.network(size), sites=sites)
    spectra = {
        request.client: reply["spectra"]["windows"].numpy()
        for request, _, reply in outcome.log
        if request.method == "show_spectra"
    }
    centre = [slice(side // 2 - radius, side // 2 + radius + 1) for side in size[1:]]
    for site in sites:
        images = site.train.inputs["image"].numpy()  # type: ignore[attr-defined]
        whole = np.fft.fftshift(np.fft.fft2(images), axes=(2, 3))
        window = np.abs(whole)[:, :, *centre]
        assert np.isclose(spectra[site.name][0], window, atol=1e-9).all((1, 2, 3)).sum() == 1
        styles = []
        for other in {"A", "B", "C"} - {site.name}:  # one window each: nothing to draw
            changed = whole.copy()
            changed[:, :, *centre] = spectra[other] * np.exp(1j * np.angle(whole[:, :, *centre]))
            styles.append(np.fft.ifft2(np.fft.ifftshift(changed, axes=(2, 3))).real)
        f, g = (images**2).mean(0).ravel(), np.mean(np.square(styles), (0, 1)).ravel()
        residual = np.abs(f - g) / np.maximum(np.maximum(f, g), 1e-3 * f.mean())
        first = np.argsort(-residual, kind="stable")[: round(0.3 * len(f))]
        bits = outcome.clients[1][site.name]["mask"]["bits"].numpy()
        assert set(np.flatnonzero(np.unpackbits(bits, count=len(f)))) == set(first)


@dataclass(frozen=True)
class Prescribed(ResFIM):
    """pFL-ResFIM with the masks of a reference case.

    Attributes:
        marked: by client.
    """

    marked: ClassVar[dict[str, list[int]]] = {}

    def mask(self, client: Client, model: Tensors) -> Tensors:
        marks = torch.tensor(self.marked[client.id], dtype=torch.bool)
        return unflatten(marks, model.select(client.parts.trainable))


class Target(TensorDataset):
    """Gives, as every batch, data on which one step with a learning rate of 4 ends at a target."""

    def batch(self, indices: Sequence[int], rngs: Any) -> dict[str, torch.Tensor]:
        label = self.inputs["label"][0][:, None]
        return {"image": torch.eye(8, dtype=torch.float64)[: len(label)], "label": label}


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("uniform", {}),
        ("sample_weighted", {"weighting": "examples"}),
        ("invariant_only", {"invariant_only": True}),
    ],
)
def test_reference_values_of_the_personalised_aggregate(
    federation: Any, golden: Callable[[str], dict[str, Any]], key: str, options: dict[str, Any]
) -> None:
    case = golden("personalised_aggregate")
    inputs, atol = case["inputs"], case["atol"]
    eye = TensorDataset(
        {
            "image": torch.eye(8, dtype=torch.float64),
            "label": torch.zeros(8, 1, dtype=torch.float64),
        }
    )
    sites = []
    for name, weights, count in zip("ABC", inputs["W"], inputs["n"], strict=True):
        label = torch.tensor([weights], dtype=torch.float64).expand(int(count), 8)
        image = torch.ones(int(count), 8, dtype=torch.float64)
        sites.append(Site(name, Target({"image": image, "label": label}), eye, eye))
        Prescribed.marked[name] = inputs["M"][len(sites) - 1]
    outcome = federation.run(
        Prescribed(**options),
        TrainingConfig(optimizer="sgd", lr=4.0, batch_size=100),
        rounds=1,
        network=lambda: nn.Linear(8, 1, bias=False).double(),
        sites=sites,
        deploy=False,
    )
    for name, wanted, summed in zip(
        "ABC", case["expected"][key], case["expected"]["literal_sum"], strict=True
    ):
        found = outcome.best[name]["weight"][0]
        np.testing.assert_allclose(found, wanted, atol=atol)
        assert not np.allclose(found, summed, atol=0.1)


@pytest.mark.parametrize(
    ("field_", "value", "words"),
    [
        ("delta", -1, "ResFIM.delta: should be at least 0 and at most 100, not -1"),
        ("delta", 100.5, "ResFIM.delta: should be at least 0 and at most 100, not 100.5"),
        (
            "delta",
            float("nan"),
            "ResFIM.delta: should be finite and at least 0 and at most 100, not nan",
        ),
        ("window", 0.5, "ResFIM.window: should be at least 0 and below 0.5, not 0.5"),
        ("spectra_share", 0.0, "ResFIM.spectra_share: should be above 0 and at most 1, not 0.0"),
        ("fim_max_samples", 0, "ResFIM.fim_max_samples: should be at least 1, not 0"),
        ("eps", 0.0, "ResFIM.eps: should be above 0, not 0.0"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(field_: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ResFIM(**{field_: value})


def test_one_site_has_nobody_whose_style_to_take(federation: Any) -> None:
    with pytest.raises(ConfigError, match="'A' is the only site, so that there is no other whose"):
        federation.run(ResFIM(), sites=federation.sites()[:1])


def test_one_site_with_images_is_named(federation: Any, by_hand: Any) -> None:
    sites = [without_training(site) if site.name != "B" else site for site in federation.sites()]
    with pytest.raises(ProtocolError, match="only site 'B' has training images"):
        federation.run(ResFIM(), sites=sites)


def without_training(site: Site) -> Site:
    assert isinstance(site.train, TensorDataset)
    rows = {key: value[:0] for key, value in site.train.inputs.items()}
    return replace(site, train=TensorDataset(rows))


def test_a_site_without_training_rows_takes_the_mean(federation: Any) -> None:
    sites = [without_training(site) if site.name == "B" else site for site in federation.sites()]
    outcome = federation.run(ResFIM(), rounds=1, sites=sites)
    mean = outcome.server[1]["model"]
    assert all(torch.equal(outcome.best["B"][name], tensor) for name, tensor in mean.items())
    assert [len(sets) for sets in amplitudes_received(outcome).values()] == [1, 2, 1]


def test_images_of_unequal_sizes_are_named(federation: Any) -> None:
    federation.task = FirstOutput.task
    sites = image_sites({"A": (1, 6, 6), "B": (1, 6, 6), "C": (1, 6, 8)})
    words = "sites 'A' and 'C' have different sizes, 1 x 6 x 6 and 1 x 6 x 8 .* set sampling.crop"
    with pytest.raises(ProtocolError, match=words):
        federation.run(ResFIM(), network=FirstOutput.network((1, 6, 6)), sites=sites)


def test_images_of_unequal_sizes_at_one_site_are_named(federation: Any) -> None:
    class Growing(TensorDataset):
        def batch(self, indices: Sequence[int], rngs: Any) -> dict[str, torch.Tensor]:
            side = 4 + indices[0]
            return {"image": torch.zeros(1, 1, side, side), "label": torch.zeros(1, 1)}

    first, *others = image_sites({"A": (1, 6, 6), "B": (1, 6, 6)})
    sites = [replace(first, train=Growing({"image": torch.zeros(4, 1)})), *others]
    with pytest.raises(ProtocolError, match="images of site 'A' have different sizes"):
        federation.run(ResFIM(), network=FirstOutput.network((1, 6, 6)), sites=sites)


def test_nan_in_an_image_is_named_before_anything_is_sent(federation: Any) -> None:
    sites = federation.sites()
    assert isinstance(sites[1].train, TensorDataset)
    sites[1].train.inputs["image"][3, 0] = float("nan")
    words = "client 'B', round 0, show_spectra: a training image of site 'B' holds NaN"
    with pytest.raises(ClientError, match=words):
        federation.run(ResFIM(), sites=sites)


def test_nan_in_a_spectrum_is_refused_at_the_server(federation: Any) -> None:
    class Damaged(ResFIM):
        def show_spectra(self, client: Client, request: Message) -> Message:
            spectra = super().show_spectra(client, request)["spectra"]
            nan = torch.full_like(spectra["windows"], float("nan"))
            return Message.of(spectra=spectra | Tensors({"windows": nan}))

        show_spectra.__collegium_handler__ = True  # type: ignore[attr-defined]

    words = "client 'A', round 0, show_spectra: part 'spectra': windows holds NaN"
    with pytest.raises(ProtocolError, match=words):
        federation.run(Damaged())


def test_information_of_zero_everywhere_is_named(federation: Any) -> None:
    federation.task = SupervisedTask(lambda output, label: 0.0 * output.sum())
    with pytest.raises(ClientError, match="Fisher information of site 'A' is zero everywhere"):
        federation.run(ResFIM())


def test_a_policy_that_keeps_spectra_in_is_heard_before_training(federation: Any) -> None:
    policy = {"B": EgressPolicy(forbid=frozenset({"spectra"}))}
    sites = {site.name: site for site in federation.sites(policy)}
    words = "ResFIM sends 'spectra' .amplitudes of the lowest frequencies of training images.*'B'"
    runtime = Federation(sites, federation.normed, federation.task, federation.recipe)
    with pytest.raises(EgressError, match=words):
        runtime.check(ResFIM())
    runtime.check(ResFIM(delta=0))


def test_it_is_found_by_its_name() -> None:
    assert ALGORITHMS.load("resfim") is ResFIM
