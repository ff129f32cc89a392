from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.payloads import Expected
from collegium.core.tensors import Tensors
from collegium.diagnostics.assessment.findings import Findings, find
from collegium.heterogeneity import proxy
from collegium.heterogeneity.survey import PARTS, SurveyQuestions

QUESTIONS = SurveyQuestions(("intensity_maxima", "label_volumes", "label_histogram", "embeddings"))
CLASSES = ("background", "gland")
EXPECTED = Expected(Tensors({}), find_parts(torch.nn.Module()), {})


def found(told: Any, summary: Any = "cases") -> Findings:
    return find(told, SurveyQuestions(QUESTIONS.parts, summary), CLASSES, seed=0)


def with_component(message: Message, direction: list[float]) -> Message:
    return Message({**message, "components": Tensors({"first": torch.tensor(direction)})})


def test_angles_are_those_between_and_within_the_sites_by_hand(
    replies: Callable[..., Any],
) -> None:
    """cos 60 within A; A and B are at right angles, and C at 45 degrees to both, whatever signs."""
    told = replies()
    for site, direction in (
        ("A", [0.5, 0.0, 0.0]),
        ("B", [0.0, 1.0, 0.0]),
        ("C", [-0.5, 0.5, 0.0]),
    ):
        told[site] = with_component(told[site], direction)
    told["D"] = with_component(told["D"], [])  # a table
    angles = found(told).angles
    assert angles is not None
    assert angles.sites == ["A", "B", "C"]
    np.testing.assert_allclose(angles.matrix, [[0, 90, 45], [90, 0, 45], [45, 45, 0]], atol=1e-9)
    assert angles.within == pytest.approx({"A": 60, "B": 0, "C": 45})


def test_there_are_no_angles_of_one_site_or_of_other_numbers_of_positions(
    replies: Callable[..., Any],
) -> None:
    told = replies()
    assert found(told).angles is None
    told["A"] = with_component(told["A"], [0.5] * 4)
    assert found(told).angles is None
    told["B"] = with_component(told["B"], [0.3] * 8)
    findings = found(told)
    assert findings.angles is None
    assert any("no angles between components" in note for note in findings.notes)


def quantile_distance(a: Any, b: Any) -> float:
    """For equally many cases the earth mover's distance is the mean gap of the sorted values."""
    return float(np.abs(np.subtract(sorted(a), sorted(b))).mean())


def test_distances_are_those_of_the_told_values(replies: Callable[..., Any]) -> None:
    told = replies(intensity={"D": 3.0}, label={"D": 400.0, "C": 100.0}, seen={"D": 2.0})
    findings = found(told)
    columns = {
        kind: {s: m[part]["columns"]["1"] for s, m in told.items()}
        for kind, part in (("intensity", "intensity_maxima"), ("label", "label_volumes"))
    }
    matrices = {
        kind: np.array([[quantile_distance(c[a], c[b]) for b in "ABCD"] for a in "ABCD"])
        for kind, c in columns.items()
    }
    spread = {kind: np.concatenate([*c.values()]).std() for kind, c in columns.items()}
    means = {s: m["embeddings"]["cases"].double().numpy().mean(0) for s, m in told.items()}
    expected = {
        "metadata": (matrices["intensity"] + matrices["label"]) / 2,
        "normalised": sum(matrices[kind] / spread[kind] for kind in matrices) / 2,
        "embeddings": np.array(
            [[np.linalg.norm(means[a] - means[b]) for b in "ABCD"] for a in "ABCD"]
        ),
    }
    assert [geometry.key for geometry in findings.geometries] == list(expected)
    for geometry in findings.geometries:
        np.testing.assert_allclose(geometry.matrix, expected[geometry.key], rtol=1e-6, atol=1e-9)
        assert geometry.most_distant == "D"
        assert geometry.stability["D"] > 0.9
        assert sum(geometry.stability.values()) == pytest.approx(1.0)
        assert geometry.neighbours == 2
    assert findings.geometries[0].made_of == "channel 1 and gland"
    assert findings.geometries[0].clusters["recommended"] == [["A", "B"], ["C", "D"]]
    np.testing.assert_allclose(findings.intensity[0].matrix, matrices["intensity"], atol=1e-9)
    assert findings.labels[0].unit == "mL"
    assert findings.cases == dict.fromkeys("ABCD", 14)
    assert findings.shares["A"] == {"background": 0.9, "gland": 0.1}
    assert not findings.notes


def test_the_network_joins_each_site_to_its_nearest(replies: Callable[..., Any]) -> None:
    geometry = found(replies(label={"A": 0, "B": 10, "C": 500, "D": 520})).geometries[0]
    order = np.argsort(geometry.matrix, axis=1)[:, 1:3]
    pairs = {tuple(sorted(("ABCD"[i], "ABCD"[j]))) for i, near in enumerate(order) for j in near}
    assert set(geometry.edges) == pairs


