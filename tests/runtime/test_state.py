import pytest
import torch

from collegium.core.message import MARK, pack
from collegium.core.tensors import Tensors
from collegium.errors import CheckpointError, StorageError
from collegium.runtime.state import Store


def test_store_brings_back_what_was_saved(tmp_path):
    store = Store(tmp_path)
    store.save("000001", {"model": Tensors({"w": torch.arange(3)}), "n": 3})
    found = store.load("000001")
    assert found["n"] == 3
    assert found["model"]["w"].tolist() == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["000001.state"]


def test_newest_is_the_last_name_before(tmp_path):
    store = Store(tmp_path)
    assert store.newest("9") is None
    for name in ("000001-0000", "000001-0001", "000002-0000"):
        store.save(name, None)
    assert store.newest("000002-0000") == "000001-0001"
    assert store.newest("000001-0000") is None
    assert store.newest("000002-~") == "000002-0000"


def test_prune_keeps_the_newest_before_and_all_later(tmp_path):
    store = Store(tmp_path)
    for number in range(5):
        store.save(f"{number}", number)
    store.prune("0")
    assert store.names() == ["0", "1", "2", "3", "4"]
    store.prune("3")
    assert store.names() == ["2", "3", "4"]


def test_remove_forgets_also_what_is_not_there(tmp_path):
    store = Store(tmp_path)
    store.save("1", 1)
    store.remove("1")
    store.remove("1")
    assert store.names() == []


def test_clean_removes_what_a_killed_write_left_and_no_state(tmp_path):
    store = Store(tmp_path)
    store.save("1", 1)
    (tmp_path / "2.state.123.tmp").write_bytes(b"half")
    assert Store(tmp_path).names() == ["1"]
    assert (tmp_path / "2.state.123.tmp").exists()  # perhaps another process is writing it
    store.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["1.state"]


def test_damaged_state_is_named(tmp_path):
    store = Store(tmp_path)
    data = pack({"model": Tensors({"w": torch.ones(100)})})
    store.write("000003", data[:-1])
    with pytest.raises(CheckpointError) as caught:
        store.load("000003")
    assert str(caught.value).startswith(f"{tmp_path / '000003.state'} is damaged (cut short")


def test_the_outline_of_a_state_is_all_of_it_but_the_tensors(tmp_path):
    store = Store(tmp_path)
    store.save("1", {"deep": [{"w": Tensors({"a": torch.ones(5)})}, 0.1], "none": None})
    assert store.outline("1") == {"deep": [{"w": {MARK: [["a", 0]]}}, 0.1], "none": None}
    store.write("2", pack({"model": Tensors({"w": torch.ones(100)})})[:-1])
    with pytest.raises(CheckpointError, match=r"2\.state is damaged \(cut short"):
        store.outline("2")
    with pytest.raises(StorageError, match=r"7\.state: No such file"):
        store.outline("7")


def test_absent_state_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"7\.state: No such file"):
        Store(tmp_path).load("7")


def test_newest_whole_state_under_a_number_is_found(tmp_path, caplog):
    store = Store(tmp_path)
    assert store.load_newest() is None
    for number in range(3):
        store.save(f"{number:06d}", number)
    store.save("best", "not a number")
    assert store.load_newest() == ("000002", 2)
    store.path("000002").write_bytes(b"half")
    assert store.load_newest() == ("000001", 1)
    assert "continuing from the state before it" in caplog.text
    assert store.names() == ["000000", "000001", "best"]


def test_damage_of_every_state_is_an_error(tmp_path):
    store = Store(tmp_path)
    store.write("000001", b"half")
    with pytest.raises(
        CheckpointError, match=f"no undamaged state is left in {tmp_path}; start the"
    ):
        store.load_newest()
