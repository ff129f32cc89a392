from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collegium.algorithms.distance import Distance
from collegium.algorithms.pfednet import PFedNet
from collegium.core.tensors import Tensors
from collegium.errors import CheckpointError
from collegium.evaluation.report.distances import read_method_distances
from collegium.runtime.state import Store
from collegium.testing.toy import ToyFederation, toy_site

MATRIX = [[0.0, 2.0, 5.0], [2.0, 0.0, 4.0], [5.0, 4.0, 0.0]]
OTHER = [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]


def graph(matrix: Any = MATRIX) -> dict[str, Any]:
    return {"clients": ["A", "B", "C"], "distances": matrix, "edges": [["A", "B"], ["B", "C"]]}


def save(job: Path, **state: Any) -> None:
    model = Tensors({"w": torch.ones(3)})
    Store(job / "server").save("000003", {"model": model, **state})


def test_of_a_run_of_pfednet_the_graph_is_read(tmp_path: Path) -> None:
    ToyFederation(PFedNet(k=1, sketch_items=64), tmp_path / "pfednet" / "seed-0").run(1)
    ((name, (related,)),) = read_method_distances(tmp_path).items()
    (relation,) = related.distances
    assert (name, related.title, related.seeds) == ("pFedNet", "seed 0", [0])
    means = [
        np.mean([site.train.example(i).batch["image"].numpy() for i in range(len(site.train))], 0)
        for site in map(toy_site, "ABC")
    ]
    expected = np.array([[np.abs(a - b).sum() for b in means] for a in means])
    np.testing.assert_allclose(relation.matrix, expected, rtol=1e-5)
    near = [min((expected[i, j], j) for j in range(3) if j != i)[1] for i in range(3)]
    pairs = {tuple(sorted(("ABC"[i], "ABC"[j]))) for i, j in enumerate(near)}
    assert {tuple(edge) for edge in relation.edges} == pairs
    assert (relation.most_distant, relation.factors) == ("", {})


def test_of_a_run_by_distance_the_matrix_and_the_weight_are_read(tmp_path: Path) -> None:
    federation = ToyFederation(Distance(omega=0.25), tmp_path / "far" / "seed-1").run(1)
    ((name, (related,)),) = read_method_distances(tmp_path).items()
    (relation,) = related.distances
    assert (name, related.title) == ("far", "seed 1")
    assert relation.matrix == federation.server.state["distance"]["matrix"]
    farthest = "ABC"[int(np.sum(relation.matrix, 0).argmax())]
    assert relation.most_distant == farthest
    assert relation.factors == {farthest: 0.25}
    assert relation.edges == []


def test_clusters_are_read_and_the_graph_of_each(tmp_path: Path) -> None:
    halves = [["A", "B"], ["C", "D"]]
    wide = (np.ones((4, 4)) - np.eye(4)).tolist()
    distance = {"sites": list("ABCD"), "matrix": wide, "most_distant": "C", "clusters": halves}
    parts = [
        {"graph": {"clients": half, "distances": [[0.0, 3.0], [3.0, 0.0]], "edges": [half]}}
        for half in halves
    ]
    save(tmp_path / "pfednet+distance" / "seed-0", distance=distance, clusters=parts)
    ((related,),) = read_method_distances(tmp_path).values()
    whole, *each = related.distances
    assert whole.geometry["clusters"] == {"recommended": halves}
    assert (whole.most_distant, whole.factors) == ("C", {})
    assert [(part.sites, part.edges) for part in each] == [(half, [half]) for half in halves]


def test_jobs_with_the_same_distances_are_one_and_folds_stay_apart(tmp_path: Path) -> None:
    for site in ("Oslo", "Quito"):
        for seed in (0, 1, 2, 10):
            save(tmp_path / f"without-{site}" / "mine" / f"seed-{seed}", graph=graph())
    save(tmp_path / "without-Quito" / "mine" / "seed-1", graph=graph(OTHER))
    save(tmp_path / "without-Quito" / "first" / "seed-0", graph=graph(OTHER))
    save(tmp_path / "without-Quito" / "fedavg" / "seed-0")
    found = read_method_distances(tmp_path, order=("first", "fedavg", "mine"))
    assert {name: [one.title for one in related] for name, related in found.items()} == {
        "first": ["without Quito, seed 0"],
        "mine": [
            "without Oslo, seeds 0, 1, 2 and 10", "without Quito, seeds 0, 2 and 10",
            "without Quito, seed 1",
        ],
    }  # fmt: skip
    assert list(found) == ["first", "mine"]
    assert found["mine"][2].distances[0].matrix == OTHER


def test_of_a_sweep_the_setting_is_read_and_of_a_server_the_newest_state(tmp_path: Path) -> None:
    for setting, matrix in (("k-1", MATRIX), ("k-2", OTHER)):
        save(tmp_path / setting / "mine" / "seed-0", graph=graph(matrix))
    Store(tmp_path / "k-2" / "mine" / "seed-0" / "server").save("000002", {"graph": graph()})
    ((related,),) = read_method_distances(tmp_path, "k-2").values()
    assert related.distances[0].matrix == OTHER
    assert read_method_distances(tmp_path) == {}


def test_what_other_methods_call_by_the_same_names_is_passed_over(tmp_path: Path) -> None:
    others = (
        3.0,
        {"sites": 2},
        {"sites": ["A"], "matrix": MATRIX},
        {"sites": ["A"], "matrix": "x"},
    )
    for number, other in enumerate(others):
        save(tmp_path / "mine" / f"seed-{number}", distance=other, graph=None, clusters=[3])
    save(tmp_path / "mine" / "seed-9", clusters="ABC")
    assert read_method_distances(tmp_path) == {}
    save(tmp_path / "mine" / "seed-9", graph={**graph(), "edges": [["0", "1"], ["B", "C"]]})
    ((related,),) = read_method_distances(tmp_path).values()
    assert related.distances[0].edges == [["B", "C"]]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    save(tmp_path / "mine" / "seed-0", graph=graph())
    path = tmp_path / "mine" / "seed-0" / "server" / "000003.state"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"000003\.state is damaged .*restore it from a copy"):
        read_method_distances(tmp_path)
