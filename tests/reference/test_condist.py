from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.condist import ConDistFL, conditional, conditional_distillation
from collegium.algorithms.fedavg import FedAvg
from collegium.core.dataset import TensorDataset
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.runtime.selection import Selection
from collegium.runtime.simulation import Simulated, simulate
from collegium.tasks import SegmentationTask
from collegium.training.loop import TrainingConfig

CLASSES = ("background", "liver", "spleen", "kidney")
SIZES, LR, ROUNDS = {"a": 3, "b": 5}, 0.5, 3
FORMS: tuple[Any, ...] = ("dice", "kl")
LABELLED: dict[str, Any] = {"a": ("liver",), "b": ("spleen", "kidney")}


def logits_of(rows: Any) -> torch.Tensor:
    """Logits (1, 4, pixels)."""
    return torch.tensor(rows, dtype=torch.float64).T[None]


def softmax(z: Any) -> Any:
    """Probabilities over the first axis."""
    exp = np.exp(z - z.max(0))
    return exp / exp.sum(0)


def distillation(z: Any, theirs: Any, y: Any, known: Any, form: str, temperature: float) -> Any:
    """L_cd of logits (4, pixels), by its definition."""
    others = [c for c in range(4) if c not in known]
    counts = ~np.isin(y, known) & ~np.isin(theirs.argmax(0), known)
    p, q = softmax(z / temperature)[:, counts], softmax(theirs / temperature)[:, counts]
    if form == "kl":
        r, s = (t[others] / t[others].sum(0) for t in (p, q))
        return (s * np.log(s / r)).sum() / counts.sum() if counts.any() else 0.0
    r, s = (t[others] / (1 - t[known].sum(0) + 1e-5) for t in (p, q))
    overlap = 2 * (r * s).sum(1) / (r.sum(1) + s.sum(1) + 1e-5)
    return np.mean(1 - overlap) if counts.any() else 0.0


# --- the loss


def test_conditional_probabilities_and_the_loss_are_the_reference_values(
    newer_golden: Any,
) -> None:
    case = newer_golden["condist"]
    student, teacher = logits_of(case["student_logits"]), logits_of(case["teacher_logits"])
    t, outside = case["temperature"], [group[0] for group in case["groups"]]
    for logits, key in ((student, "student_cond"), (teacher, "teacher_cond")):
        found = conditional((logits / t).softmax(1), outside)
        np.testing.assert_allclose(found[0].T, case[key], rtol=1e-9)
    batch = {"label": torch.tensor([case["y"]])}
    loss = conditional_distillation(student, teacher, batch, case["foreground"], temperature=t)
    assert float(loss) == pytest.approx(case["loss"], rel=1e-9)
    alike = conditional_distillation(teacher, teacher, batch, case["foreground"], temperature=t)
    assert float(alike) == pytest.approx(
        case["self_distillation_loss_when_student_equals_teacher"], rel=1e-9
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_counts_pixels_of_the_field_of_view_that_neither_says_are_annotated(
    form: Any,
) -> None:
    rng = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 2, 4, 6, 5, generator=rng, dtype=torch.float64)
    label = torch.tensor([0, 2])[torch.randint(2, (2, 6, 5), generator=rng)]
    mask = torch.rand(2, 6, 5, generator=rng) < 0.7
    batch = {"label": label, "mask": mask}
    found = conditional_distillation(student, teacher, batch, [2], temperature=1.5, form=form)
    z, theirs = (logits.movedim(1, 0)[:, mask].numpy() for logits in (student, teacher))
    expected = distillation(z, theirs, label[mask].numpy(), [2], form, 1.5)
    assert float(found) == pytest.approx(expected, rel=1e-9)
    assert float(found) > 0.01


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("why", ["label", "teacher", "mask"])
def test_a_batch_without_a_pixel_that_counts_adds_0(form: Any, why: str) -> None:
    student, teacher = torch.randn(2, 1, 4, 5, generator=torch.Generator().manual_seed(0))
    student.requires_grad_()
    teacher[:, 1] = 9.0 if why == "teacher" else -9.0
    label = torch.full((1, 5), 1 if why == "label" else 0)
    batch = {"label": label, "mask": torch.full((1, 5), why != "mask")}
    loss = conditional_distillation(student, teacher, batch, [1], form=form)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert student.grad is not None
    assert torch.equal(student.grad, torch.zeros_like(student))


def test_the_divergence_is_least_where_both_agree_and_the_dice_is_not() -> None:
    rng = torch.Generator().manual_seed(5)
    teacher = torch.randn(1, 4, 40, generator=rng, dtype=torch.float64)
    batch, sizes = {"label": torch.zeros(1, 40, dtype=torch.int64)}, {}
    for form in FORMS:
        student = teacher.clone().requires_grad_()
        loss = conditional_distillation(student, teacher, batch, [1], form=form)
        loss.backward()
        assert student.grad is not None
        sizes[form] = (float(loss.detach()), float(student.grad.abs().max()))
    assert max(sizes["kl"]) < 1e-12
    assert min(sizes["dice"]) > 1e-4


