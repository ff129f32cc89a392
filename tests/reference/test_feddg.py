from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import nn

from collegium.algorithms._spectra import interpolated
from collegium.algorithms.feddg import FedDG
from collegium.core.dataset import TensorDataset
from collegium.core.randomness import generator
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.heterogeneity.spectra import amplitude_window
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.testing.toy import ToyFederation
from collegium.training.alignment import boundary_contrast
from collegium.training.loop import TrainingConfig

SIZES = {"A": 4, "B": 6}
SIDE, LR, INNER, WINDOW = 8, 0.05, 0.2, 0.2


def images(seed: int, count: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=(count, 1, SIDE, SIDE)))


def styled_by_hand(own: Any, other: Any, share: float) -> Any:
    """One image, by whole transforms; the window is the square around frequency 0."""
    spectrum = np.fft.fftshift(np.fft.fft2(own))
    wanted = np.abs(np.fft.fftshift(np.fft.fft2(other)))
    amplitude, phase = np.abs(spectrum), np.angle(spectrum)
    radius, middle = int(SIDE * WINDOW), SIDE // 2
    square = (slice(middle - radius, middle + radius + 1),) * 2
    amplitude[square] = (1 - share) * amplitude[square] + share * wanted[square]
    return np.fft.ifft2(np.fft.ifftshift(amplitude * np.exp(1j * phase))).real


def drawn_styles(own: Any, other: Any, random: torch.Generator) -> Any:
    """The images in the styles that the library draws: one other site, an image, a share."""
    picks = []
    for _ in range(len(own)):
        torch.randint(1, (), generator=random)
        picks.append(int(torch.randint(len(other), (), generator=random)))
    shares = torch.rand(len(own), generator=random, dtype=torch.float64).tolist()
    return np.stack(
        [
            styled_by_hand(image[0], other[pick][0], share)[None]
            for image, pick, share in zip(own, picks, shares, strict=True)
        ]
    )


def test_amplitudes_are_interpolated_and_phases_stay() -> None:
    own, other = images(0, 3), images(1, 5)
    found = interpolated(
        own, [amplitude_window(other, WINDOW)], WINDOW, torch.Generator().manual_seed(9)
    )
    wanted = drawn_styles(own.numpy(), other.numpy(), torch.Generator().manual_seed(9))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_steps_follow_both_styles(tmp_path: Any) -> None:
    """A linear layer on the pixels, full batches: the inner and the outer gradient by hand."""
    data = {name: (images(k, n), images(k + 7, n).mean((1, 2, 3))[:, None])
            for k, (name, n) in enumerate(SIZES.items())}  # fmt: skip
    cases = {n: TensorDataset({"image": x, "label": y}) for n, (x, y) in data.items()}
    sites = [Site(name, own, own, own) for name, own in cases.items()]
    network = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 1, bias=False)).double()
    method = FedDG(window=WINDOW, spectra_share=1.0, inner_lr=INNER, gamma=0.0, clip=0.3)
    outcome = simulate(
        method, sites, network, SupervisedTask(nn.functional.mse_loss), rounds=1, seed=5,
        output=tmp_path / "run", training=TrainingConfig(optimizer="sgd", lr=LR, batch_size=100),
    )  # fmt: skip
    start = network.state_dict()["1.weight"].numpy()
    trained = []
    for name, other in (("A", "B"), ("B", "A")):
        x, y = (value.numpy() for value in data[name])
        order = _order(name, x)
        x, y = x[order], y[order]
        shown = data[other][0].numpy()[_shown(other)]
        random = generator(5, "client", name, 1, "train", 0, "style")
        styled = drawn_styles(x, shown, random)
        flat, flat_styled = x.reshape(len(x), -1), styled.reshape(len(x), -1)
        inner = (2 * (flat @ start.T - y) / len(x)).T @ flat
        moved = start - INNER * np.clip(inner, -0.3, 0.3)
        outer = (2 * (flat_styled @ moved.T - y) / len(x)).T @ flat_styled
        trained.append(start - LR * (inner + outer))
    assert np.abs(inner).max() > 0.3  # so that the clip matters
    wanted = (4 * trained[0] + 6 * trained[1]) / 10
    assert outcome.model is not None
    np.testing.assert_allclose(outcome.model["1.weight"], wanted, rtol=1e-9)


