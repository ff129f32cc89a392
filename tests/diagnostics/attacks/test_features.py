import pytest
import torch

from collegium.diagnostics.attacks.features import embedding_of, invert_features
from collegium.diagnostics.attacks.inversion import Inversion
from collegium.diagnostics.attacks.likeness import compare
from collegium.errors import DataError
from collegium.heterogeneity.embeddings import SeededEncoder, embed_image


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def test_an_image_is_found_from_features_that_determine_it() -> None:
    turn, _ = torch.linalg.qr(drawn(64, 64))
    image = drawn(1, 1, 8, 8, seed=1)
    settings = Inversion(steps=300, total_variation=0.0)
    found = invert_features(
        lambda x: turn @ x.flatten(), turn @ image.flatten(), image.shape, settings
    )
    assert compare(found, image).psnr > 40


def test_a_search_starts_where_it_is_told() -> None:
    start, image = drawn(1, 1, 8, 8), drawn(1, 1, 8, 8, seed=1)
    settings = Inversion(steps=1)  # the image before the step is kept if it is the better one
    found = invert_features(lambda x: 0 * x + image, image, image.shape, settings, start=start)
    assert torch.equal(found, start)


@pytest.mark.parametrize("shape", [(1, 1, 20, 20), (1, 2, 12, 12, 12)])
def test_a_differentiable_embedding_is_the_one_that_sites_send(shape: tuple[int, ...]) -> None:
    image, encoder = drawn(*shape), SeededEncoder()
    expected = torch.from_numpy(embed_image(image[0], encoder, grid=16))
    assert torch.allclose(embedding_of(image, encoder, 16), expected, atol=1e-4)


def test_the_derivative_of_an_embedding_is_its_slope() -> None:
    weights = drawn(6, 1, 3, 3)

    def encoder(images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(images.double(), weights, stride=2).tanh()

    image, weight = drawn(1, 1, 10, 10, seed=1).requires_grad_(), drawn(12, seed=2)
    (slope,) = torch.autograd.grad((embedding_of(image, encoder, 10) * weight).sum(), [image])
    direction, step = drawn(1, 1, 10, 10, seed=3), 1e-3
    ends = [embedding_of(image + s * step * direction, encoder, 10) @ weight for s in (1, -1)]
    expected = float((ends[0] - ends[1]).detach() / (2 * step))
    assert float((slope * direction).sum()) == pytest.approx(expected, rel=1e-2)


def test_features_that_are_zero_are_refused() -> None:
    with pytest.raises(DataError, match="all zero, or not finite"):
        invert_features(lambda x: x, torch.zeros(1, 1, 4, 4), (1, 1, 4, 4))
