"""The inversion of shared parts as a user runs it, and what its results are held against."""

import csv
import inspect
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.cli.attack import attack
from collegium.core.seals import read_json
from collegium.data.phantoms import make_federation
from collegium.diagnostics.attacks.inversion import Inversion
from collegium.diagnostics.attacks.inverters import BOUND
from collegium.diagnostics.attacks.shared import (
    MEAN,
    OWN,
    WITHDRAWN,
    Inverted,
    NotTried,
    invert_shared,
)
from collegium.diagnostics.attacks.shared_writing import write_shared
from collegium.experiment.config.experiment import load_config

SENDERS = """\
import torch
from collegium import FedAvg, Message, Tensors, handler, settings
from collegium.core.payloads import Features


class Sender(FedAvg):
    def latent(self, client, request):
        def look(batch, output):
            return output.features, batch["label"].flatten(1).amax(1)
        found = client.collect(request["model"], look)
        return torch.cat([f for f, _ in found]), torch.cat([label for _, label in found])


@settings
class Maps(Sender):
    sends = {"maps": Features(holds="latent", by_case=True)}

    @handler
    def train(self, client, request):
        maps, _ = self.latent(client, request)
        return Message.of(model=request["model"], num_examples=1, maps=Tensors({"maps": maps}))


@settings
class Prototypes(Sender):
    sends = {"prototypes": Features(holds="latent"), "other": Features()}

    @handler
    def train(self, client, request):
        maps, _ = self.latent(client, request)
        means = maps.flatten(2).mean(2)
        rows = torch.stack([means[:2].mean(0), means[2:].mean(0), 0 * means[0]])
        return Message.of(
            model=request["model"], num_examples=1, prototypes=Tensors({"rows": rows}),
            other=Tensors({"rows": rows}),
        )
"""
"""Methods that send what enters the head: of each image, and means of it."""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["attack", *arguments])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phantoms of three sites, of which training sees every image as it is."""
    path = make_federation(tmp_path_factory.mktemp("drawn"), 3, cases=8, size=32)
    path.write_text(path.read_text().replace("flips: true", "flips: false"))
    return path


def write(folder: Path, data: Path, *algorithms: Any, **changes: Any) -> Path:
    settings = {
        "name": "x", "federation": str(data), "algorithms": [*algorithms],
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 0},
        "training": {"batch_size": 2, "local_steps": 1}, "rounds": 1, "output": str(folder / "run"),
    }  # fmt: skip
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path


def inverted(path: Path, **options: Any) -> list[Inverted]:
    found = invert_shared(load_config(path, ()), Inversion(steps=10), **options)
    return [one for one in found if isinstance(one, Inverted)]


def without_high_frequencies(image: np.ndarray[Any, Any], radius: int) -> np.ndarray[Any, Any]:
    spectrum, side = np.fft.fft2(image.astype(np.float64)), len(image)
    far = np.abs(np.fft.fftfreq(side, 1 / side)) > radius + 0.5
    spectrum[far], spectrum[:, far] = 0, 0
    found: np.ndarray[Any, Any] = np.fft.ifft2(spectrum).real
    return found


def test_shared_parts_are_inverted_and_written(tmp_path: Path, data: Path) -> None:
    path = write(
        tmp_path, data, {"name": "feddg", "window": 0.1}, {"name": "harmofl", "radius": 3}, "fedavg"
    )
    result = call(str(path), "--kind", "shared", "--steps", "20", "--sites", "birch")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run" / "attack"
    assert result.stdout.splitlines()[-1] == str(folder)
    written = read_json(folder / "shared.json")
    attacks = [
        OWN, "phase retrieval", "phases of another image", "phases of the mean of own images", BOUND
    ]  # fmt: skip
    rows = [(r["algorithm"], r["part"], r["of"], r["attack"]) for r in written["results"]]
    assert rows == [
        *(("feddg", "spectra", "one image", attack) for attack in attacks),
        *(("harmofl", "amplitude", "a mean", attack) for attack in attacks[:-1]),
        *(("harmofl", "amplitude", "two means", attack) for attack in attacks),
    ]
    assert {(r["site"], r["numbers"], r["pixels"]) for r in written["results"]} == {
        ("birch", 25, 1024)
    }
    assert written["settings"]["steps"] == 20
    left = {one["algorithm"]: one["parts"] for one in written["not_tried"]}
    assert [*left] == ["feddg", "harmofl", "fedavg"]
    assert all(parts == ["progress", "scores", "num_examples"] for parts in left.values())
    assert all(sentence in result.stdout for sentence in written["sentences"])
    start = "From the part spectra that feddg sends of one image of birch (25 numbers; the image "
    start += "has 1,024), an attacker rebuilds this (phase retrieval): PSNR "
    assert any(s.startswith(start) for s in written["sentences"])
    assert any(
        s.startswith("The part spectra of feddg tells exactly") for s in written["sentences"]
    )
    assert (
        "What fedavg sends as progress, scores and num_examples was not attacked: there is no "
        "inverter for such parts."
    ) in written["sentences"]
    with (folder / "shared.csv").open() as file:
        assert len([*csv.DictReader(file)]) == len(rows)
    assert (folder / "shared.md").read_text().startswith("| algorithm | site | part | of |")
    assert len([*folder.glob("*.png")]) == len(rows)
    with Image.open(folder / "feddg-birch-spectra-one-image-true-phases.png") as picture:
        assert picture.size == (2 * 192, 192)


def test_what_amplitudes_with_true_phases_give_is_the_image_without_high_frequencies(
    tmp_path: Path, data: Path
) -> None:
    """Of the image that the site has drawn and no other: numpy filters the one beside."""
    path = write(tmp_path, data, {"name": "resfim", "window": 0.1})
    for case in (0, 2):
        found = {one.result.attack: one for one in inverted(path, case=case)}
        truth = found[BOUND].truth[0, 0].numpy()
        expected = without_high_frequencies(truth, 3)
        assert found[BOUND].image[0, 0].numpy() == pytest.approx(expected, abs=1e-4)
        error = np.square(expected - truth).mean()
        psnr = 10 * np.log10((truth.max() - truth.min()) ** 2 / error)
        assert found[BOUND].result.likeness.psnr == pytest.approx(psnr, abs=1e-3)
        assert all(one.result.apart < 1e-5 for one in found.values())


def test_two_means_of_amplitudes_give_a_patient_s_own(tmp_path: Path, data: Path) -> None:
    path = write(tmp_path, data, {"name": "harmofl", "radius": 3})
    found = inverted(path, case=1)
    means = [one for one in found if one.result.of == MEAN]
    alone = [one for one in found if one.result.of == WITHDRAWN]
    assert {one.result.images for one in means} == {4}
    assert min(one.result.apart for one in means) > 0.01
    assert max(one.result.apart for one in alone) < 1e-3
    (bound,) = (one for one in alone if one.result.attack == BOUND)
    expected = without_high_frequencies(bound.truth[0, 0].numpy(), 3)
    assert bound.image[0, 0].numpy() == pytest.approx(expected, abs=1e-2)


def test_the_mean_that_pfednet_sends_gives_the_pixels_of_who_is_withdrawn(
    tmp_path: Path, data: Path
) -> None:
    path = write(tmp_path, data, {"name": "pfednet", "sketch_size": 32})
    for one in inverted(path):
        if one.result.of == WITHDRAWN and one.result.attack != OWN:
            assert one.image.numpy() == pytest.approx(one.truth.numpy(), abs=1e-4)
            break
    else:
        pytest.fail("no patient was withdrawn")


def test_embeddings_are_inverted_and_moments_given_to_another_image(
    tmp_path: Path, data: Path
) -> None:
    path = write(tmp_path, data, {"name": "distance", "kind": "embedding"})
    own, found = inverted(path)
    assert (found.result.attack, found.result.numbers) == ("feature inversion", 2 * 64)
    assert found.result.apart < 1e-4  # the row of this image, wherever it stands among them
    assert own.result.own_psnr == own.result.likeness.psnr == found.result.own_psnr
    text = data.read_text().replace("zscore", "scale")
    raw = data.with_name("raw.yaml")
    raw.write_text(text)
    results = [one.result for one in inverted(write(tmp_path, raw, "fedrdn"))]
    name = "another image with this mean and deviation"
    assert [(r.of, r.attack) for r in results] == [
        (MEAN, OWN), (MEAN, name), (WITHDRAWN, OWN), (WITHDRAWN, name)
    ]  # fmt: skip
    assert max(r.apart for r in results if r.of == WITHDRAWN) < 1e-3


def test_latent_features_give_the_image_back(tmp_path: Path, data: Path) -> None:
    (tmp_path / "senders.py").write_text(SENDERS)
    path = write(tmp_path, data, f"{tmp_path / 'senders.py'}:Maps")
    (found,) = (
        one.result
        for one in invert_shared(load_config(path, ()), Inversion(steps=300), case=3)
        if isinstance(one, Inverted) and one.result.attack != OWN
    )
    assert (found.attack, found.of) == ("feature inversion", "one image")
    assert found.apart < 1e-5
    assert found.likeness.psnr > found.own_psnr + 10
    assert found.likeness.ssim > 0.9


def test_means_of_latent_features_are_compared_with_every_image(tmp_path: Path, data: Path) -> None:
    (tmp_path / "senders.py").write_text(SENDERS)
    path = write(tmp_path, data, f"{tmp_path / 'senders.py'}:Prototypes")
    found = [*invert_shared(load_config(path, ()), Inversion(steps=10))]
    results = [one.result for one in found if isinstance(one, Inverted)]
    assert [(r.part, r.of, r.attack, r.images) for r in results] == [
        (f"prototypes {row}", "a mean", attack, 4)
        for row in (0, 1)  # there is no image of the third
        for attack in (OWN, "feature inversion")
    ]
    (left,) = (one for one in found if isinstance(one, NotTried))
    assert left.parts == ["progress", "scores", "num_examples", "other"]


def test_a_part_without_images_to_compare_is_named(tmp_path: Path) -> None:
    alone = make_federation(tmp_path / "data", 1, cases=8, size=32)
    path = write(tmp_path, alone, {"name": "harmofl", "radius": 3})
    first, _ = invert_shared(load_config(path, ()))
    assert isinstance(first, NotTried)
    assert first.parts == ["amplitude"]
    assert "no other site has training images" in first.why


def test_an_attacker_brings_images_of_another_size_to_that_of_the_image(tmp_path: Path) -> None:
    sides = {"alder": 32, "birch": 48}
    for site, side in sides.items():
        both = make_federation(tmp_path / site, 2, cases=8, size=side)
    shutil.rmtree(both.with_name("alder"))
    shutil.copytree(tmp_path / "alder" / "alder", both.with_name("alder"))
    both.write_text(both.read_text().replace("sampling:", "sampling:\n  crop: [32, 32]"))
    for one in inverted(write(tmp_path, both, "pfednet"), sites=[*sides]):
        side = sides[one.result.site]
        assert one.truth.shape == one.image.shape == (1, 1, side, side)
        if one.result.attack == "enlarged":
            assert one.result.likeness.correlation > 0.8


def test_what_cannot_be_inverted_ends_with_a_sentence(tmp_path: Path, data: Path) -> None:
    rows = ["patient,a,outcome,split"]
    for number in range(12):
        part = ("train", "val", "test")[number % 3]
        rows.append(f"p{number},{number},{'yes' if number % 2 else 'no'},{part}")
    (tmp_path / "t.csv").write_text("\n".join([*rows, ""]))
    table = {
        "name": "t", "sites": {"a": {"table": "t.csv"}, "b": {"table": "t.csv"}},
        "table": {"label": "outcome", "numeric": ["a"], "patient": "patient", "split": "split"},
        "task": {"name": "classification", "classes": ["no", "yes"]},
    }  # fmt: skip
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(table))
    mlp = {"name": "mlp", "norm": "none", "hidden": [4]}
    for source, algorithms, options, words in (
        (data, ["fedavg", "ditto"], [], "sent beside models by fedavg, ditto"),
        (data, ["resfim"], ["--sites", "oak"], "there is no site 'oak'"),
        (data, ["resfim"], ["--case", "99"], "there is no image 99 among them"),
        (tmp_path / "federation.yaml", ["resfim"], [], "rows of a table"),
    ):
        changes = {} if source is data else {"model": mlp}
        path = write(tmp_path, source, *algorithms, **changes)
        result = call(str(path), "--kind", "shared", *options)
        assert result.exit_code == 2, result.output
        assert words in result.stderr


def test_the_defaults_of_the_command_are_those_of_python() -> None:
    options = {name: p.default for name, p in inspect.signature(attack).parameters.items()}
    defaults = {name: p.default for name, p in inspect.signature(write_shared).parameters.items()}
    assert {name: options[name] for name in ("case", "pictures")} == {
        name: defaults[name] for name in ("case", "pictures")
    }
    assert asdict(defaults["settings"])["steps"] == options["steps"]
