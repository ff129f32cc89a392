import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from collegium.core.randomness import generator
from collegium.training.alignment import (
    DomainClassifier,
    class_means,
    contrastive,
    coral,
    mmd,
    pick_pixels,
    pixels_at,
    pool,
    prototypes,
)


def draw(*shape: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64) + shift


def test_the_reference_values(golden: Any) -> None:
    case = golden("alignment_losses")
    received, local = (
        torch.tensor(case["inputs"][name], dtype=torch.float64) for name in ("f_global", "f_local")
    )
    expected, atol = case["expected"], case["atol"]
    assert float(coral(received, local)) == pytest.approx(expected["coral"], abs=atol)
    found = mmd(received, local, sigma=case["params"]["sigma"])
    assert float(found) == pytest.approx(expected["mmd2"], abs=atol)


def test_coral_is_the_distance_of_numpys_covariances() -> None:
    x, y = draw(7, 3), 2 * draw(9, 3, seed=1)
    gap = np.cov(x.numpy(), rowvar=False) - np.cov(y.numpy(), rowvar=False)
    assert float(coral(x, y)) == pytest.approx(np.linalg.norm(gap) ** 2 / (4 * 9), rel=1e-12)


def test_coral_does_not_see_means() -> None:
    x = draw(7, 3)
    assert float(coral(x, x + 5)) == pytest.approx(0, abs=1e-24)


def test_one_vector_has_no_covariance() -> None:
    assert float(coral(draw(1, 3), draw(5, 3))) == 0
    assert float(coral(draw(5, 3), draw(1, 3))) == 0


def kernel_mean(a: Any, b: Any, width: float) -> float:
    values = [math.exp(-((p - q) ** 2).sum() / (2 * width**2)) for p in a for q in b]
    return sum(values) / len(values)


