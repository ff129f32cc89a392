import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch.nn import functional

from collegium.core.dataset import TensorDataset
from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.distances import centroid_distances
from collegium.heterogeneity.embeddings import (
    SeededEncoder,
    component_angle,
    embed,
    embed_image,
    embed_with_components,
    mean_direction,
    pca2,
)


def test_components_and_their_signs(golden):
    case = golden("pca2")
    expected = case["expected"]
    scores, loadings = pca2(case["inputs"]["X"])
    np.testing.assert_allclose(scores, expected["scores"], atol=case["atol"])
    np.testing.assert_allclose(loadings, expected["loadings"], atol=case["atol"])
    np.testing.assert_allclose(embed(case["inputs"]["X"]), expected["flat"], atol=case["atol"])


@pytest.mark.parametrize("shape", [(20, 6), (6, 20), (32, 100), (3, 2)])
def test_components_equal_scikit_learn_up_to_the_sign(shape):
    table = np.random.default_rng(sum(shape)).normal(size=shape) + 5
    scores, loadings = pca2(table)
    reference = PCA(2, svd_solver="full").fit(table)
    for i in range(2):
        sign = np.sign(reference.components_[i] @ loadings[:, i])
        np.testing.assert_allclose(loadings[:, i], sign * reference.components_[i], atol=1e-10)
        np.testing.assert_allclose(
            scores[:, i], sign * reference.transform(table)[:, i], atol=1e-10
        )
        assert loadings[np.abs(loadings[:, i]).argmax(), i] > 0


def test_mirrored_variation_does_not_change_the_loadings():
    table = np.random.default_rng(0).normal(size=(8, 5))
    np.testing.assert_allclose(pca2(-table)[1], pca2(table)[1], atol=1e-12)
    np.testing.assert_allclose(pca2(-table)[0], -pca2(table)[0], atol=1e-12)


def test_a_component_that_does_not_exist_is_zero():
    line = np.outer([1.0, -2.0, 4.0, 0.1], [0.3, -0.7, 0.1])
    scores, loadings = pca2(line + np.array([1e3, -5.0, 0.0]))
    np.testing.assert_array_equal(scores[:, 1], np.zeros(4))
    np.testing.assert_array_equal(loadings[:, 1], np.zeros(3))
    np.testing.assert_allclose(
        np.abs(loadings[:, 0]), np.array([3, 7, 1]) / math.sqrt(59), atol=1e-9
    )
    for constant in (np.full((4, 3), 0.1), np.ones((1, 5)), np.zeros((2, 2))):
        np.testing.assert_array_equal(pca2(constant)[0], np.zeros((len(constant), 2)))
    assert pca2([[1.0], [3.0]])[0].tolist() == [[-1, 0], [1, 0]]


def test_the_components_of_two_tables_have_the_angle_of_their_variation(golden):
    """Each table varies along one vector, which is its first component."""
    case = golden("component_angle")
    first, second = (
        pca2(np.outer([-1.0, 1.0, 3.0], case["inputs"][name]))[1][:, 0] for name in ("v", "w")
    )
    for sign in (1, -1):
        found = component_angle(first, sign * 3.0 * second)
        assert found == pytest.approx(case["expected"]["angle"], abs=case["atol"])


def test_small_and_right_angles_are_exact():
    assert component_angle([1.0, 1.0], [1.0, 1.0]) == 0
    assert component_angle([1.0, 0.0], [0.0, -2.0]) == pytest.approx(90)
    assert component_angle([1.0, 0.0], [1.0, 1e-9]) == pytest.approx(math.degrees(1e-9))


def test_the_common_direction_of_components_is_that_of_their_projectors_whatever_their_signs():
    rng = np.random.default_rng(4)
    table = np.array([3.0, -1.0, 0.5, 0.0]) + rng.normal(size=(20, 4))
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    values, vectors = np.linalg.eigh(np.einsum("ni,nj->ij", table, table) / len(table))
    signs = rng.choice([-1.0, 1.0], (20, 1))
    found = mean_direction(np.vstack([table * signs, np.zeros((3, 4))]))
    assert np.linalg.norm(found) == pytest.approx(math.sqrt(values[-1]))
    assert component_angle(found, vectors[:, -1]) == pytest.approx(0, abs=1e-5)
    assert found[np.abs(found).argmax()] > 0
    assert np.linalg.norm(mean_direction(np.ones((5, 1)))) == pytest.approx(1)
    for nothing in (np.zeros((0, 4)), np.zeros((3, 4)), np.zeros((3, 0))):
        assert mean_direction(nothing).shape == (0,)


