import json
import logging
import os
import pickle
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from collegium.core.tensors import Tensors
from collegium.errors import CheckpointError, StorageError
from collegium.models.files import export_model, import_model, import_safetensors


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight


@pytest.fixture
def tied() -> Tensors:
    return Tensors(Tied().state_dict()).clone()


def assert_equal(found: Tensors, expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
def test_torch_file_is_read_plain_or_wrapped(tmp_path, wrapper):
    state = nn.BatchNorm1d(3).state_dict()
    path = tmp_path / "weights.pt"
    torch.save({wrapper: state, "round": 3} if wrapper else state, path)
    assert_equal(import_model(path), dict(state))


def test_file_of_the_old_torch_format_is_read(tmp_path):
    state = nn.Linear(2, 2).state_dict()
    path = tmp_path / "old.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert_equal(import_model(path), dict(state))


def test_safetensors_file_of_another_program_is_read(tmp_path):
    state = {"b": torch.arange(6).reshape(2, 3), "a": torch.tensor([0.5], dtype=torch.float16)}
    path = tmp_path / "other.safetensors"
    save_file(state, path)
    found = import_model(path)
    assert set(found) == {"a", "b"}
    assert torch.equal(found["b"], state["b"])
    assert found["a"].dtype == torch.float16


def test_safetensors_file_whose_header_size_looks_like_a_pickle_is_read(tmp_path):
    path = tmp_path / "unlucky.safetensors"
    for length in range(256):
        save_file({"a": torch.ones(2)}, path, metadata={"note": "x" * length})
        if path.read_bytes()[0] == 0x80:
            break
    assert path.read_bytes()[0] == 0x80
    assert import_model(path)["a"].tolist() == [1.0, 1.0]
    assert import_safetensors(path)["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("old", [False, True])
def test_where_safetensors_are_asked_for_a_file_of_torch_is_refused(tmp_path, old):
    path = tmp_path / "weights.safetensors"
    torch.save(nn.Linear(2, 2).state_dict(), path, _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is a PyTorch file; convert"):
        import_safetensors(path)


def test_names_that_share_memory_still_do_after_a_torch_file(tmp_path):
    path = tmp_path / "tied.pt"
    torch.save(Tied().state_dict(), path)
    model = import_model(path)
    assert model["first.weight"].data_ptr() == model["second.weight"].data_ptr()
    assert model.numel() == 9 + 3 + 3


def test_export_holds_a_tie_once_and_brings_it_back(tmp_path, tied):
    path = tmp_path / "out" / "tied.safetensors"
    export_model(tied, path)
    plain = load_file(path)
    assert set(plain) == {"first.weight", "first.bias", "second.bias"}
    assert torch.equal(plain["first.weight"], tied["first.weight"])
    with safetensors.safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["ties"]) == {"second.weight": "first.weight"}
    again = import_model(path)
    assert set(again) == set(tied)
    assert again["second.weight"].data_ptr() == again["first.weight"].data_ptr()
    assert torch.equal(again["second.weight"], tied["first.weight"])


def test_export_of_a_network_without_ties_is_a_plain_file(tmp_path):
    state = Tensors(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).state_dict())
    path = tmp_path / "plain.safetensors"
    export_model(state, path)
    found = load_file(path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in state.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).load_state_dict(found)
    assert os.listdir(tmp_path) == ["plain.safetensors"]  # noqa: PTH208


def test_export_copies_what_is_a_view_of_something_larger(tmp_path):
    large = torch.arange(10.0)
    path = tmp_path / "view.safetensors"
    export_model(Tensors({"a": large[2:4], "b": large.reshape(2, 5).T}), path)
    found = load_file(path)
    assert found["a"].tolist() == [2.0, 3.0]
    assert found["b"].tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]


def test_prefix_of_dataparallel_is_taken_off_and_said(tmp_path, caplog):
    network = nn.Linear(2, 1)
    path = tmp_path / "parallel.pt"
    torch.save({f"module.{name}": t for name, t in network.state_dict().items()}, path)
    with caplog.at_level(logging.WARNING):
        assert_equal(import_model(path), dict(network.state_dict()))
    assert caplog.records[0].getMessage().startswith(f"{path}: all 2 names carry 'module.'")


def test_prefix_that_only_some_names_carry_stays(tmp_path, caplog):
    path = tmp_path / "some.pt"
    torch.save({"module.weight": torch.ones(1), "bias": torch.ones(1)}, path)
    assert set(import_model(path)) == {"module.weight", "bias"}
    assert not caplog.records


@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.95])
def test_cut_file_is_damaged_in_one_sentence_that_names_it(tmp_path, kind, share):
    path = tmp_path / f"cut.{kind}"
    state = nn.Linear(30, 30).state_dict()
    if kind == "safetensors":
        export_model(Tensors(state), path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError) as caught:
        import_model(path)
    assert str(caught.value).startswith(f"{path} is damaged (cut short or overwritten); ")
    assert "PytorchStreamReader" not in str(caught.value)
    assert "\n" not in str(caught.value)


class Evil:
    def __reduce__(self):
        return (Path, ("/",))


@pytest.mark.parametrize("old", [False, True])
def test_file_that_could_run_code_is_refused_and_said_to_be(tmp_path, old):
    path = tmp_path / "evil.pt"
    torch.save({"model": Evil()}, path, _use_new_zipfile_serialization=not old)
    with pytest.raises(
        CheckpointError, match=r"evil\.pt holds more than tensors .* could run code"
    ):
        import_model(path)


def test_pickle_that_torch_did_not_write_is_refused(tmp_path):
    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps({"weight": [1.0]}))
    with pytest.raises(CheckpointError, match=r"plain\.pkl holds more than tensors"):
        import_model(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"epoch": 3, "weight": torch.ones(1)}, "'epoch' is a int where a tensor belongs"),
        ([torch.ones(1)], "holds no state dict"),
        ({}, "holds no state dict"),
        ({3: torch.ones(1)}, "3 is a Tensor where a tensor belongs"),
    ],
)
def test_file_without_a_state_dict_is_refused(tmp_path, content, words):
    path = tmp_path / "no.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError) as caught:
        import_model(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"absent\.pt: No such file"):
        import_model(tmp_path / "absent.pt")


def test_tie_to_a_tensor_that_is_not_there_is_damage(tmp_path):
    path = tmp_path / "bad.safetensors"
    save_file({"a": torch.ones(1)}, path, metadata={"ties": '{"b": "c"}'})
    with pytest.raises(CheckpointError, match=r"bad\.safetensors is damaged"):
        import_model(path)
