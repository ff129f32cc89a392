"""The field cases about models: averaging, names, ties, damage, half precision, small batches."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.core.dataset import TensorDataset
from collegium.core.message import pack, unpack
from collegium.core.model_parts import find_parts
from collegium.core.payloads import ModelPart
from collegium.core.tensors import Mean, Tensors, mean
from collegium.data.site import Site
from collegium.errors import CheckpointError, ProtocolError
from collegium.models.factory import build_model
from collegium.models.files import export_model, import_model
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.server import ServerRuntime
from collegium.runtime.simulation import simulate
from collegium.runtime.state import Store
from collegium.tasks import SegmentationTask
from collegium.training.loop import TrainingConfig


def sites(folder: Path) -> list[Tensors]:
    return [import_model(path) for path in sorted(folder.glob("site_*.pt"))]


def weights(folder: Path) -> list[float]:
    return list(json.loads((folder / "num_examples.json").read_text("utf-8")).values())


def network() -> nn.Module:
    """The network of the cases: a convolution and its batch normalisation."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


def test_mod01_fedavg_averages_statistics_and_keeps_the_largest_count(folder, values):
    model = mean(sites(folder), weights(folder))
    assert model["1.running_mean"].tolist() == values["running_mean"]
    assert model["1.running_var"].tolist() == values["running_var"]
    count = model["1.num_batches_tracked"]
    assert str(count.dtype) == f"torch.{values['num_batches_tracked_dtype']}"
    assert int(count) == values["num_batches_tracked_max"]
    assert float(model["0.weight"].sum()) == pytest.approx(values["conv_weight_sum"], abs=1e-6)
    assert not network().load_state_dict(dict(model), strict=True).missing_keys


def test_mod01_fedbn_leaves_the_norm_of_every_site_alone(folder):
    part = FedBN.all_sends()["model"]
    assert isinstance(part, ModelPart)
    names = part.names(find_parts(network()))
    models = sites(folder)
    shared_part = mean([model.select(names) for model in models], weights(folder))
    assert set(shared_part) == {"0.weight", "0.bias"}
    for model in models:
        personal = model | shared_part
        for name in model:
            assert torch.equal(personal[name], model[name]) == name.startswith("1.")


def test_mod03_prefix_is_taken_off_on_import_and_the_mean_is_right(folder, values, caplog):
    with caplog.at_level(logging.WARNING):
        model = mean(sites(folder))
    assert float(model["0.weight"].sum()) == pytest.approx(values["conv_weight_sum"], abs=1e-6)
    (record,) = caplog.records
    assert "site_b.pt" in record.getMessage()
    assert f"all {values['n_keys']} names carry 'module.'" in record.getMessage()


def test_mod03_prefix_in_a_message_is_refused_and_explained(folder, values):
    a, b = (
        Tensors(torch.load(folder / f"site_{site}.pt", weights_only=True)) for site in ("a", "b")
    )
    running = Mean()
    running.add(a, source="client 'a'")
    with pytest.raises(ProtocolError) as caught:
        running.add(b, source="client 'b'")
    assert "client 'b'" in str(caught.value)
    assert f"all {values['n_keys']} names carry 'module.'" in str(caught.value)


def test_mod04_refusal_names_the_site_and_the_missing_names(folder, values):
    running = Mean()
    a, b = sites(folder)
    running.add(a, source="client 'site_a'")
    with pytest.raises(ProtocolError) as caught:
        running.add(b, source="client 'site_b'")
    assert "site_b" in str(caught.value)
    assert f"missing {', '.join(values['missing'])}" in str(caught.value)
    assert "unexpected" not in str(caught.value)


def test_mod05_ties_survive_averaging_saving_and_sending(folder, values, tmp_path):
    model = mean(sites(folder))
    path = tmp_path / "mean.safetensors"
    export_model(model, path)
    data = pack({"model": model})
    for found in (model, import_model(path), unpack(data)["model"]):
        first, second = found["encoder.w"], found["decoder.encoder.w"]
        assert first.data_ptr() == second.data_ptr()
        assert found.numel() == values["distinct_numbers"]
        assert float(second.sum()) == pytest.approx(values["sum"], abs=1e-6)
    numbers = 4 * values["distinct_numbers"]
    header = int.from_bytes(data[:8], "little")
    assert len(data) == 8 + header + numbers


