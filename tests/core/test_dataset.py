"""What datasets in memory and joined datasets hand out."""

import pytest
import torch

from collegium.core.dataset import ConcatDataset, TensorDataset, UnlabelledDataset, join
from collegium.core.randomness import generator
from collegium.errors import DataError


def three(start: int) -> TensorDataset:
    values = torch.arange(start, start + 3)
    return TensorDataset({"image": values.float()[:, None], "label": values}, ["p", "p", "q"])


def rngs(count: int) -> list[torch.Generator]:
    return [generator(0, "test", index) for index in range(count)]


def test_a_tensor_dataset_gives_cases_in_the_order_asked_for():
    batch = three(10).batch([2, 0], rngs(2))
    assert batch["label"].tolist() == [12, 10]
    assert batch["image"].tolist() == [[12.0], [10.0]]


def test_an_example_is_a_batch_of_one_with_its_ids():
    example = three(10).example(1)
    assert (example.case, example.patient, example.spacing) == ("1", "p", None)
    assert example.batch["label"].tolist() == [11]


def test_each_case_is_its_own_patient_where_none_are_named():
    assert TensorDataset({"image": torch.zeros(2, 1)}).example(1).patient == "1"


def test_inputs_of_different_length_are_refused():
    with pytest.raises(DataError, match=r"'image': 2, 'label': 3"):
        TensorDataset({"image": torch.zeros(2, 1), "label": torch.zeros(3)})


def test_a_dataset_without_inputs_is_empty():
    assert len(TensorDataset({})) == 0
    assert len(ConcatDataset([])) == 0


def test_joined_datasets_count_on_after_each_other():
    both = ConcatDataset([three(0), TensorDataset({}), three(100)])
    assert len(both) == 6
    assert both.batch([5, 0, 3], rngs(3))["label"].tolist() == [102, 0, 100]
    assert both.example(4).batch["label"].tolist() == [101]


@pytest.mark.parametrize("index", [-1, 6])
def test_a_case_beyond_the_joined_datasets_is_an_error(index):
    with pytest.raises(IndexError, match=f"no case {index} in 6"):
        ConcatDataset([three(0), three(1)]).example(index)


def test_a_sample_without_a_mask_counts_everywhere_beside_one_with_a_mask():
    bare = {"image": torch.zeros(1, 1, 2, 2)}
    masked = {**bare, "mask": torch.tensor([[[True, False], [False, False]]])}
    joined = join([bare, masked])
    assert joined["mask"].flatten(1).tolist() == [[True] * 4, [True, False, False, False]]


def test_different_shapes_do_not_fit_into_a_batch():
    small, large = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 3)
    with pytest.raises(DataError, match=r"\(1, 2, 2\), \(1, 2, 3\).*sampling.crop or image.size"):
        join([{"image": small}, {"image": large}])


def test_an_unlabelled_dataset_has_the_cases_of_another_without_their_labels():
    data = three(5)
    bare = UnlabelledDataset(data)
    assert len(bare) == 3
    batch = bare.batch([2, 0], [generator(0, "a"), generator(0, "b")])
    assert {key: value.tolist() for key, value in batch.items()} == {"image": [[7.0], [5.0]]}
    example = bare.example(1)
    assert (example.case, example.patient, [*example.batch]) == ("1", "p", ["image"])
    assert "label" in data.example(1).batch