def test_mmd_sums_five_kernels_around_the_median_distance() -> None:
    x, y = draw(4, 2).numpy(), draw(5, 2, seed=1, shift=1.0).numpy()
    both = np.concatenate([x, y])
    distances = sorted(float(np.linalg.norm(both[i] - both[j])) for i in range(9) for j in range(i))
    median = distances[(len(distances) - 1) // 2]
    expected = sum(
        kernel_mean(x, x, f * median) + kernel_mean(y, y, f * median)
        - 2 * kernel_mean(x, y, f * median)
        for f in (0.25, 0.5, 1, 2, 4)
    )  # fmt: skip
    assert float(mmd(torch.tensor(x), torch.tensor(y))) == pytest.approx(expected, rel=1e-10)


def test_mmd_sees_means() -> None:
    x = draw(7, 3)
    assert float(mmd(x, x + 5)) > 0.5
    assert float(mmd(x, x.clone())) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_equal_vectors_give_mmd_0_and_no_gradient(value: float) -> None:
    """Collapsed features must not blow up by a median distance of rounding errors."""
    received = torch.full((3, 4), value)
    local = (torch.full((3, 4), value) * (1 + 1e-7)).requires_grad_()
    loss = mmd(received, local)
    assert float(loss) == 0
    (loss + local.sum()).backward()
    assert local.grad is not None
    assert torch.equal(local.grad, torch.ones(3, 4))


@pytest.mark.parametrize("loss", [coral, mmd])
def test_gradients_are_those_of_finite_differences(loss: Any) -> None:
    received, local = draw(4, 2), draw(5, 2, seed=1, shift=0.5).requires_grad_()
    # the median is held, as it is no part of the gradient
    options = {} if loss is coral else {"sigma": 1.3}
    assert torch.autograd.gradcheck(lambda x: loss(received, x, **options), (local,))


def test_the_contrastive_loss_is_the_papers() -> None:
    now, received, previous = (draw(3, 4, seed=seed).numpy() for seed in range(3))

    def cosine(a: Any, b: Any) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    terms = []
    for z, g, p in zip(now, received, previous, strict=True):
        near, far = math.exp(cosine(z, g) / 0.5), math.exp(cosine(z, p) / 0.5)
        terms.append(-math.log(near / (near + far)))
    found = contrastive(*map(torch.tensor, (now, received, previous)), temperature=0.5)
    assert float(found) == pytest.approx(sum(terms) / 3, rel=1e-12)


def test_equal_references_give_log_2_and_no_gradient() -> None:
    now, other = draw(3, 4).requires_grad_(), draw(3, 4, seed=1)
    loss = contrastive(now, other, other, temperature=0.5)
    assert float(loss.detach()) == pytest.approx(math.log(2))
    loss.backward()
    np.testing.assert_allclose(np.asarray(now.grad), 0, atol=1e-17)


def test_pooling_is_the_mean_over_space() -> None:
    maps = draw(2, 3, 4, 5)
    np.testing.assert_allclose(pool(maps), maps.numpy().mean((2, 3)))
    flat = draw(2, 3)
    assert pool(flat) is flat


def test_pixels_are_columns_of_the_maps_without_repetition() -> None:
    maps = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    rows, positions = pick_pixels(maps, 11, generator(0, "pixels"))
    assert rows.shape == (11, 3)
    assert len(set(positions.tolist())) == 11
    for row, position in zip(rows, positions, strict=True):
        example, inside = divmod(int(position), 20)
        assert row.tolist() == maps[example].reshape(3, 20)[:, inside].tolist()
    assert torch.equal(pixels_at(maps + 1, positions), rows + 1)


def test_all_pixels_are_taken_where_there_are_few() -> None:
    features = draw(4, 3)
    rows, _ = pick_pixels(features, 4, generator(0, "pixels"))
    assert torch.equal(rows, features)


def test_the_classifier_learns_to_tell_the_two_apart() -> None:
    received, local = draw(20, 2).float(), draw(20, 2, seed=1, shift=1.5).float()
    classifier = DomainClassifier(DomainClassifier.initial(2, generator(0, "c")), lr=0.02)
    losses = [float(-classifier.confusion(received, local)) for _ in range(100)]
    assert losses[0] == pytest.approx(math.log(2), abs=0.2)
    assert losses[-1] < 0.4


def test_features_that_follow_the_gradient_mislead_the_classifier() -> None:
    received, local = draw(20, 2), draw(20, 2, seed=1, shift=1.5).requires_grad_()
    weights = DomainClassifier.initial(2, generator(0, "c")).map(torch.Tensor.double)
    trained = DomainClassifier(weights, lr=0.02)
    for _ in range(100):
        trained.confusion(received, local.detach())
    before = trained.confusion(received, local)
    before.backward()
    assert local.grad is not None
    frozen = DomainClassifier(trained.weights, lr=1e-9)
    moved = local.detach() - 0.5 * local.grad
    still = frozen.confusion(received, local.detach())
    assert float(frozen.confusion(received, moved)) < float(still)


def test_the_gradient_is_the_reversed_one_at_the_weights_before_the_step() -> None:
    """By hand in numpy: d(-cross-entropy)/d local, and the first step of Adam."""
    received, local = draw(2, 3), draw(3, 3, seed=1).requires_grad_()
    start = DomainClassifier.initial(3, generator(0, "c"), hidden=5).map(torch.Tensor.double)
    classifier = DomainClassifier(start, lr=0.01)
    loss = classifier.confusion(received, local)
    loss.backward()
    w = {name: tensor.numpy() for name, tensor in start.items()}
    rows = np.concatenate([received.numpy(), local.detach().numpy()])
    truth = np.array([1.0, 1, 0, 0, 0])
    before = rows @ w["hidden.weight"].T + w["hidden.bias"]
    logit = np.maximum(before, 0) @ w["out.weight"][0] + w["out.bias"][0]
    probability = 1 / (1 + np.exp(-logit))
    entropy = -(truth * np.log(probability) + (1 - truth) * np.log(1 - probability)).mean()
    assert float(loss.detach()) == pytest.approx(-entropy, rel=1e-12)
    d_logit = (probability - truth) / 5
    d_hidden = d_logit[:, None] * w["out.weight"] * (before > 0)
    np.testing.assert_allclose(
        np.asarray(local.grad), -(d_hidden @ w["hidden.weight"])[2:], rtol=1e-10
    )
    step = 0.01 * np.sign(d_hidden.sum(0))  # Adam's first step is the sign of the gradient
    found = classifier.weights["hidden.bias"].numpy()
    np.testing.assert_allclose(found, w["hidden.bias"] - step, atol=1e-6)


def test_the_initial_classifier_comes_from_its_generator_alone() -> None:
    first, second = (DomainClassifier.initial(4, generator(1, "c")) for _ in range(2))
    other = DomainClassifier.initial(4, generator(2, "c"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert float(first["hidden.weight"].abs().max()) <= 0.5
    assert float(first["out.weight"].abs().max()) <= 1 / 8


def test_means_of_classes_are_taken_image_by_image_inside_the_mask() -> None:
    features, rng = draw(2, 3, 4, 4), np.random.default_rng(0)
    label, mask = rng.integers(0, 3, (2, 4, 4)), rng.random((2, 4, 4)) < 0.7
    label[1][label[1] == 2] = 0
    found = class_means(features, {"label": torch.tensor(label), "mask": torch.tensor(mask)})
    assert found is not None
    expected = [
        (y, features[b].numpy()[:, (label[b] == y) & mask[b]].mean(1))
        for b in range(2)
        for y in range(3)
        if ((label[b] == y) & mask[b]).any()
    ]
    assert found[1].tolist() == [y for y, _ in expected] == [0, 1, 2, 0, 1]
    np.testing.assert_allclose(found[0], np.stack([vector for _, vector in expected]), rtol=1e-12)


def test_labels_of_another_resolution_are_brought_to_that_of_the_features() -> None:
    features = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    label = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    found = class_means(features, {"label": label[None]})
    assert found is not None
    assert found[0].flatten().tolist() == pytest.approx([8 / 3, 2.0])


def test_means_of_whole_images_are_their_pooled_features() -> None:
    features, label = draw(4, 3, 2, 2), torch.tensor([1, 0, 1, 4])
    found = class_means(features, {"label": label})
    assert found is not None
    assert found[0].equal(pool(features))
    assert found[1].equal(label)


def test_numbers_are_no_classes() -> None:
    assert class_means(draw(2, 3), {"label": torch.zeros(2)}) is None


def test_a_prototype_is_the_mean_over_all_batches() -> None:
    first = torch.tensor([[1.0, 0.0], [3.0, 2.0]]), torch.tensor([0, 4])
    second = torch.tensor([[3.0, 1.0], [5.0, 5.0]]), torch.tensor([0, 0])
    found = prototypes([first, second])
    assert {y: c.tolist() for y, c in found.items()} == {0: [3.0, 2.0], 4: [3.0, 2.0]}
    assert prototypes([]) == {}