def _order(name: str, x: Any) -> list[int]:
    from collegium.training.batches import plan_batches

    path = ("client", name, 1, "train", 0, "fit")
    (batch,) = plan_batches(len(x), 100, epochs=1, steps=None, seed=5, path=path)
    return [index for _, index in batch]


def _shown(name: str) -> list[int]:
    """The order in which a site sends its windows."""
    random = generator(5, "client", name, 0, "train", 0, "spectra")
    order: list[int] = torch.randperm(SIZES[name], generator=random).tolist()
    return order


def contrast_by_hand(features: list[Any], label: Any, tau: float) -> float:
    """Pair by pair, with SciPy's erosion and dilation."""
    kinds: list[list[Any]] = [[], []]
    for one in features:
        for image, mask in zip(one, label > 0, strict=True):
            edge = mask & ~ndimage.binary_erosion(mask, border_value=1)
            around = ndimage.binary_dilation(mask, iterations=5) & ~mask
            for kind, chosen in zip(kinds, (edge, around), strict=True):
                if chosen.any():
                    mean = image[:, chosen].mean(1)
                    kind.append(mean / np.linalg.norm(mean))
    losses = []
    for own, other in (kinds, kinds[::-1]):
        for m, one in enumerate(own):
            for p, two in enumerate(own):
                if m != p:
                    near = np.exp(one @ two / tau)
                    far = sum(np.exp(one @ third / tau) for third in other)
                    losses.append(-np.log(near / (near + far)))
    return float(np.mean(losses))


def test_boundary_loss_equals_the_loss_pair_by_pair() -> None:
    rng = np.random.default_rng(2)
    label = np.zeros((3, 20, 24), dtype=int)
    label[0, 4:12, 5:15] = 1
    label[1, 0:9, 10:22] = 2  # at the edge of the image
    features = [rng.normal(size=(3, 6, 20, 24)) + 0.5 for _ in range(2)]
    found = boundary_contrast([*map(torch.tensor, features)], torch.tensor(label), temperature=0.3)
    assert float(found) == pytest.approx(contrast_by_hand(features, label, 0.3), rel=1e-9)


def test_the_boundary_loss_sees_no_label_outside_the_mask() -> None:
    rng = np.random.default_rng(3)
    label = np.zeros((3, 20, 24), dtype=int)
    label[:, 6:14, 5:15] = 1
    label[2, 2:8, 8:20] = 1
    features = [torch.tensor(rng.normal(size=(3, 6, 20, 24)) + 0.5) for _ in range(2)]
    mask = torch.ones(3, 20, 24, dtype=torch.bool)
    mask[:, 10:] = False
    losses = []
    for outside in (0, 1):
        seen = torch.tensor(label).masked_fill(~mask, outside)
        losses.append(float(boundary_contrast(features, seen, mask, temperature=0.3)))
    assert losses[0] == losses[1] > 0
    unmasked = boundary_contrast(features, torch.tensor(label), temperature=0.3)
    assert losses[0] != float(unmasked)
    cut = torch.tensor(label).masked_fill(~mask, 0)  # whose edge would be a boundary
    assert losses[0] != float(boundary_contrast(features, cut, temperature=0.3))


def test_without_any_foreground_there_is_no_boundary_loss() -> None:
    features = torch.randn(2, 3, 8, 8, requires_grad=True)
    found = boundary_contrast([features, features], torch.zeros(2, 8, 8).long(), temperature=0.05)
    assert float(found) == 0


def test_the_boundary_loss_takes_part_where_labels_are_class_maps(tmp_path: Any) -> None:
    x = images(3, 4).float()
    y = (x[:, 0] > 0.3).long()
    cases = TensorDataset({"image": x, "label": y})
    sites = [Site(name, cases, cases, cases) for name in "AB"]
    torch.manual_seed(0)  # of two channels, features may all have one direction, and no gradient
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1))

    def model(gamma: float) -> Any:
        outcome = simulate(
            FedDG(gamma=gamma, window=0.2), sites, network,
            SupervisedTask(nn.functional.cross_entropy), rounds=1,
            output=tmp_path / f"run-{gamma}", training=TrainingConfig(optimizer="sgd", lr=0.1),
        )  # fmt: skip
        assert outcome.model is not None
        return outcome.model["0.weight"]

    assert not torch.equal(model(0.0), model(1.0))


def test_a_single_site_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="'A' is the only site, so that there is no other"):
        ToyFederation(FedDG(), tmp_path, names=("A",)).run()
