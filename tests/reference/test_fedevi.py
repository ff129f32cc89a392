import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import nn

from collegium.algorithms._dirichlet import divergence, evidence, evidential_loss, uncertainties
from collegium.algorithms.distance import on
from collegium.algorithms.fedevi import FedEvi
from collegium.core.dataset import TensorDataset
from collegium.data.site import Site
from collegium.errors import ClientError, ConfigError
from collegium.runtime.participation import SKIPPING
from collegium.runtime.simulation import simulate
from collegium.tasks import SegmentationTask, SupervisedTask
from collegium.training.loop import TrainingConfig

COUNTS = {"A": 5, "B": 8, "C": 11}
RECIPE = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=100)


def uncertainties_by_hand(logits: Any) -> tuple[float, float]:
    """The mean epistemic and aleatoric uncertainty of rows of logits, in nats."""
    alpha = np.exp(np.minimum(logits, 80)) + 1
    total = alpha.sum(-1, keepdims=True)
    p = alpha / total
    data = (p * (special.digamma(total + 1) - special.digamma(alpha + 1))).sum(-1)
    return float((-(p * np.log(p)).sum(-1) - data).mean()), float(data.mean())


def loss_by_hand(logits: Any, y: Any, strength: float) -> Any:
    """FedEvi's loss of rows of logits and one-hot labels; right for complex numbers too."""
    alpha = np.exp(logits) + 1
    p = alpha / alpha.sum(1, keepdims=True)
    dice = (2 * (p * y).sum(0) + 1e-5) / ((p**2).sum(0) + y.sum(0) + 1e-5)
    alpha = (alpha - 1) * (1 - y) + 1
    total = alpha.sum(1)
    kl = special.loggamma(total) - special.loggamma(alpha).sum(1) - math.lgamma(y.shape[1])
    kl = kl + ((alpha - 1) * (special.digamma(alpha) - special.digamma(total[:, None]))).sum(1)
    return 1 - dice.mean() + strength * kl.mean()


def classifier() -> nn.Module:
    """One linear layer from three numbers to two classes."""
    return nn.Linear(3, 2).double()


def rows(seed: int, count: int) -> TensorDataset:
    x = np.random.default_rng(seed).normal(0.3, 1.5, (count, 3))
    y = (x @ [1.0, -2.0, 0.5] > 0).astype(np.int64)
    return TensorDataset({"image": torch.tensor(x), "label": torch.tensor(y)})


@pytest.fixture
def classes(federation: Any) -> Any:
    """The small federation, with rows of two classes."""
    federation.task = SupervisedTask(nn.functional.cross_entropy)
    return federation


def sites() -> list[Site]:
    return [
        Site(name, rows(k, count), rows(10 + k, 4 + k), rows(20 + k, 4))
        for k, (name, count) in enumerate(COUNTS.items())
    ]


def logits_of(model: Any, data: Any) -> Any:
    return data.inputs["image"].numpy() @ np.asarray(model["weight"]).T + np.asarray(model["bias"])


def test_reference_values_of_one_pixel(newer_golden: Any) -> None:
    case = newer_golden["fedevi"]["first_pixel"]
    alpha = evidence(torch.tensor([newer_golden["fedevi"]["global_logits_site"][0][0]]).double())
    assert (alpha + 1)[0].tolist() == pytest.approx(case["alpha"], rel=1e-9)
    epistemic, aleatoric = uncertainties(alpha + 1)
    assert float(epistemic[0]) == pytest.approx(case["epistemic"], rel=1e-9)
    assert float(aleatoric[0]) == pytest.approx(case["aleatoric"], rel=1e-9)
    kl = newer_golden["fedevi"]["kl_term"]
    assert float(divergence(torch.tensor(kl["alpha_tilde"]))[0]) == pytest.approx(
        kl["kl"], rel=1e-6
    )
    overlap, wrong = evidential_loss(torch.log(torch.tensor(kl["alpha"]) - 1), torch.tensor([0]))
    assert float(wrong) == pytest.approx(math.log(2) - 0.5, rel=1e-6)
    assert 0 < float(overlap) < 1


def test_reference_values_of_two_sites(newer_golden: Any) -> None:
    case = newer_golden["fedevi"]
    ratios = {}
    for k, name in enumerate("AB"):
        looked, own = (
            uncertainties(evidence(torch.tensor(case[f"{which}_logits_site"][k]).double()) + 1)
            for which in ("global", "local")
        )
        e, a = float(looked[0].mean()), float(own[1].mean())
        assert e == pytest.approx(case["epistemic_of_surrogate"][k], rel=1e-9)
        assert a == pytest.approx(case["aleatoric_of_local"][k], rel=1e-9)
        ratios[name] = e / a
    found = FedEvi().weigh({"A": 0.9, "B": 0.1}, ratios)
    assert [*found.values()] == pytest.approx(case["omega"], rel=1e-9)