def test_a_classifier_tells_sites_apart_that_look_different(replies: Callable[..., Any]) -> None:
    told = replies(seen={"D": 4.0})
    findings = found(told)
    assert findings.proxy is not None
    assert findings.proxy["sites"] == list("ABCD")
    matrix = np.array(findings.proxy["matrix"])
    assert matrix[3, :3].min() > 1.8
    assert matrix[:3, :3].max() < 1.5
    rows = {s: m["embeddings"]["cases"].double().numpy() for s, m in told.items()}
    assert matrix[0, 3] == proxy.proxy_a_distance(rows["A"], rows["D"])


def test_each_kind_is_tested_and_the_p_values_are_adjusted(replies: Callable[..., Any]) -> None:
    findings = found(replies(label={"D": 300.0}))
    by_kind = {test.kind: test for test in findings.tests}
    assert [test.what for test in findings.tests] == [
        "the intensity of channel 1",
        "the amount of gland",
        "what a network sees",
    ]
    assert by_kind["label"].evidence.p == pytest.approx(1 / 3000)
    assert by_kind["label"].p_adjusted == pytest.approx(3 / 3000)
    assert by_kind["intensity"].p_adjusted > 0.05 < by_kind["embedding"].p_adjusted
    assert by_kind["label"].fewest == 14


def test_what_a_site_withholds_leaves_it_out_of_that_only(replies: Callable[..., Any]) -> None:
    told = replies()
    told["B"] = Message({k: v for k, v in told["B"].items() if k != "embeddings"})
    told["C"] = Message({k: v for k, v in told["C"].items() if k != "label_volumes"})
    findings = found(told)
    sites = {geometry.key: geometry.sites for geometry in findings.geometries}
    assert sites["embeddings"] == ["A", "C", "D"]
    assert sites["metadata"] == ["A", "B", "D"]
    assert list(findings.intensity[0].told) == list("ABCD")
    assert findings.geometries[0].clusters == {}


def test_a_site_without_cases_is_left_out(replies: Callable[..., Any]) -> None:
    told = replies()
    nothing = {"cases": 0, "unit": "voxels", "columns": {}}
    told["B"] = Message.of(
        intensity_maxima=nothing,
        label_volumes=nothing,
        label_histogram={},
        embeddings=Tensors({"cases": torch.zeros(0, 0)}),
    )
    findings = found(told)
    assert findings.cases["B"] == 0
    assert all(geometry.sites == ["A", "C", "D"] for geometry in findings.geometries)
    assert findings.notes == [
        "site 'B' has no training cases, so that nothing is known of how far it is from the "
        "others; add cases or leave the site out."
    ]
    assert "B" not in findings.shares


def test_sites_that_measure_differently_leave_the_labels_out(replies: Callable[..., Any]) -> None:
    told = replies()
    told["A"] = Message(
        {**told["A"], "label_volumes": {**told["A"]["label_volumes"], "unit": "voxels"}}
    )
    findings = found(told)
    assert findings.labels == []
    assert "different units" in findings.notes[0]
    assert findings.geometries[0].made_of == "channel 1"


def test_nothing_told_finds_nothing() -> None:
    findings = found({"A": Message.of(), "B": Message.of()})
    assert not findings.geometries
    assert not findings.tests
    assert findings.proxy is None
    assert findings.cases == {}


def test_two_sites_have_no_most_distant_one(replies: Callable[..., Any]) -> None:
    told = replies()
    findings = found({site: told[site] for site in "AB"})
    for geometry in findings.geometries:
        assert (geometry.most_distant, geometry.stability, geometry.clusters) == ("", {}, {})
        assert geometry.edges == [("A", "B")]


def test_summaries_give_distances_but_no_tests(replies: Callable[..., Any]) -> None:
    exact, told = found(replies(label={"D": 300.0})), replies(label={"D": 300.0})
    questions = SurveyQuestions(QUESTIONS.parts, "histogram")
    for site, message in told.items():
        parts = dict(message)
        for part in ("intensity_maxima", "label_volumes"):
            whole = message[part]
            columns = {name: questions.column(c) for name, c in whole["columns"].items()}
            parts[part] = {**whole, "columns": columns}
            PARTS[part].check(parts[part], EXPECTED)
        rows = message["embeddings"]["cases"]
        told[site] = Message({**parts, "embeddings": Tensors({"mean": rows.mean(0, keepdim=True)})})
    findings = found(told, "histogram")
    assert findings.tests == []
    assert findings.proxy is None
    for rough, fine in zip(findings.geometries, exact.geometries, strict=True):
        np.testing.assert_allclose(rough.matrix, fine.matrix, rtol=0.15, atol=0.1)
        assert rough.stability == {}
        assert rough.most_distant == fine.most_distant
