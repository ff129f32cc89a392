from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from collegium.core.dataset import Example, TensorDataset
from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.payloads import Expected
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DataError, ProtocolError
from collegium.heterogeneity.embeddings import embed_cases, make_encoder
from collegium.heterogeneity.survey import (
    PARTS,
    CaseStatistics,
    SurveyQuestions,
    site_statistics,
    voxel_size,
)
from collegium.heterogeneity.survey_distances import gather_statistics, sketch_vectors


class Cases(TensorDataset):
    """Cases with a spacing of their own each."""

    def __init__(self, inputs: Any, spacings: Any) -> None:
        super().__init__(inputs)
        object.__setattr__(self, "spacings", spacings)

    def example(self, index: int) -> Example:
        found = super().example(index)
        return Example(found.case, found.patient, found.batch, self.spacings[index])  # type: ignore[attr-defined]


def two_cases(**changes: Any) -> dict[str, torch.Tensor]:
    image = torch.zeros(2, 2, 3, 4)
    image[0, 0, 1, 1], image[0, 1, 0, 0] = 5.0, -1.0
    image[1, 0], image[1, 1, 2, 3] = -2.0, 7.0
    label = torch.zeros(2, 3, 4, dtype=torch.int64)
    label[0, :2] = 1
    label[1, 0, 0] = 2
    return {"image": image, "label": label, **changes}


def client(data: Any, name: str = "A") -> Any:
    return SimpleNamespace(
        id=name, examples=data, rng=lambda purpose: generator(3, "client", name, purpose)
    )


def replies_of(questions: SurveyQuestions, **sites: Any) -> dict[str, Message]:
    return {
        name: Message(site_statistics(client(data, name), questions))
        for name, data in sites.items()
    }


METADATA = SurveyQuestions(("intensity_maxima", "label_volumes"))


def test_statistics_are_the_largest_intensity_and_the_volume_of_each_label_of_every_case() -> None:
    reply = site_statistics(client(TensorDataset(two_cases())), METADATA)
    assert reply["intensity_maxima"] == {
        "unit": "intensity",
        "cases": 2,
        "columns": {"1": [-2.0, 5.0], "2": [0.0, 7.0]},
    }
    assert reply["label_volumes"] == {
        "unit": "voxels",
        "cases": 2,
        "columns": {"1": [0.0, 8.0], "2": [0.0, 1.0]},
    }


def test_outside_the_field_of_view_nothing_counts() -> None:
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    mask[0, 0], mask[1, 0] = True, True
    reply = site_statistics(client(TensorDataset(two_cases(mask=mask))), METADATA)
    assert reply["intensity_maxima"]["columns"] == {"1": [-2.0, 0.0], "2": [0.0, 0.0]}
    assert reply["label_volumes"]["columns"] == {"1": [0.0, 4.0], "2": [0.0, 1.0]}


def test_a_case_whose_field_of_view_is_empty_is_read_whole() -> None:
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    found = CaseStatistics.of(TensorDataset(two_cases(mask=mask)), "physical")
    assert found.maxima == {"1": [5.0, -2.0], "2": [0.0, 7.0]}


@pytest.mark.parametrize(
    ("spacing", "units", "expected"),
    [
        ((0.5, 2.0), "physical", ("mm2", 1.0)),
        ((3.0, 0.5, 2.0), "physical", ("mL", 0.003)),
        ((3.0, 0.5, 2.0), "voxels", ("voxels", 1.0)),
        (None, "physical", ("voxels", 1.0)),
    ],
)
def test_voxels_are_measured_where_their_spacing_is_known(
    spacing: Any, units: Any, expected: Any
) -> None:
    assert voxel_size(spacing, units) == pytest.approx(expected)


def test_the_slices_of_a_volume_are_one_case() -> None:
    class Volume(TensorDataset):
        def __len__(self) -> int:
            return 1

        def example(self, index: int) -> Example:
            return Example("v", "p", self.inputs, (5.0, 1.0, 2.0))

    found = CaseStatistics.of(Volume(two_cases()), "physical")
    assert found.maxima == {"1": [5.0], "2": [7.0]}
    assert found.unit == "mL"
    assert found.volumes == {"1": [pytest.approx(0.08)], "2": [pytest.approx(0.01)]}


def test_spacings_that_only_some_cases_have_are_an_error_at_the_site() -> None:
    data = Cases(two_cases(), [(1.0, 1.0), None])
    with pytest.raises(DataError, match="measured in voxels, cases before it in mm2"):
        CaseStatistics.of(data, "physical")
    assert CaseStatistics.of(data, "voxels").unit == "voxels"