@pytest.mark.parametrize("power", [-20.0, 0.0, 1.0, 2.9, 3.1, 10.0, 20.0, 40.0, 80.0])
def test_divergence_of_two_classes_has_its_closed_form_at_any_evidence(power: float) -> None:
    z = torch.tensor([[power, -500.0]], requires_grad=True)
    found = divergence(evidence(z) + 1)
    found.sum().backward()
    x = math.exp(power) + 1  # KL(Beta(x, 1) || Beta(1, 1)) = ln x + 1 / x - 1
    expected, slope = math.log(x) + 1 / x - 1, (x - 1) * (1 / x - 1 / x**2)
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert z.grad is not None
    assert float(z.grad[0, 0]) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_divergence_of_many_classes_is_that_of_the_definition() -> None:
    alpha = 1 + np.random.default_rng(3).gamma(0.5, 60.0, (200, 5))
    total = alpha.sum(1)
    expected = special.gammaln(total) - special.gammaln(alpha).sum(1) - math.lgamma(5)
    inner = special.digamma(alpha) - special.digamma(total[:, None])
    expected += ((alpha - 1) * inner).sum(1)
    np.testing.assert_allclose(divergence(torch.tensor(alpha)).numpy(), expected, rtol=1e-7)


def test_evidence_is_bounded_and_computed_in_full_precision() -> None:
    found = evidence(torch.tensor([[500.0, 20.0]], dtype=torch.float16))
    assert found.dtype == torch.float32
    assert found[0].tolist() == pytest.approx([math.exp(80), math.exp(20)], rel=1e-5)


def test_uncertainties_stay_in_their_range_at_any_evidence() -> None:
    z = torch.tensor(
        [[-90.0, -90.0, -90.0], [0.0, 0.0, 0.0], [500.0, 3.0, 0.0], [79.0, 79.0, 79.0]]
    )
    epistemic, aleatoric = uncertainties(evidence(z.double()) + 1)
    assert float(epistemic[0] + aleatoric[0]) == pytest.approx(math.log(3), rel=1e-12)
    assert float(aleatoric[0]) == pytest.approx(1 / 2 + 1 / 3, rel=1e-9)  # psi(4) - psi(2)
    assert float(aleatoric[3]) == pytest.approx(math.log(3), rel=1e-9)
    assert bool((epistemic >= 0).all() and (aleatoric >= 0).all())
    assert float(epistemic[2]) < 1e-20


@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_the_loss_counts_pixels_inside_the_mask_alone(strength: float, by_hand: Any) -> None:
    rng = np.random.default_rng(0)
    logits, label = rng.normal(0, 2, (2, 3, 4, 5)), rng.integers(0, 3, (2, 4, 5))
    mask = rng.random((2, 4, 5)) < 0.6
    output = torch.tensor(logits, requires_grad=True)
    overlap, wrong = evidential_loss(output, torch.tensor(label), torch.tensor(mask))
    (overlap + strength * wrong).backward()
    y = np.eye(3)[label[mask]]
    inside = np.moveaxis(logits, 1, -1)[mask]
    expected = loss_by_hand(inside, y, strength)
    assert float((overlap + strength * wrong).detach()) == pytest.approx(float(expected), rel=1e-9)
    slopes = by_hand.slopes(lambda m: loss_by_hand(m["z"], y, strength), {"z": inside}, ["z"])["z"]
    assert output.grad is not None
    found = np.moveaxis(output.grad.numpy(), 1, -1)
    np.testing.assert_allclose(found[mask], slopes, rtol=1e-7, atol=1e-12)
    assert not found[~mask].any()


def test_without_a_pixel_inside_the_mask_the_loss_is_0_and_moves_nothing() -> None:
    output = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    nowhere = torch.zeros(1, 3, 3, dtype=torch.bool)
    overlap, wrong = evidential_loss(output, torch.zeros(1, 3, 3, dtype=torch.int64), nowhere)
    (overlap + wrong).backward()
    assert (float(overlap.detach()), float(wrong.detach())) == (0.0, 0.0)
    assert output.grad is not None
    assert not output.grad.any()