def test_a_pixel_without_probability_outside_the_annotated_classes_stays_finite() -> None:
    student = torch.zeros(1, 4, 3)
    student[:, 1] = 1e4
    student.requires_grad_()
    batch = {"label": torch.zeros(1, 3, dtype=torch.int64)}
    for form in FORMS:
        loss = conditional_distillation(student, torch.zeros(1, 4, 3), batch, [1], form=form)
        (gradient,) = torch.autograd.grad(loss, student)
        assert torch.isfinite(loss.detach())
        assert torch.isfinite(gradient).all()


# --- rounds


def data(site: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(ord(site))
    x, y = rng.normal(size=(SIZES[site], 2, 4, 4)), rng.integers(4, size=(SIZES[site], 4, 4))
    return x, np.where(np.isin(y, [CLASSES.index(n) for n in LABELLED[site]]), y, 0)


def sites(**labelled: Any) -> list[Site]:
    found = []
    for name in SIZES:
        x, y = data(name)
        own = TensorDataset({"image": torch.tensor(x), "label": torch.tensor(y)})
        found.append(Site(name, own, own, own, labelled=(LABELLED | labelled)[name]))
    return found


def run(algorithm: FedAvg, network: nn.Module, where: list[Site] | None = None) -> Simulated:
    recipe = TrainingConfig(optimizer="sgd", lr=LR, batch_size=100, local_epochs=2)
    return simulate(
        algorithm, where or sites(), network, SegmentationTask(CLASSES, "ce"), rounds=ROUNDS,
        training=recipe, selection=Selection(round="last"),
    )  # fmt: skip


def objective(theta: Any, received: Any, site: str, lam: float, form: str) -> float:
    """The marginal cross-entropy and lambda times L_cd; theta is weight (4, 2) and bias (4, 1)."""
    x, y = data(site)
    x, y = np.moveaxis(x, 1, 0).reshape(2, -1), y.reshape(-1)
    known = [CLASSES.index(name) for name in LABELLED[site]]
    z, theirs = (t[:, :2] @ x + t[:, 2:] for t in (theta, received))
    p = softmax(z)
    merged = 1 - p[known].sum(0)
    own = np.select([y == c for c in known], [p[c] for c in known], merged)
    term = distillation(z, theirs, y, known, form, 2.0)
    return float(-np.log(own).mean() + lam * term)


def gradient(function: Any, at: Any) -> Any:
    """Central differences."""
    slope = np.zeros_like(at)
    for place in np.ndindex(*at.shape):
        step = np.zeros_like(at)
        step[place] = 1e-5
        slope[place] = (function(at + step) - function(at - step)) / 2e-5
    return slope


@pytest.mark.parametrize("form", FORMS)
def test_rounds_by_hand_with_growing_weight_and_the_received_model_as_teacher(form: Any) -> None:
    network = nn.Conv2d(2, 4, 1).double()
    assert network.bias is not None
    weight, bias = network.weight.detach()[:, :, 0, 0], network.bias.detach()
    model = torch.cat([weight, bias[:, None]], dim=1).numpy()
    for lam in (0.4, 1.2, 2.0):  # a straight line in three rounds
        trained = []
        for site in SIZES:
            theta = model
            for _ in range(2):
                slope = gradient(lambda at, s=site: objective(at, model, s, lam, form), theta)  # noqa: B023
                theta = theta - LR * slope
            trained.append(theta)
        model = (3 * trained[0] + 5 * trained[1]) / 8
    found = run(ConDistFL(start=0.4, end=2.0, form=form), network).model
    assert found is not None
    np.testing.assert_allclose(found["weight"][:, :, 0, 0], model[:, :2], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found["bias"], model[:, 2], rtol=1e-5, atol=1e-8)


def test_the_weight_of_a_single_round_is_that_of_the_first() -> None:
    network = nn.Conv2d(2, 4, 1).double()
    task, recipe = SegmentationTask(CLASSES, "ce"), TrainingConfig(optimizer="sgd", lr=LR)
    models = [
        simulate(ConDistFL(start=1.0, end=end), sites(), network, task, rounds=1, training=recipe)
        for end in (1.0, 50.0)
    ]
    first, second = (found.model for found in models)
    assert first is not None
    assert second is not None
    assert torch.equal(first["weight"], second["weight"])


def test_where_all_classes_are_annotated_it_is_fedavg_bit_by_bit() -> None:
    network, whole = nn.Conv2d(2, 4, 1).double(), {"a": None, "b": CLASSES[1:]}
    found, plain = (run(m, network, sites(**whole)).model for m in (ConDistFL(), FedAvg()))
    assert found is not None
    assert plain is not None
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    other = run(ConDistFL(), network).model
    marginal = run(FedAvg(), network).model
    assert other is not None
    assert marginal is not None
    assert not torch.equal(other["weight"], marginal["weight"])
    without = run(ConDistFL(start=0.0, end=0.0), network).model
    assert without is not None
    assert torch.equal(without["weight"], marginal["weight"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start": -1.0}, r"ConDistFL\.start: should be at least 0, not -1\.0"),
        ({"temperature": 0.0}, r"ConDistFL\.temperature: should be above 0, not 0\.0"),
        ({"form": "ce"}, r"ConDistFL\.form: should be 'dice' or 'kl', not 'ce'"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ConDistFL(**fields)
