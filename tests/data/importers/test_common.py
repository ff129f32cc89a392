"""What importers share."""

from pathlib import Path

import pytest

from collegium.data.importers.common import unique_ids, visible_entries


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        (["x/a.png", "y/b.nii.gz"], ["a", "b"]),
        (["x/a.png", "y/a.png"], ["x_a", "y_a"]),
        (["r/x/i/a.png", "r/y/i/a.png"], ["x_i_a", "y_i_a"]),
    ],
)
def test_ids_take_as_many_folders_as_tell_them_apart(files: list[str], ids: list[str]) -> None:
    assert unique_ids([Path("/r", file) for file in files]) == ids


def test_hidden_files_are_not_visible_nor_is_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for name in (".DS_Store", "b", "a"):
        (tmp_path / name).touch()
    assert [path.name for path in visible_entries(tmp_path)] == ["a", "b"]
    assert visible_entries(tmp_path / "no") == []