def test_rounds_follow_the_equations(classes: Any, by_hand: Any) -> None:
    method = FedEvi(kl_weight=0.4, annealing=2)
    outcome = classes.run(method, RECIPE, network=classifier, sites=sites(), rounds=3)
    model = classes.initial(network=classifier)
    omega = {name: count / 24 for name, count in COUNTS.items()}
    for number, strength in ((1, 0.2), (2, 0.4), (3, 0.4)):
        trained, ratios = {}, {}
        for site in sites():
            x, label = (site.train.inputs[key].numpy() for key in ("image", "label"))  # type: ignore[attr-defined]
            y = np.eye(2)[label]
            slopes = by_hand.slopes(
                lambda m, x=x, y=y, s=strength: loss_by_hand(x @ m["weight"].T + m["bias"], y, s),
                model,
                model,
            )
            trained[site.name] = {n: model[n] - 0.1 * slopes[n] for n in model}
        surrogate = by_hand.average([*trained.values()], [*omega.values()])
        for site in sites():
            e = uncertainties_by_hand(logits_of(surrogate, site.val))[0]
            ratios[site.name] = (
                e / uncertainties_by_hand(logits_of(trained[site.name], site.val))[1]
            )
        omega = {name: ratio / sum(ratios.values()) for name, ratio in ratios.items()}
        model = by_hand.average([*trained.values()], [*omega.values()])
        state = outcome.server[number]
        assert state["omega"] == pytest.approx(omega, rel=1e-7)
        for name, value in model.items():
            np.testing.assert_allclose(state["model"][name], value, rtol=1e-7)
    assert abs(omega["A"] - 5 / 24) > 0.01
    sent = [reply["uncertainty"]["epistemic"] for reply in outcome.replies("assess")][-3:]
    unknown = [uncertainties_by_hand(logits_of(surrogate, site.val))[0] for site in sites()]
    assert sent == pytest.approx([value / math.log(2) for value in unknown], rel=1e-7)


def test_a_single_client_keeps_its_own_model(classes: Any) -> None:
    outcome = classes.run(FedEvi(), RECIPE, network=classifier, sites=sites()[:1], rounds=1)
    sent = outcome.replies("train")[0]["model"]
    assert outcome.server[1]["omega"] == {"A": 1.0}
    for name, tensor in outcome.server[1]["model"].items():
        np.testing.assert_allclose(tensor, sent[name], rtol=1e-12)


def test_equal_quotients_are_equal_weights_whatever_the_sizes() -> None:
    found = FedEvi(floor=0.0).weigh({"A": 0.7, "B": 0.2, "C": 0.1}, dict.fromkeys("ABC", 0.3))
    assert found == pytest.approx(dict.fromkeys("ABC", 1 / 3))


def test_weights_are_normalised_after_the_floor_too() -> None:
    found = FedEvi(floor=0.1).weigh({"A": 0.5, "B": 0.5}, {"A": 1.0, "B": 99.0})
    assert found == pytest.approx({"A": 0.1 / 1.09, "B": 0.99 / 1.09})


def test_where_nothing_is_unknown_weights_are_those_of_fedavg() -> None:
    assert FedEvi().weigh({"A": 0.7, "B": 0.3}, {"A": 0.0, "B": 0.0}) == {"A": 0.7, "B": 0.3}


def test_a_site_without_validation_images_has_the_weight_of_fedavg(classes: Any) -> None:
    own = sites()
    none = TensorDataset({key: value[:0] for key, value in rows(0, 1).inputs.items()})
    own[1] = replace(own[1], val=none)
    outcome = classes.run(FedEvi(), RECIPE, network=classifier, sites=own, rounds=1)
    assert [("uncertainty" in reply) for reply in outcome.replies("train")] == [True, False, True]
    omega = outcome.server[1]["omega"]
    assert omega["B"] == pytest.approx(8 / 24)
    looked = [reply["uncertainty"]["epistemic"] for reply in outcome.replies("assess") if reply]
    certain = [reply["uncertainty"]["aleatoric"] for reply in outcome.replies("train")[::2]]
    first, last = (e / a for e, a in zip(looked, certain, strict=True))
    assert omega["A"] / omega["C"] == pytest.approx(first / last)
    assert sum(omega.values()) == pytest.approx(1.0)


def test_a_site_without_training_images_has_no_weight(classes: Any) -> None:
    own = sites()
    empty = TensorDataset({key: value[:0] for key, value in rows(0, 1).inputs.items()})
    own[1] = replace(own[1], train=empty)
    outcome = classes.run(FedEvi(), RECIPE, network=classifier, sites=own, rounds=1)
    assert outcome.server[1]["omega"].keys() == {"A", "C"}