def test_nan_intensities_are_an_error_at_the_site() -> None:
    inputs = two_cases()
    inputs["image"][1, 1, 0, 0] = float("nan")
    with pytest.raises(DataError, match="channel 2 holds NaN"):
        CaseStatistics.of(TensorDataset(inputs), "physical")


def test_shares_of_labels_count_the_background_and_sum_to_one() -> None:
    reply = site_statistics(
        client(TensorDataset(two_cases())), SurveyQuestions(("label_histogram",))
    )
    assert reply["label_histogram"] == pytest.approx({"0": 15 / 24, "1": 8 / 24, "2": 1 / 24})


def test_labels_that_are_no_classes_have_no_volume() -> None:
    data = TensorDataset({"image": torch.rand(3, 2), "label": torch.rand(3, 1)})
    reply = site_statistics(client(data), METADATA)
    assert reply["label_volumes"] == {"unit": "voxels", "cases": 3, "columns": {}}
    assert len(reply["intensity_maxima"]["columns"]["2"]) == 3


def test_mean_image_and_second_moment_are_those_of_numpy() -> None:
    data = TensorDataset(two_cases())
    questions = SurveyQuestions(("mean_image", "second_moment"), size=3)
    reply = site_statistics(client(data), questions)
    image = data.inputs["image"].numpy().astype(float)
    small = np.stack(
        [image[..., :2].mean(-1), image[..., 1:3].mean(-1), image[..., 2:].mean(-1)], -1
    )
    np.testing.assert_allclose(reply["mean_image"]["mean"].numpy(), small.mean(0), rtol=1e-6)
    rows = small.reshape(4, 9) - small.mean()
    np.testing.assert_allclose(
        reply["second_moment"]["moment"].numpy(), rows.T @ rows / 4, rtol=1e-5, atol=1e-6
    )


def test_a_sketch_is_made_from_a_few_cases_that_the_generator_names() -> None:
    image = torch.arange(40, dtype=torch.float32)[:, None]
    data = TensorDataset({"image": image, "label": torch.zeros(40)})
    first, again, other = (
        site_statistics(client(data, name), SurveyQuestions(("mean_image",), items=4))[
            "mean_image"
        ]["mean"]
        for name in ("A", "A", "B")
    )
    drawn = torch.randperm(40, generator=generator(3, "client", "A", "mean_image"))[:4]
    assert first.item() == image[drawn].mean().item() == again.item() != other.item()


def test_a_site_without_cases_cannot_make_a_sketch() -> None:
    data = TensorDataset({"image": torch.zeros(0, 1), "label": torch.zeros(0)})
    with pytest.raises(ProtocolError, match="site 'A' has no training cases"):
        site_statistics(client(data), SurveyQuestions(("mean_image",)))


def test_every_part_meets_its_schema() -> None:
    reply = site_statistics(
        client(TensorDataset(two_cases())), SurveyQuestions(tuple(PARTS), grid=16)
    )
    assert reply.keys() == PARTS.keys()
    expected = Expected(Tensors({}), find_parts(torch.nn.Module()), {}, cases=2)
    for name, part in PARTS.items():
        part.check(reply[name], expected)
    fewer = replace(expected, cases=1)
    for name in ("intensity_maxima", "label_volumes", "embeddings"):
        with pytest.raises(ProtocolError, match="and the site has 1 cases"):
            PARTS[name].check(reply[name], fewer)


def test_embeddings_leave_in_another_order_or_as_their_mean() -> None:
    data = TensorDataset({"image": torch.rand(5, 1, 8, 8), "label": torch.zeros(5)})
    rows = site_statistics(client(data), SurveyQuestions(("embeddings",), grid=16))["embeddings"][
        "cases"
    ]
    alone = [
        site_statistics(
            client(TensorDataset({key: value[i : i + 1] for key, value in data.inputs.items()})),
            SurveyQuestions(("embeddings",), grid=16),
        )["embeddings"]["cases"][0]
        for i in range(5)
    ]
    order = torch.randperm(5, generator=generator(3, "client", "A", "embeddings"))
    assert order.tolist() != list(range(5))
    torch.testing.assert_close(rows, torch.stack(alone)[order])
    mean = site_statistics(client(data), SurveyQuestions(("embeddings",), "histogram", grid=16))[
        "embeddings"
    ]
    assert list(mean) == ["mean"]
    torch.testing.assert_close(mean["mean"], rows.mean(0, keepdim=True))


