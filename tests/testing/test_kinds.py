"""Every kind of data can be learnt, and between them they have what networks may have."""

import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.ttt import TTT
from collegium.core.model_parts import find_parts, head_layer
from collegium.core.randomness import ambient
from collegium.errors import ConfigError
from collegium.runtime.federation import check_task
from collegium.testing.kinds import KINDS
from collegium.testing.statements import kinds_of
from collegium.testing.toy import REGRESSION, SIZES, ToyFederation, toy_federation, toy_site


def layers(name: str) -> list[nn.Module]:
    with ambient(0, "kinds"):
        return list(KINDS[name].network().modules())


def has(name: str, kind: type[nn.Module]) -> bool:
    return any(isinstance(layer, kind) for layer in layers(name))


@pytest.mark.parametrize("name", KINDS)
def test_sites_have_their_sizes_and_data_of_their_own(name):
    kind = KINDS[name]
    sites = [toy_site(site, kind=kind) for site in SIZES]
    sizes = [9, 14, 21] if kind is REGRESSION else [4, 7, 10]
    assert [len(site.train) for site in sites] == sizes
    images = [site.test.example(0).batch["image"] for site in sites]
    assert not torch.equal(images[0], images[1])
    again = toy_site("A", kind=kind).test.example(0).batch
    assert torch.equal(images[0], again["image"])
    labels = torch.cat([site.train.batch(range(4), [])["label"].flatten() for site in sites])
    assert len(labels.unique()) > 1


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_runs_a_round(name, tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path, kind=KINDS[name]).run(1)
    assert (federation.root / "server" / "test.json").exists()


def test_networks_differ_in_norm_dropout_head_and_dimensions():
    assert has("rows with a number", nn.BatchNorm1d)
    assert has("rows with classes", nn.BatchNorm1d)
    assert has("images with classes", nn.InstanceNorm2d)
    assert has("images with classes", nn.Dropout)
    assert has("images with masks", nn.BatchNorm2d)
    assert has("volumes with masks", nn.Conv3d)
    with ambient(0, "kinds"):
        assert not find_parts(KINDS["volumes with masks"].network()).norm
        head = head_layer(KINDS["images with masks"].network())
    assert len([m for m in head.modules() if isinstance(m, nn.modules.conv._ConvNd)]) > 1


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.bare])
def test_bare_networks_have_no_norm(name):
    bare = KINDS[name].bare
    assert bare is not None
    with ambient(0, "kinds"):
        assert not find_parts(bare()).norm


def test_masks_hold_a_field_of_view():
    batch = toy_site("A", kind=KINDS["images with masks"]).train.batch(range(4), [])
    assert batch["mask"].dtype == torch.bool
    assert batch["mask"].shape == batch["label"].shape
    assert 0 < batch["mask"].float().mean() < 1


@pytest.mark.parametrize("name", KINDS)
def test_task_of_a_kind_is_known_by_its_name(name):
    kind = KINDS[name]
    found = toy_federation(kind=kind).task_name
    assert found == (kind.task_name if kind.task_name != "regression" else "SupervisedTask")


def test_algorithm_for_one_task_is_refused_for_others():
    class Segments(FedAvg):
        tasks = frozenset({"segmentation"})

    found = kinds_of(Segments())
    assert [name for name, why in found.items() if not why] == [
        "volumes with masks", "images with masks",
    ]  # fmt: skip
    expected = (
        "Segments is made for segmentation, and the task here is table; choose another algorithm"
    )
    assert found["rows with classes"] == expected
    with pytest.raises(ConfigError, match=expected):
        check_task(Segments(), "table")
    federation = toy_federation(kind=KINDS["images with classes"])
    with pytest.raises(ConfigError, match="the task here is classification"):
        federation.check(Segments())
    federation.check(FedAvg())


def test_what_a_method_refuses_in_words_is_not_its_fault():
    found = kinds_of(TTT())
    assert [name for name, why in found.items() if why] == ["rows with classes"]
    assert not any(kinds_of(FedBN()).values())