def test_a_client_that_is_missing_keeps_its_last_weight(classes: Any) -> None:
    outcome = classes.run(
        FedEvi(), RECIPE, network=classifier, sites=sites(), rounds=2, lose={2: "B"},
        participation=SKIPPING,
    )  # fmt: skip
    first, second = (outcome.server[t]["omega"] for t in (1, 2))
    assert second["B"] == first["B"]
    assert second["A"] + second["C"] == pytest.approx(1.0)


def test_weights_by_distance_multiply_those_of_uncertainty(classes: Any) -> None:
    made: Any = on(FedEvi)
    method = made(omega=0.5, floor=0.0)
    outcome = classes.run(method, RECIPE, network=classifier, sites=sites(), rounds=1)
    looked = [reply["uncertainty"]["epistemic"] for reply in outcome.replies("assess")]
    certain = [reply["uncertainty"]["aleatoric"] for reply in outcome.replies("train")]
    ratios = {name: e / a for name, e, a in zip(COUNTS, looked, certain, strict=True)}
    ratios[outcome.server[1]["distance"]["most_distant"]] *= 0.5
    expected = {name: ratio / sum(ratios.values()) for name, ratio in ratios.items()}
    assert outcome.server[1]["omega"] == pytest.approx(expected, rel=1e-9)


class Uneven(nn.Module):
    """A network whose output depends on the pixel alone: logits x and -x."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(1, 2, 1, bias=False)
        self.head.weight.data = torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


def test_uncertainty_is_that_of_whole_images_inside_the_field_of_view() -> None:
    rng = np.random.default_rng(1)
    images = torch.tensor(rng.normal(size=(3, 1, 6, 6)), dtype=torch.float32)
    masks = torch.tensor(rng.random((3, 6, 6)) < 0.5)
    masks[2] = False  # such an image counts nowhere
    labels = (images[:, 0] > 0).long()

    class Marked(TensorDataset):
        """Images that training would see otherwise."""

        def batch(self, indices: Any, rngs: Any) -> Any:
            return super().batch(indices, rngs) | {"image": torch.zeros(len(indices), 1, 6, 6)}

    data = TensorDataset({"image": images, "label": labels})
    val = Marked({"image": images, "label": labels, "mask": masks})
    site = Site("A", data, val, data)
    result = simulate(
        FedEvi(), {"A": site}, Uneven, SegmentationTask(2, metrics=("dice",)), rounds=1,
        training=TrainingConfig(optimizer="sgd", lr=1e-12),
    )  # fmt: skip
    by_image = [
        uncertainties_by_hand(np.stack([x[inside], -x[inside]], -1))
        for x, inside in zip(images[:2, 0].numpy(), masks[:2].numpy(), strict=True)
    ]
    expected = np.mean(by_image, axis=0) / math.log(2)
    numbers = result.records[0].numbers["A"]
    assert numbers["uncertainty/epistemic"] == pytest.approx(expected[0], rel=1e-5)
    assert numbers["uncertainty/aleatoric"] == pytest.approx(expected[1], rel=1e-5)


REFUSAL = "FedEvi needs a network with one output for each class, two at least"


def test_one_output_is_refused_and_labels_that_are_numbers(federation: Any, classes: Any) -> None:
    with pytest.raises(ClientError, match=REFUSAL):
        classes.run(FedEvi(), network=lambda: nn.Linear(3, 1).double(), sites=sites(), rounds=1)
    with pytest.raises(ClientError, match=REFUSAL):
        federation.run(FedEvi(), network=classifier, rounds=1)


def test_overlapping_regions_are_refused() -> None:
    label = torch.zeros(4, 4, 4, dtype=torch.int64)
    data = TensorDataset({"image": torch.zeros(4, 1, 4, 4), "label": label})
    task = SegmentationTask(2, metrics=("dice",), regions={"whole": [1], "core": [1]})
    with pytest.raises(ClientError, match=REFUSAL):
        simulate(
            FedEvi(), {"A": Site("A", data, data, data)}, lambda: nn.Conv2d(1, 2, 1), task, rounds=1
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kl_weight": -0.1}, r"FedEvi\.kl_weight: should be at least 0"),
        ({"annealing": 0}, r"FedEvi\.annealing: should be "),
        ({"floor": 1.0}, r"FedEvi\.floor: should be "),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedEvi(**fields)