def test_a_label_that_a_site_does_not_have_counts_nothing_there() -> None:
    plain = two_cases(label=torch.ones(2, 3, 4, dtype=torch.int64))
    replies = replies_of(METADATA, A=TensorDataset(two_cases()), B=TensorDataset(plain))
    table = gather_statistics(replies.items(), "label_volumes", METADATA)
    assert table.unit == "voxels"
    assert table.cases == {"A": 2, "B": 2}
    assert table.columns == {
        "1": {"A": [0.0, 8.0], "B": [12.0, 12.0]},
        "2": {"A": [0.0, 1.0], "B": [0.0, 0.0]},
    }


def test_sites_that_do_not_fit_each_other_are_named() -> None:
    empty = TensorDataset({key: value[:0] for key, value in two_cases().items()})
    replies = replies_of(METADATA, A=TensorDataset(two_cases()), B=empty)
    with pytest.raises(DataError, match="site 'B' has no training cases"):
        gather_statistics(replies.items(), "intensity_maxima", METADATA)
    measured = Cases(two_cases(), [(1.0, 1.0)] * 2)
    replies = replies_of(METADATA, A=TensorDataset(two_cases()), B=measured)
    with pytest.raises(ProtocolError, match=r"different units \(A in voxels, B in mm2\)"):
        gather_statistics(replies.items(), "label_volumes", METADATA)
    grey = TensorDataset(two_cases(image=torch.zeros(2, 1, 3, 4)))
    replies = replies_of(METADATA, A=TensorDataset(two_cases()), B=grey)
    with pytest.raises(DataError, match="site 'B' have no channel 2"):
        gather_statistics(replies.items(), "intensity_maxima", METADATA)


def test_sketches_become_vectors_of_one_length() -> None:
    replies = [
        (
            "A",
            Message.of(mean_image=Tensors({"mean": torch.ones(2, 2)}), label_histogram={"0": 1.0}),
        ),
        (
            "B",
            Message.of(mean_image=Tensors({"mean": torch.zeros(2, 2)}), label_histogram={"3": 1.0}),
        ),
    ]
    found = sketch_vectors(replies, "mean_image")
    assert {name: vector.tolist() for name, vector in found.items()} == {
        "A": [1.0] * 4,
        "B": [0.0] * 4,
    }
    labels = sketch_vectors(replies, "label_histogram")
    assert {name: vector.tolist() for name, vector in labels.items()} == {
        "A": [1.0, 0.0],
        "B": [0.0, 1.0],
    }
    replies[1] = ("B", Message.of(mean_image=Tensors({"mean": torch.zeros(3)})))
    with pytest.raises(ProtocolError, match=r"different sizes \(A 4, B 3\)"):
        sketch_vectors(replies, "mean_image")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": ("pixels",)}, "knows no 'pixels'"),
        ({"parts": (), "summary": "all"}, "summary is 'all'; choose one of cases, histogram"),
        ({"parts": (), "units": "litres"}, "units is 'litres'"),
        ({"parts": (), "grid": 0}, "grid is 0; choose at least 1"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SurveyQuestions(**options)


def test_a_network_of_the_users_own_embeds(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def encoder():\n"
        "    layer = torch.nn.Conv2d(1, 2, 1, bias=False)\n"
        "    layer.weight.data = torch.tensor([3.0, -1.0]).reshape(2, 1, 1, 1)\n"
        "    return layer\n"
    )
    image = torch.rand(3, 1, 4, 4, dtype=torch.float32)
    data = TensorDataset({"image": image, "label": torch.zeros(3)})
    rows = embed_cases(data, make_encoder(f"{file}:encoder"), 4).numpy()
    for row, flat in zip(rows, image.reshape(3, 16).double().numpy(), strict=True):
        half = 2 * float(np.linalg.norm(flat))  # two channels differ by four times the image
        np.testing.assert_allclose(np.abs(row), [half, 0.0, half, 0.0], atol=1e-4)
        assert row[0] == pytest.approx(-row[2], abs=1e-4)


def test_a_volume_is_embedded_whole_though_it_is_trained_on_in_slices() -> None:
    volume = torch.rand(1, 1, 6, 8, 8)

    class Sliced(TensorDataset):
        def __len__(self) -> int:
            return 1

        def example(self, index: int) -> Example:
            return Example("v", "p", {"image": volume[0].movedim(1, 0)}, (3.0, 1.0, 1.0))

    sliced = embed_cases(Sliced({}), make_encoder(""), 8)
    whole = embed_cases(
        TensorDataset({"image": volume, "label": torch.zeros(1)}), make_encoder(""), 8
    )
    torch.testing.assert_close(sliced, whole)


def test_a_network_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"encoder: .*nowhere\.py cannot be read"):
        make_encoder("nowhere.py:encoder")
