import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from collegium import ClassificationTask, SegmentationTask, build_model
from collegium.compression.cer import CER
from collegium.compression.dadaquant import DAdaQuant
from collegium.compression.stc import STC
from collegium.core.dataset import Batch, TensorDataset
from collegium.core.tensors import Tensors
from collegium.data.phantoms import SCANNERS, draw_case
from collegium.diagnostics.attacks.inversion import (
    Inversion,
    KnownTraining,
    infer_label,
    rebuild,
    through_codec,
    total_variation,
    with_noise,
)
from collegium.diagnostics.attacks.likeness import compare
from collegium.errors import ConfigError, DataError
from collegium.tasks import Task
from collegium.training.loop import LocalTraining, TrainingConfig

LR = 0.1


def phantom(size: int = 16) -> torch.Tensor:
    """A drawn scan, standardised, (1, 1, size, size)."""
    patient, visit = (np.random.default_rng(seed) for seed in (1, 2))
    pixels, _ = draw_case(SCANNERS["birch"], size=size, patient=patient, visit=visit)
    image = torch.from_numpy(pixels.astype(np.float32))
    return ((image - image.mean()) / image.std())[None, None]


def classifier(width: int = 8, size: int = 16, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(2 * width * (size // 2) ** 2, 3, bias=bias),
    )


def known(module: nn.Module, task: Task | None = None, steps: int = 1) -> KnownTraining:
    model = Tensors(module.state_dict()).clone()
    return KnownTraining(module, task or ClassificationTask(3), model, LR, steps)


def batch(label: int = 1) -> Batch:
    return {"image": phantom(), "label": torch.tensor([label])}


def sent(module: nn.Module, task: Task, data: Batch, *, steps: int, size: int) -> Tensors:
    """The update that the local loop makes of the data in steps of SGD."""
    config = TrainingConfig(optimizer="sgd", lr=LR, batch_size=size, local_steps=steps)
    local, model = LocalTraining(module, task, config), Tensors(module.state_dict()).clone()
    trained, _ = local.fit(model, TensorDataset(data), seed=0, path=("x",), lr=LR)
    return trained - model


@pytest.mark.parametrize("steps", [1, 3])
def test_the_gradient_is_that_of_the_local_loop(steps: int) -> None:
    module = classifier()
    update = sent(module, ClassificationTask(3), batch(), steps=steps, size=1)
    training = known(classifier(), steps=steps)
    gradient = training.gradient_of(update)
    own = training.gradient(batch(), list(gradient))
    assert gradient.keys() == own.keys() == dict(module.named_parameters()).keys()
    for name, tensor in gradient.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_normalisation_is_that_of_a_batch_of_one(norm: str) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return build_model("unet", in_channels=1, channels=[4, 8], num_res_units=0, norm=norm)

    data = {"image": phantom(), "label": (phantom()[:, 0] > 0).long()}
    update = sent(network(), SegmentationTask(), data, steps=1, size=1)
    training = known(network(), SegmentationTask())
    gradient = training.gradient_of(update)
    assert not any("running" in name or "tracked" in name for name in gradient)
    own = training.gradient(data, list(gradient))
    for name, tensor in gradient.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_the_label_follows_from_the_gradient_of_the_head(bias: bool) -> None:
    training = known(classifier(bias=bias))
    for label in range(3):
        gradient = training.gradient(batch(label), list(training.model))
        assert infer_label(training, gradient).tolist() == [label]


def test_an_image_is_rebuilt_and_noise_prevents_it() -> None:
    training, truth = known(classifier()), batch()
    gradient = training.gradient(truth, list(training.model))
    found = []
    for ratio in (0.0, 0.1, 1.0, 10.0):
        noisy = with_noise(gradient, ratio, seed=1)
        noise = math.sqrt((noisy - gradient).dot(noisy - gradient))
        settings = Inversion(steps=300)
        image = rebuild(training, noisy, (1, 1, 16, 16), truth, settings, noise=noise).image
        found.append(compare(image, truth["image"]))
    assert all(one.psnr > other.psnr + 5 for one, other in pairwise(found))
    assert found[0].psnr > 35
    assert found[0].correlation > 0.99
    assert found[-1].psnr < found[-1].blank_psnr + 3


def test_who_knows_the_noise_smooths_as_much_as_it_asks_for() -> None:
    training, truth = known(classifier(4)), batch()
    gradient = training.gradient(truth, list(training.model))
    noisy = with_noise(gradient, 1.0, seed=1)
    norm, settings = math.sqrt((noisy - gradient).dot(noisy - gradient)), Inversion(steps=150)
    told, guessed = (
        rebuild(training, noisy, (1, 1, 16, 16), truth, settings, noise=noise).image
        for noise in (norm, 0.0)
    )
    assert compare(told, truth["image"]).psnr > compare(guessed, truth["image"]).psnr + 1
    own = training.gradient({**truth, "image": told}, list(gradient))
    left = math.sqrt((own - noisy).dot(own - noisy))
    assert left == pytest.approx(norm, rel=0.05)


def test_a_clipped_gradient_gives_the_image_to_who_knows_the_norm() -> None:
    training, truth = known(classifier(4)), batch()
    gradient = training.gradient(truth, list(training.model))
    clipped = with_noise(gradient, 0.0, seed=0, clip=0.1)
    settings = Inversion(steps=200)
    told, guessed = (
        rebuild(training, clipped, (1, 1, 16, 16), truth, settings, clip=clip).image
        for clip in (0.1, None)
    )
    assert compare(told, truth["image"]).psnr > compare(guessed, truth["image"]).psnr + 5


def segmenter() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 2, 3, padding=1),
    )  # fmt: skip


