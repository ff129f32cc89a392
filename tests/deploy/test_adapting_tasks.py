"""Adaptation of what is no picture to be segmented: volumes, classes of images, rows of tables."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from collegium import cli
from collegium.adaptation.routing import routed_network
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.runner import run_experiment
from collegium.models.factory import build_model
from collegium.models.files import import_model

AFFINE = np.array([[0, -2.0, 0, 5], [-1.5, 0, 0, 7], [0, 0, 3, -9], [0, 0, 0, 1]])
UNET: dict[str, Any] = {"name": "unet", "in_channels": 1, "spatial_dims": 3, "channels": [2, 4]}
NET: dict[str, Any] = {"name": "densenet", "growth": 2, "blocks": [1], "init_features": 4}
SITES = ("north", "south")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(tmp_path_factory.mktemp("tasks-cache")))
        yield


def run(folder: Path, sites: dict[str, Any], model: dict[str, Any], **federation: Any) -> Path:
    """Train IOP-FL for a round at two sites that hand their personal models out."""
    shared = {site: {**settings, "share": ["personal"]} for site, settings in sites.items()}
    settings = {
        "name": "tiny", "rounds": 1, "algorithms": ["iopfl"], "model": model,
        "training": {"batch_size": 4, "local_steps": 2, "lr": 0.02}, "output": str(folder / "run"),
        "federation": {"name": "f", "root": str(folder), "sites": shared, **federation},
    }  # fmt: skip
    return run_experiment(parse_config(settings))


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


def account(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "account.json").read_text())
    return told


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [*csv.DictReader(file)]


def handed_out(output: Path, name: str) -> dict[str, torch.Tensor]:
    return dict(import_model(output / f"iopfl/seed-0/server/deployed/{name}.safetensors"))


# --- volumes


@pytest.fixture(scope="module")
def of_volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on turned volumes, with those of a third hospital in ``new``."""
    folder = tmp_path_factory.mktemp("volumes")
    for number, site in enumerate((*SITES, "new")):
        rng = np.random.default_rng(number)
        for case in range(2 if site == "new" else 4):
            label = np.zeros((8, 6, 10), np.uint8)
            label[2:5, 1:4, 3:8] = 1
            image = (rng.normal(60, 10, label.shape) + 120 * label).astype(np.float32)
            for kind, array in (("images", image), ("labels", label)):
                (folder / site / kind).mkdir(parents=True, exist_ok=True)
                volume = nib.Nifti1Image(array, AFFINE)
                nib.save(volume, folder / site / kind / f"c{case}.nii.gz")
    return run(folder, {site: {"folder": site} for site in SITES}, UNET)


def upright(path: Path) -> np.ndarray[Any, Any]:
    """Read a volume with its axes towards right, front and head."""
    turned = nib.as_closest_canonical(nib.load(path))
    return np.asarray(turned.dataobj)


def batch(output: Path) -> torch.Tensor:
    """The third hospital's volumes as the network gets them, (2, 1, 6, 8, 10)."""
    volumes = [upright(path) for path in sorted((output.parent / "new/images").iterdir())]
    scored = [(volume - volume.mean()) / volume.std() for volume in map(np.float64, volumes)]
    return torch.from_numpy(np.stack(scored)[:, None].astype(np.float32))


def check_masks(output: Path, folder: Path, logits: torch.Tensor) -> None:
    """Masks lie on the grid of the images and say what the logits say."""
    for number, expected in enumerate(logits.argmax(1).numpy()):
        path = folder / f"predictions/c{number}.nii.gz"
        mask: Any = nib.load(path)
        assert mask.shape == (8, 6, 10)
        np.testing.assert_allclose(mask.affine, AFFINE)
        assert (upright(path) == expected).mean() > 0.99  # up to ties