def test_mod06_import_names_the_damaged_file(folder, values):
    checkpoints = folder / "checkpoints"
    whole = [checkpoints / f"round_{number:03d}.pt" for number in (1, 2)]
    assert [len(import_model(path)) for path in whole] == [7, 7]
    damaged = checkpoints / values["damaged"]
    with pytest.raises(CheckpointError) as caught:
        import_model(damaged)
    assert str(caught.value).startswith(f"{damaged} is damaged (cut short")
    assert "PytorchStreamReader" not in str(caught.value)


def test_mod06_run_goes_on_from_the_newest_whole_state(folder, values, tmp_path, caplog):
    store = Store(tmp_path)
    for number in (1, 2):
        model = import_model(folder / f"checkpoints/round_{number:03d}.pt")
        store.save(f"{number:06d}", {"model": model})
    good = store.read("000002")
    share = (folder / "checkpoints" / values["damaged"]).stat().st_size / (
        folder / "checkpoints/round_002.pt"
    ).stat().st_size
    store.write("000003", good[: int(share * len(good))])
    shutil.copy(folder / "checkpoints/round_004.pt.tmp", tmp_path / "000004.state.77.tmp")
    server = ServerRuntime(
        FedAvg(), ["a"], lambda k: Tensors(network().state_dict()), find_parts(network()),
        InProcess(dict), tmp_path,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        server.begin()
    assert server.round == values["resume_from"]
    assert server.round + 1 == values["next_round"]
    second = import_model(folder / "checkpoints/round_002.pt")
    assert torch.equal(server.state["model"]["0.weight"], second["0.weight"])
    (record,) = caplog.records
    assert f"{tmp_path / '000003.state'} is damaged" in record.getMessage()
    assert not list(tmp_path.glob("*.tmp"))
    assert store.names() == ["000001", "000002"]


@pytest.mark.parametrize("flush", [False, True])
def test_mod07_half_precision_is_summed_in_float64(folder, values, flush):
    torch.set_flush_denormal(flush)
    try:
        model = mean(sites(folder), weights(folder))
    finally:
        torch.set_flush_denormal(False)
    assert model["w"].dtype == torch.float16
    assert float(model["w"][0]) == values["w0"]
    assert float(model["w"][1]) == 2.0**-23
    assert float(model["w"][2]) == values["w2"]
    assert model["bn.running_var"].tolist() == [values["running_var"]]


def images_of(folder: Path) -> TensorDataset:
    from PIL import Image

    def read(path: Path) -> np.ndarray:
        with Image.open(path) as image:
            return np.asarray(image.convert("L"))

    images = np.stack([read(path) for path in sorted((folder / "images").glob("*.png"))])
    masks = np.stack([read(path) for path in sorted((folder / "masks").glob("*.png"))])
    return TensorDataset(
        {
            "image": torch.from_numpy(images).float()[:, None] / 255,
            "label": torch.from_numpy(masks > 0).long(),
        }
    )


def unet() -> nn.Module:
    """Four down-samplings: 16 x 16 pixels become 1 x 1."""
    return build_model("unet", in_channels=1, channels=(2, 2, 2, 2, 2), num_res_units=0)


def test_mod08_small_sites_train_by_the_documented_rules(folder, values, tmp_path, caplog):
    data = {site: images_of(folder / site) for site in ("site_a", "site_b")}
    assert [len(data[site]) for site in data] == [
        values["site_a_images"],
        values["site_b_images"],
    ]
    with caplog.at_level(logging.WARNING):
        result = simulate(
            FedBN(),
            [Site(name, train, train, train) for name, train in data.items()],
            unet,
            SegmentationTask(2, metrics=("dice",)),
            rounds=1,
            training=TrainingConfig(batch_size=4, optimizer="sgd", lr=0.1),
            output=tmp_path,
        )
    assert "a batch of one example: batch normalisation uses its running statistics" in caplog.text
    losses = result.records[0].losses
    assert set(losses) == set(data)
    assert all(loss is not None and np.isfinite(loss) for loss in losses.values())
    counters = [name for name in result.personal["site_a"] if name.endswith("num_batches_tracked")]
    assert counters
    for name in counters:  # five images in batches of four are one batch: the tail is merged
        assert int(result.personal["site_a"][name]) == 1
        assert int(result.personal["site_b"][name]) == 0
    start = unet().state_dict()
    for name in start:
        if name.endswith("running_mean"):
            assert torch.equal(result.personal["site_b"][name], start[name])
            assert not torch.equal(result.personal["site_a"][name], start[name])
    moved = [
        name for name, tensor in result.personal["site_b"].items()
        if name.endswith("weight") and not torch.equal(tensor, result.personal["site_a"][name])
    ]  # fmt: skip
    assert moved