def test_a_mask_that_nobody_knows_is_searched_for_with_the_image() -> None:
    training = known(segmenter(), SegmentationTask(loss="ce"))
    truth = {"image": phantom(), "label": (phantom()[:, 0] > 0).long()}
    gradient = training.gradient(truth, list(training.model))
    settings = Inversion(steps=300, label="unknown")
    found = rebuild(training, gradient, (1, 1, 16, 16), {}, settings)
    assert found.label.shape == (1, 16, 16)
    assert found.label.dtype == torch.int64
    start = Inversion(steps=1, label="unknown", lr=1e-6)
    first = rebuild(training, gradient, (1, 1, 16, 16), {}, start)
    assert found.objective < first.objective / 10


def test_an_inferred_label_needs_no_known_one() -> None:
    training, truth = known(classifier(4)), batch(2)
    gradient = training.gradient(truth, list(training.model))
    settings = Inversion(steps=5, label="inferred")
    found = rebuild(training, gradient, (1, 1, 16, 16), {}, settings)
    told = rebuild(training, gradient, (1, 1, 16, 16), truth, Inversion(steps=5))
    assert found.label.tolist() == [2]
    assert torch.equal(found.image, told.image)


def test_the_same_seed_rebuilds_the_same_image() -> None:
    training, truth = known(classifier(4)), batch()
    gradient = training.gradient(truth, list(training.model))
    settings = Inversion(steps=5)
    one, two = (rebuild(training, gradient, (1, 1, 16, 16), truth, settings) for _ in range(2))
    assert torch.equal(one.image, two.image)
    other = rebuild(training, gradient, (1, 1, 16, 16), truth, settings, seed=1)
    assert not torch.equal(one.image, other.image)
    more = rebuild(training, gradient, (1, 1, 16, 16), truth, Inversion(steps=5, restarts=3))
    assert more.objective <= one.objective


def test_a_part_of_the_gradient_is_enough_to_attack() -> None:
    training, truth = known(classifier(4)), batch()
    gradient = training.gradient(truth, ["0.weight", "0.bias"])
    found = rebuild(training, gradient, (1, 1, 16, 16), truth, Inversion(steps=20))
    assert gradient.keys() == {"0.weight", "0.bias"}
    assert math.isfinite(found.objective)
    with pytest.raises(ConfigError, match="the head of the network is not sent"):
        infer_label(training, gradient)


def test_noise_has_the_norm_that_was_asked_for() -> None:
    gradient = Tensors({"a": torch.full((3,), 2.0), "b": torch.full((2, 2), 1.0)})  # norm 4
    noise = with_noise(gradient, 0.5, seed=0) - gradient
    assert math.sqrt(noise.dot(noise)) == pytest.approx(2.0, rel=1e-5)
    clipped = with_noise(gradient, 0.0, seed=0, clip=1.0)
    assert clipped["a"].tolist() == pytest.approx([0.5] * 3)
    assert with_noise(gradient, 0.0, seed=0, clip=9.0)["a"].tolist() == [2.0] * 3


@pytest.mark.parametrize("codec", [STC(p=0.1), DAdaQuant(), CER()])
def test_a_codec_gives_the_attacker_what_the_server_decodes(codec: STC | DAdaQuant | CER) -> None:
    training = known(classifier(4))
    gradient = training.gradient(batch(), list(training.model))
    decoded = through_codec(gradient, codec, seed=0)
    assert decoded.keys() == gradient.keys()
    values = torch.cat([tensor.flatten() for tensor in decoded.values()])
    whole = torch.cat([tensor.flatten() for tensor in gradient.values()])
    assert not torch.equal(values, whole)
    if isinstance(codec, STC):
        assert len(values[values != 0].abs().unique()) <= len(gradient)
        assert (values != 0).float().mean() < 0.2


def test_total_variation_is_the_mean_of_neighbours_differences() -> None:
    image = torch.tensor([[[[0.0, 1.0, 3.0], [0.0, 0.0, 0.0]]]])
    assert float(total_variation(image)) == pytest.approx(3 / 4 + 4 / 3)


def test_what_cannot_be_inverted_is_refused() -> None:
    training = known(classifier(4))
    gradient = training.gradient(batch(), list(training.model))
    with pytest.raises(DataError, match="no direction"):
        rebuild(training, gradient * 0.0, (1, 1, 16, 16), batch())
    with pytest.raises(ConfigError, match="rebuilds images"):
        rebuild(training, gradient, (1, 4), batch())
    with pytest.raises(DataError, match="no parameter"):
        training.gradient_of(Tensors({"other": torch.zeros(3)}))
    with pytest.raises(ConfigError, match="of one case of a classification"):
        infer_label(training, gradient, 2)
    some = known(segmenter(), SegmentationTask(["no", "liver", "spleen"]).with_labelled(["liver"]))
    with pytest.raises(ConfigError, match="annotate some of the classes only"):
        rebuild(some, gradient, (1, 1, 16, 16), batch(), Inversion(label="unknown"))
    with pytest.raises(ConfigError, match="where it is a mask"):
        rebuild(training, gradient, (1, 1, 16, 16), batch(), Inversion(label="unknown"))