def test_volumes_are_routed_and_the_routed_network_opens_again(
    of_volumes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, said = command("adapt", of_volumes, of_volumes.parent / "new", "epochs=2", "radius=1",
                         "--output", out)  # fmt: skip
    assert code == 0, said
    told = account(out)
    assert (told["sources"], told["steps"]) == (["global", "north", "south"], 2)
    assert [row["step"] for row in told["losses"]] == [0, 1, 2]
    totals = [row["total"] for row in told["losses"]]
    for row, total in zip(told["losses"], totals, strict=True):
        assert total == pytest.approx(row["consistency"] + 0.01 * (row["shape"] + row["entropy"]))
    assert told["chosen"] == int(np.argmin(totals))
    network = routed_network(build_model(**UNET), import_model(out / "adapted.safetensors"))
    with torch.no_grad():
        logits = network(batch(of_volumes))
    check_masks(of_volumes, out, logits)
    chances = logits.softmax(1).numpy()
    entropy = -(chances * np.log(chances)).sum(1).mean()
    assert told["losses"][told["chosen"]]["entropy"] == pytest.approx(entropy, rel=1e-3)


def test_the_adapted_model_predicts_more_cases(of_volumes: Path, tmp_path: Path) -> None:
    new = of_volumes.parent / "new"
    for adapter, more in (("routing", ["batch_size=1", "epochs=1", "radius=1"]),
                          ("routing", ["batch_size=1", "epochs=1", "granularity=model"]),
                          ("dsbn", ["batch_size=1"])):  # fmt: skip
        out, place = tmp_path / f"{adapter}{more[-1]}", tmp_path / f"{adapter}{more[-1]} again"
        code, said = command("adapt", of_volumes, new, *more, "--adapter", adapter, "--output", out)
        assert code == 0, said
        code, said = command("predict", out / "adapted.safetensors", new, "--output", place)
        assert code == 0, said
        for mask in (out / "predictions").iterdir():
            np.testing.assert_array_equal(upright(place / mask.name), upright(mask))


def test_tents_model_predicts_by_the_statistics_of_each_case(
    of_volumes: Path, tmp_path: Path
) -> None:
    new, out = of_volumes.parent / "new", tmp_path / "out"
    code, said = command("adapt", of_volumes, new, "--adapter", "tent", "lr=0.1", "steps=3",
                         "--output", out)  # fmt: skip
    assert code == 0, said
    model = tmp_path / "out/adapted.safetensors"
    code, said = command("predict", model, new, "--output", tmp_path / "more" / "predictions")
    assert code == 0, said
    network = build_model(**UNET)
    network.load_state_dict(import_model(model), strict=False)  # it has no running statistics
    network.train()
    with torch.no_grad():
        logits = torch.cat([network(volume[None]) for volume in batch(of_volumes)])
    check_masks(of_volumes, tmp_path / "more", logits)
    code, said = command("export", model, "--output", tmp_path / "bundle")
    assert (code, "which a bundle cannot do; use collegium predict" in said) == (2, True), said


def test_volumes_are_predicted_by_tent_before_its_step(of_volumes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = command("adapt", of_volumes, of_volumes.parent / "new", "lr=0.01", "--adapter",
                         "tent", "--output", out)  # fmt: skip
    assert code == 0, said
    network, start = build_model(**UNET), handed_out(of_volumes, "global")
    network.load_state_dict(start)
    network.train()  # statistics of the batch; no dropout
    with torch.no_grad():
        logits = network(batch(of_volumes))
    check_masks(of_volumes, out, logits)
    chances = logits.softmax(1).numpy()
    told = account(out)
    assert (told["steps"], len(told["losses"])) == (1, 1)
    entropy = -(chances * np.log(chances)).sum(1).mean()
    assert told["losses"][0]["entropy"] == pytest.approx(entropy, rel=1e-3)
    moved = {
        name: float((tensor - start[name]).abs().max())
        for name, tensor in import_model(out / "adapted.safetensors").items()
    }
    scales = {name for name, far in moved.items() if far > 0}
    assert scales
    assert all(".N." in name for name in scales)  # of the norms
    assert max(moved.values()) == pytest.approx(0.01, rel=0.01)  # Adam's first step


# --- classes of images


@pytest.fixture(scope="module")
def of_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pictures of two classes, with those of a third hospital in ``new``."""
    folder = tmp_path_factory.mktemp("classes")
    rng = np.random.default_rng(0)
    for site in (*SITES, "new"):
        (folder / site).mkdir()
        lines = ["image,class,split"]
        for number in range(5 if site == "new" else 9):
            pixels = rng.normal(60, 10, (12, 12))
            pixels[:, : 6 if number % 2 else 2] += 100
            picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            picture.save(folder / site / f"n{number}.png")
            lines.append(f"n{number}.png,{number % 2},{('train', 'val', 'test')[number // 3]}"
                         if site != "new" else f"n{number}.png,,")  # fmt: skip
        (folder / site / "m.csv").write_text("\n".join(lines) + "\n")
    task = {"name": "classification", "classes": ["well", "ill"],
            "coding": {"0": "well", "1": "ill"}}  # fmt: skip
    sites = {site: {"manifest": f"{site}/m.csv"} for site in SITES}
    return run(folder, sites, NET, task=task, image={"inputs": 1})


def pictures(output: Path) -> torch.Tensor:
    found = []
    for path in sorted((output.parent / "new").glob("*.png")):
        pixels = np.asarray(Image.open(path), dtype=np.float64)
        found.append((pixels - pixels.mean()) / pixels.std())
    return torch.from_numpy(np.stack(found)[:, None].astype(np.float32))


def chances_by_hand(output: Path, names: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """The softmax of the mean logits of models."""
    outputs = []
    for name in names:
        network = build_model(**NET, in_channels=1, out_channels=2).eval()
        network.load_state_dict(handed_out(output, name))
        with torch.no_grad():
            outputs.append(network(pictures(output)))
    return torch.stack(outputs).mean(0).softmax(1).numpy()


@pytest.mark.parametrize(("adapter", "names"), [("none", ("global",)), ("ensemble", SITES)])
def test_a_classification_gets_the_table_that_predict_writes(
    of_classes: Path, tmp_path: Path, adapter: str, names: tuple[str, ...]
) -> None:
    new, out = of_classes.parent / "new", tmp_path / "out"
    code, said = command("adapt", of_classes, new, "--adapter", adapter, "--output", out)
    assert code == 0, said
    found = rows(out / "predictions.csv")
    expected = chances_by_hand(of_classes, names)
    assert [row["case"] for row in found] == [f"n{number}" for number in range(5)]
    numbers = [[float(row["well"]), float(row["ill"])] for row in found]
    np.testing.assert_allclose(numbers, expected, atol=2e-5)
    said_ill = int((expected[:, 1] > expected[:, 0]).sum())
    assert account(out)["classes"] == {"well": 5 - said_ill, "ill": said_ill}
    assert {path.name for path in out.iterdir()} == {
        "predictions.csv", "account.html", "account.json",
        *(["adapted.safetensors", "settings.json"] if adapter == "none" else []),
    }  # fmt: skip
    if adapter == "none":
        code, said = command("predict", of_classes, new, "--output", tmp_path / "own")
        assert code == 0, said
        own = rows(tmp_path / "own/predictions.csv")
        assert [(row["case"], row["class"]) for row in own] == [
            (row["case"], row["class"]) for row in found
        ]


@pytest.mark.parametrize(("adapter", "models"), [("none", ("",)), ("average", SITES)])
def test_a_manifest_that_names_all_classes_is_scored(
    of_classes: Path, tmp_path: Path, adapter: str, models: tuple[str, ...]
) -> None:
    new, out = of_classes.parent / "new", tmp_path / "out"
    lines = [f"n{number}.png,{number % 2},p{number // 2}" for number in range(5)]
    (new / "classes.csv").write_text("\n".join(["image,class,patient", *lines]) + "\n")
    code, said = command("adapt", of_classes, new / "classes.csv", "--adapter", adapter,
                         "--output", out)  # fmt: skip
    assert code == 0, said
    found, scores = rows(out / "predictions.csv"), rows(out / "scores.csv")
    assert [row.get("model", "") for row in found] == [name for name in models for _ in range(5)]
    assert sum(account(out)["classes"].values()) == 5 * len(models)
    aucs = []
    for place, model in enumerate(models):
        expected = chances_by_hand(of_classes, (model or "global",))
        mine = scores[5 * place : 5 * place + 5]
        assert [row["case"] for row in mine] == [f"n{number}" for number in range(5)]
        losses = [-np.log(expected[number, number % 2]) for number in range(5)]
        np.testing.assert_allclose([float(row["log_loss"]) for row in mine], losses, atol=2e-5)
        aucs.append(roc_auc_score([0, 1, 0, 1, 0], expected[:, 1], sample_weight=[1, 1, 1, 1, 2]))
    page = (out / "account.html").read_text()
    shown = re.search(r'<th scope="row">auc</th><td>([0-9.]+)</td><td>3</td>', page)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(np.mean(aucs), abs=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--adapter", "tent"],
        ["--adapter", "dsbn", "pseudo_labels=1", "threshold=0"],
        ["--adapter", "routing", "terms=[consistency,entropy]", "transforms=true", "epochs=1"],
    ],
)
def test_a_classifier_is_adapted(of_classes: Path, tmp_path: Path, arguments: list[str]) -> None:
    out = tmp_path / "out"
    code, said = command("adapt", of_classes, of_classes.parent / "new", *arguments, "--output",
                         out)  # fmt: skip
    assert code == 0, said
    found = np.array([[float(r["well"]), float(r["ill"])] for r in rows(out / "predictions.csv")])
    np.testing.assert_allclose(found.sum(1), 1, atol=2e-6)
    assert np.abs(found - chances_by_hand(of_classes, ("global",))).max() > 1e-4
    assert account(out)["steps"] > 0
    assert (out / "adapted.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--adapter", "average"], "choose ensemble"),
        (["--adapter", "none", "--labels", "."], "a folder of labels scores segmentations only"),
        (["--adapter", "routing"], "e.g. with terms=[consistency,entropy]"),
        (["--adapter", "ttt"], "no rotation head"),
    ],
)
def test_what_makes_no_sense_for_classes_is_refused(
    of_classes: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    code, said = command("adapt", of_classes, of_classes.parent / "new", *arguments, "--output",
                         tmp_path / "out")  # fmt: skip
    assert (code, says in said) == (2, True), said
    assert list(tmp_path.iterdir()) == []


# --- rows of a table


@pytest.fixture(scope="module")
def of_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of logistic regression on two columns, with the rows of a third hospital in ``new``."""
    folder = tmp_path_factory.mktemp("rows")
    for seed, site in enumerate(SITES):
        values = np.random.default_rng(seed).normal(size=(12, 2))
        lines = [f"{a:.4f},{b:.4f},{('train', 'val', 'test')[k % 3]},{k % 2}"
                 for k, (a, b) in enumerate(values)]  # fmt: skip
        (folder / f"{site}.csv").write_text("\n".join(["a,b,fold,ill", *lines]) + "\n")
    (folder / "new.csv").write_text("id,b,a\nx,0.5,-1\ny,2,0.25\nz,-1,1.5\n")
    table = {"label": "ill", "numeric": ["a", "b"], "split": "fold", "scale": "none"}
    task = {"name": "classification", "classes": ["well", "ill"],
            "coding": {"0": "well", "1": "ill"}}  # fmt: skip
    sites = {site: {"table": f"{site}.csv"} for site in SITES}
    return run(folder, sites, {"name": "logistic"}, task=task, table=table)


def test_rows_are_predicted_by_all_models_together(of_rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = command("adapt", of_rows / "iopfl/seed-0/server/deployed",
                         of_rows.parent / "new.csv", "--adapter", "ensemble", "--output",
                         out)  # fmt: skip
    assert code == 0, said
    values = np.array([[-1, 0.5], [0.25, 2], [1.5, -1]])
    logits = np.zeros((3, 2))
    for site in SITES:
        tensors = [tensor.numpy() for tensor in handed_out(of_rows, site).values()]
        bias, weight = sorted(tensors, key=np.ndim)
        logits += (values @ weight.T + bias) / len(SITES)
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = [[float(row["well"]), float(row["ill"])] for row in rows(out / "predictions.csv")]
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_an_adapter_of_normalisation_is_none_for_rows(of_rows: Path, tmp_path: Path) -> None:
    for place, says in (("new.csv", "tent adapts batch normalisation"),
                        (".", "the model learnt from tables; name a table")):  # fmt: skip
        code, said = command("adapt", of_rows, of_rows.parent / place, "--adapter", "tent",
                             "--output", tmp_path / "out")  # fmt: skip
        assert (code, says in said) == (2, True), said
        assert list(tmp_path.iterdir()) == []