def test_components_of_cases_are_the_first_loadings_of_their_feature_maps():
    images = torch.rand(3, 1, 16, 16, generator=torch.manual_seed(0))
    data = TensorDataset({"image": images, "label": torch.zeros(3)})
    rows, components = embed_with_components(data, SeededEncoder(), 16)
    for image, row, component in zip(images, rows, components, strict=True):
        table = SeededEncoder()(image[None])[0].numpy().reshape(64, -1)
        _, _, expected = np.linalg.svd(table - table.mean(0), full_matrices=False)
        assert component_angle(component, expected[0]) == pytest.approx(0, abs=1e-3)
        np.testing.assert_allclose(row, embed_image(image, SeededEncoder(), 16), rtol=1e-6)
    vectors = TensorDataset({"image": torch.rand(2, 5), "label": torch.zeros(2)})
    assert embed_with_components(vectors, SeededEncoder(), 16)[1].shape == (2, 0)


def test_an_embedding_is_two_numbers_per_channel_whatever_the_axes():
    features = np.random.default_rng(3).normal(size=(6, 2, 3, 4))
    found = embed(features)
    assert found.shape == (12,)
    np.testing.assert_array_equal(found, embed(features.reshape(6, 24)))
    np.testing.assert_array_equal(found, pca2(features.reshape(6, 24))[0].ravel())
    np.testing.assert_array_equal(found, embed(torch.tensor(features)))


@pytest.mark.parametrize(
    ("features", "says"),
    [
        (np.ones(4), "must give a map"),
        (np.ones((4, 0)), "not of shape"),
        (np.array([[1.0, float("nan")]]), "NaN or infinite values; look at image and encoder"),
    ],
)
def test_what_is_no_feature_map_is_refused(features, says):
    with pytest.raises(DataError, match=says):
        embed(features)


def test_images_of_any_size_are_embedded_alike():
    encoder = SeededEncoder()
    small = torch.rand(1, 32, 48, generator=torch.Generator().manual_seed(0))
    large = small.repeat_interleave(2, -1).repeat_interleave(2, -2)
    found = embed_image(small, encoder, grid=16)
    assert found.shape == (128,)
    # the grid averages over areas, so that twice as fine pixels make no difference
    np.testing.assert_allclose(embed_image(large, encoder, grid=16), found, atol=1e-4)
    by_hand = functional.interpolate(small[None], (16, 16), mode="area")
    np.testing.assert_array_equal(embed(encoder(by_hand)[0].numpy()), found)
    assert embed_image(torch.rand(2, 9, 30, 30), encoder, grid=16).shape == (128,)


def test_images_that_cannot_be_embedded_are_refused():
    for image, grid in ((torch.zeros(3), 8), (torch.zeros(1, 8, 8), 0), (torch.zeros(1, 8), 8)):
        with pytest.raises(ConfigError, match="cannot be brought to a grid"):
            embed_image(image, SeededEncoder(), grid)
    with pytest.raises(ConfigError, match="takes images or volumes"):
        SeededEncoder()(torch.zeros(4, 10))
    with pytest.raises(DataError, match="must give a map"):
        embed_image(torch.zeros(1, 8, 8), lambda images: images.mean((1, 2, 3))[:, None], 8)


def test_the_seeded_encoder_is_the_same_everywhere_and_leaves_random_state_alone():
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found = SeededEncoder()(images)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.shape == (2, 64, 4, 4)
    assert torch.equal(SeededEncoder()(images), found)
    assert not torch.allclose(SeededEncoder(seed=1)(images), found)
    assert SeededEncoder(widths=(4, 8))(images[:, :1]).shape == (2, 8, 8, 8)


def test_the_size_of_features_is_that_of_the_images():
    images = torch.randn(4, 2, 64, 64, generator=torch.Generator().manual_seed(2))
    volumes = torch.randn(2, 1, 24, 24, 24, generator=torch.Generator().manual_seed(2))
    for found in (SeededEncoder()(images), SeededEncoder()(volumes)):
        # twice the variance of what comes in, less what the borders of zeros take away
        assert 0.5 < float(found.square().mean()) < 4


@pytest.mark.parametrize("axes", [2, 3])
def test_sites_of_another_contrast_or_brightness_are_farther_than_halves_of_one(axes):
    rng = torch.Generator().manual_seed(axes)
    side = 40 if axes == 2 else 20
    pool = functional.avg_pool2d if axes == 2 else functional.avg_pool3d

    def site(*, contrast=1.0, brightness=0.0):
        noise = torch.randn((12, 1, *(side,) * axes), generator=rng)
        texture = pool(noise, 3, stride=1, padding=1)
        return contrast * texture / texture.std() + brightness

    sites = [site(), site(), site(contrast=1.6), site(brightness=0.6)]
    tables = {
        str(i): np.stack([embed_image(image, SeededEncoder(), side) for image in images])
        for i, images in enumerate(sites)
    }
    _, half, contrast, brightness = centroid_distances(tables, between="energy")[0]
    assert contrast > 1.4 * half
    assert brightness > 1.4 * half
