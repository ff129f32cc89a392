import numpy as np
import pytest

from collegium.evaluation.pairs import pair_scores

NAN = float("nan")


def test_a_vector_is_one_training():
    pair = pair_scores([0.5, 0.7], [[0.4, 0.5], [0.6, 0.7]])
    assert pair.trainings == (1, 2)
    assert pair.differences == pytest.approx([0.05, 0.05])
    assert (pair.count, pair.undefined) == (2, 0)


def test_a_case_that_is_undefined_in_any_training_of_either_arm_is_left_out_and_counted():
    joined = [[0.5, 0.6], [NAN, 0.6], [0.5, 0.7], [0.8, 0.8]]
    alone = [[0.4, 0.4], [0.5, 0.6], [0.5, np.inf], [0.6, 0.6]]
    pair = pair_scores(joined, alone, ["a", "b", "c", "d"])
    assert (pair.count, pair.undefined) == (2, 2)
    assert pair.differences == pytest.approx([0.15, 0.2])


def test_cases_of_a_patient_are_averaged_in_each_training():
    pair = pair_scores([[1, 3], [5, 7], [0, 0]], [[0, 0], [0, 2], [1, 1]], ["b", "b", "a"])
    rows = pair.by_patient()
    assert rows.joined.tolist() == [[0, 0], [3, 5]]
    assert rows.reference.tolist() == [[1, 1], [0, 1]]
    assert rows.by_patient().joined.tolist() == rows.joined.tolist()


def test_cases_of_a_patient_are_averaged_by_class():
    rows = pair_scores([1, 0, 1, 1], [0] * 4, ["a"] * 4, labels=[0, 0, 1, 1]).by_patient()
    assert rows.joined.tolist() == [[0.5], [1.0]]
    assert rows.labels.tolist() == [0, 1]
    assert rows.count == 1


def test_some_cases_keep_their_patients_and_number_them_anew():
    pair = pair_scores([1, 2, 3], [0, 0, 0], ["a", "b", "c"], labels=[0, 1, 1])
    some = pair.where(pair.labels == 1)
    assert (some.count, some.patients.tolist(), some.joined.ravel().tolist()) == (2, [0, 1], [2, 3])


def test_of_the_same_trainings_the_differences_are_one_arm():
    pair = pair_scores([[2.0, 5.0]], [[1.0, 3.0]], same_trainings=True)
    assert [values.tolist() for values in pair.independent] == [[[1.0, 2.0]]]
    assert len(pair_scores([[2.0]], [[1.0]]).independent) == 2


def test_arms_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="the same cases"):
        pair_scores([0.5, 0.6], [0.5])
    with pytest.raises(ValueError, match="the same cases"):
        pair_scores([0.5, 0.6], [0.5, 0.6], ["a"])
    with pytest.raises(ValueError, match="at least one training"):
        pair_scores(np.zeros((3, 0)), [0.5] * 3)
    with pytest.raises(ValueError, match="equally many"):
        pair_scores(np.zeros((3, 2)), [0.5] * 3, same_trainings=True)


def test_no_case_at_all_is_a_pair_without_patients():
    pair = pair_scores([], [])
    assert (pair.count, pair.undefined, pair.by_patient().count) == (0, 0, 0)
