from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collegium.algorithms import distance
from collegium.algorithms.distance import Distance
from collegium.algorithms.ditto import Ditto
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.fedprox import FedProx
from collegium.algorithms.ifca import IFCA
from collegium.algorithms.pooled import Pooled
from collegium.algorithms.scaffold import Scaffold
from collegium.core.algorithm import Replies
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.tensors import Tensors
from collegium.data.site import EgressPolicy, Site
from collegium.errors import ConfigError, DataError, EgressError, ProtocolError
from collegium.experiment.config.experiment import load_config
from collegium.experiment.config.registry import ALGORITHMS
from collegium.experiment.runner import run_experiment
from collegium.heterogeneity.survey import SurveyQuestions
from collegium.heterogeneity.survey_distances import embedding_distances, metadata_distances
from collegium.runtime.participation import SKIPPING
from collegium.runtime.simulation import simulate
from collegium.runtime.state import Store
from collegium.testing import statements, toy
from collegium.testing.conformance import Conformance, check_algorithm, conformance_checks

ROUNDS = 3
on: Any = distance.on
METADATA = SurveyQuestions(("intensity_maxima", "label_volumes"))


def wasserstein(a: Any, b: Any) -> float:
    """The area between the quantile functions of two samples."""
    steps = np.union1d(np.arange(len(a) + 1) / len(a), np.arange(len(b) + 1) / len(b))
    middle = (steps[1:] + steps[:-1]) / 2
    first = np.sort(a)[(middle * len(a)).astype(int)]
    second = np.sort(b)[(middle * len(b)).astype(int)]
    return float((np.diff(steps) * abs(first - second)).sum())


def matrix_by_hand(data: Mapping[str, Any]) -> Any:
    """The matrix of the channel with the largest mean distance; there are no labels."""
    samples = [entry.x for entry in data.values()]
    matrices = [
        np.array([[wasserstein(a[:, c], b[:, c]) for b in samples] for a in samples])
        for c in range(3)
    ]
    return max(matrices, key=np.sum)


def apart(federation: Any, by_hand: Any) -> list[Site]:
    """Five sites: C far from all, and B nearest to it."""
    rng = np.random.default_rng(8)
    for name, size, shift in (("A", 5, 0), ("B", 8, 9), ("C", 11, 30), ("D", 6, 0), ("E", 7, 2)):
        x = rng.normal(shift, 1.0, (size, 3))
        federation.data[name] = by_hand.Data(x, x @ np.array([[1.0], [-1.0], [0.5]]))
        federation.validation[name] = by_hand.Data(x[:4], federation.data[name].y[:4] + 0.1)

    def dataset(data: Any) -> TensorDataset:
        return TensorDataset({"image": torch.tensor(data.x), "label": torch.tensor(data.y)})

    parts = {n: (dataset(federation.data[n]), dataset(federation.validation[n])) for n in "ABCDE"}
    return [Site(name, train, held_out, held_out) for name, (train, held_out) in parts.items()]


@pytest.mark.parametrize("omega", [0.1, 0.3, 0.5])
def test_the_most_distant_site_has_less_say(federation: Any, by_hand: Any, omega: float) -> None:
    outcome = federation.run(Distance(omega=omega), rounds=ROUNDS)
    matrix = matrix_by_hand(federation.data)
    farthest = federation.names[int(matrix.sum(1).argmax())]
    weights = [n * (omega if name == farthest else 1.0) for name, n in federation.sizes.items()]
    model = federation.initial()
    for t in range(1, ROUNDS + 1):
        trained = [
            by_hand.train(model, data, federation.batches(name, t), 0.1 * 0.8 ** (t - 1))[0]
            for name, data in federation.data.items()
        ]
        model = by_hand.average(trained, weights)
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")
    found = outcome.server[ROUNDS]["distance"]
    assert found["sites"] == list(federation.names)
    np.testing.assert_allclose(found["matrix"], matrix, rtol=1e-6)
    assert found["most_distant"] == farthest
    by_hand.assert_same(outcome.deployed["global"], model)


def test_weights_are_those_of_the_golden_case(golden: Callable[[str], dict[str, Any]]) -> None:
    case = golden("fedavg_w_weights")
    n, omega = case["inputs"]["n"], case["inputs"]["omega"]
    for weight, expected in (("n", "weights"), (None, "unweighted")):
        messages = (
            (name, Message.of(model=Tensors({"w": torch.eye(4, dtype=torch.float64)[i]}), n=n[i]))
            for i, name in enumerate("ABCD")
        )
        replies = Replies(messages, dict(zip("ABCD", omega, strict=True)))
        found = replies.mean("model", weight)["w"].numpy()
        np.testing.assert_allclose(found, case["expected"][expected], atol=case["atol"])
        assert found.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "options", [{"omega": 1.0}, {"omega": 1.0, "kind": "embedding"}, {"omega": 1.0, "bins": 4}]
)
def test_where_all_weigh_alike_the_model_is_that_of_fedavg_bit_by_bit(
    federation: Any, options: Any
) -> None:
    found, plain = federation.run(Distance(**options)), federation.run(FedAvg())
    for t in range(1, ROUNDS + 1):
        for name, tensor in plain.server[t]["model"].items():
            assert found.server[t]["model"][name].equal(tensor), f"round {t}, {name}"


@pytest.mark.parametrize("method", [FedProx, Scaffold])
def test_another_method_with_omega_1_is_the_method_bit_by_bit(
    federation: Any, method: type
) -> None:
    found = federation.run(on(method)(omega=1.0))
    plain = federation.run(method())
    for name, tensor in plain.server[ROUNDS]["model"].items():
        assert found.server[ROUNDS]["model"][name].equal(tensor), name


def test_a_method_that_weighs_all_alike_weighs_by_omega(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(on(FedAvg)(omega=0.3, weighting="uniform"), rounds=1)
    farthest = outcome.server[1]["distance"]["most_distant"]
    trained = [
        by_hand.train(federation.initial(), data, federation.batches(name, 1), 0.1)[0]
        for name, data in federation.data.items()
    ]
    weights = [0.3 if name == farthest else 1.0 for name in federation.names]
    by_hand.assert_same(outcome.server[1]["model"], by_hand.average(trained, weights))


def test_clusters_train_apart_and_are_the_personal_models(federation: Any, by_hand: Any) -> None:
    sites = apart(federation, by_hand)
    outcome = federation.run(
        Distance(mode="clusters"), federation.full_batch, rounds=ROUNDS, sites=sites
    )
    found = outcome.server[ROUNDS]["distance"]
    assert found["most_distant"] == "C"
    assert sorted(map(sorted, found["clusters"])) == [["A", "D", "E"], ["B", "C"]]
    models = {name: federation.initial() for name in "ABCDE"}
    personal: dict[str, list[Any]] = {name: [] for name in "ABCDE"}
    for _ in range(ROUNDS):
        for members in found["clusters"]:
            everything = [range(len(federation.data[name].x)) for name in members]
            trained = [
                by_hand.train(models[name], federation.data[name], [rows], 0.1)[0]
                for name, rows in zip(members, everything, strict=True)
            ]
            mean = by_hand.average(trained, [len(rows) for rows in everything])
            for name in members:
                models[name] = mean
                personal[name].append(mean)
    for name in "ABCDE":
        best = by_hand.best(personal[name], federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)
    assert outcome.best_global is None
    for number, members in enumerate(found["clusters"], start=1):
        by_hand.assert_same(outcome.deployed[f"cluster-{number}"], models[members[0]])


def test_clusters_by_hand_are_a_federated_average_each(federation: Any, by_hand: Any) -> None:
    sites = apart(federation, by_hand)
    written: tuple[tuple[str, ...], ...] = (("C", "A"), ("E", "B"), ("D",))
    outcome = federation.run(
        Distance(mode="clusters", clusters=written),
        federation.full_batch,
        rounds=ROUNDS,
        sites=sites,
    )
    assert not outcome.replies("survey")
    assert outcome.server[ROUNDS]["distance"] == {
        "sites": [*"ABCDE"], "clusters": [["A", "C"], ["B", "E"], ["D"]],
    }  # fmt: skip
    models = {name: federation.initial() for name in "ABCDE"}
    for _ in range(ROUNDS):
        for members in written:
            counts = [len(federation.data[name].x) for name in members]
            trained = [
                by_hand.train(models[name], federation.data[name], [range(count)], 0.1)[0]
                for name, count in zip(members, counts, strict=True)
            ]
            models |= dict.fromkeys(members, by_hand.average(trained, counts))
    for number, members in enumerate(written, start=1):
        by_hand.assert_same(outcome.deployed[f"cluster-{number}"], models[members[0]])


def test_clusters_by_hand_are_those_of_a_rule_that_finds_the_same(
    federation: Any, by_hand: Any
) -> None:
    sites = apart(federation, by_hand)
    for method in (Distance, on(Ditto)):
        ruled = federation.run(method(mode="clusters"), rounds=2, sites=sites)
        found = ruled.server[2]["distance"]["clusters"]
        hand = federation.run(method(mode="clusters", clusters=found), rounds=2, sites=sites)
        for name in "ABCDE":
            for key, tensor in ruled.best[name].items():
                assert hand.best[name][key].equal(tensor), (name, key)


def test_clusters_by_hand_ask_a_site_for_nothing_more(federation: Any) -> None:
    assert Distance(mode="clusters", clusters=(("A",), ("B", "C"))).all_sends().keys() == {
        *FedAvg().all_sends()
    }
    forbidden = EgressPolicy(forbid=frozenset({"label_volumes", "intensity_maxima"}))
    method = Distance(mode="clusters", clusters=(("A",), ("B", "C")))
    federation.run(method, rounds=1, sites=federation.sites({"B": forbidden}))


def test_clusters_are_written_in_an_experiment_file(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2},{split}\n" for split in ("train", "val", "test") for i in range(6))
    for name in "ABC":
        (tmp_path / f"{name}.csv").write_text(f"x,y,split\n{rows}")
    text = f"""
name: tiny
federation:
  name: three
  root: {tmp_path}
  sites: {{A: {{table: A.csv}}, B: {{table: B.csv}}, C: {{table: C.csv}}}}
  task: {{name: classification, classes: ["0", "1"]}}
  table: {{label: y, numeric: [x], split: split}}
model: logistic
training: {{batch_size: 6, local_epochs: 1}}
rounds: 1
algorithms:
  - {{name: distance, mode: clusters, clusters: [[C], [B, A]]}}
output: {tmp_path}/run
"""
    (tmp_path / "e.yaml").write_text(text)
    output = run_experiment(load_config(tmp_path / "e.yaml"))
    _, state = Store(output / "distance" / "seed-0" / "server").load_newest() or ("", {})
    assert state["distance"]["clusters"] == [["C"], ["A", "B"]]
    (tmp_path / "e.yaml").write_text(text.replace("[B, A]", "[B]"))
    with pytest.raises(ConfigError, match="does not name site 'A'"):
        run_experiment(load_config(tmp_path / "e.yaml", [f"output={tmp_path}/other"]))


@pytest.mark.parametrize(
    ("clusters", "words"),
    [
        ((("A",), ("B",)), "clusters does not name site 'C'; add it to one of them"),
        (
            (("A", "B"), ("C", "D")),
            r"clusters names 'D', which is no site that trains \(those are A",
        ),
    ],
)
def test_clusters_by_hand_name_every_site(federation: Any, clusters: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        federation.run(Distance(mode="clusters", clusters=clusters), rounds=1)


def test_a_site_receives_its_own_clusters_model_only(federation: Any, by_hand: Any) -> None:
    sites = apart(federation, by_hand)
    outcome = federation.run(
        Distance(mode="clusters"), federation.full_batch, rounds=1, sites=sites
    )
    received = {
        request.client: items for request, items, _ in outcome.log if request.method == "evaluate"
    }
    states = outcome.server[1]["clusters"]
    for members, state in zip(outcome.server[1]["distance"]["clusters"], states, strict=True):
        for name in members:
            assert received[name].keys() == {"model", "chosen"}
            for key, tensor in state["model"].items():
                assert received[name]["model"][key].equal(tensor)


def test_the_printed_rule_makes_other_clusters(golden: Callable[[str], dict[str, Any]]) -> None:
    case = golden("table2_KITS_EMD")
    matrix = np.array(case["inputs"]["D"])
    sites = ["1", "2", "3", "4", "5"]
    for rule, expected in (("recommended", "recommended"), ("printed", "printed_algorithm1")):
        state = Distance(mode="clusters", cluster_rule=rule).distance_state(sites, matrix)  # type: ignore[arg-type]
        found = sorted(sorted(map(int, members)) for members in state["clusters"])
        assert found == sorted(case["expected"][expected])
        assert state["most_distant"] == str(case["expected"]["i_max"])


def tables(columns: Mapping[str, Mapping[str, list[float]]], part: str) -> dict[str, Any]:
    """Replies by site with one kind of statistics."""
    return {
        site: {part: {"unit": "mL", "cases": len(next(iter(c.values()))), "columns": dict(c)}}
        for site, c in columns.items()
    }


def test_the_metadata_that_differ_most_make_the_matrix() -> None:
    intensity = {
        "A": {"1": [0.0, 1.0], "2": [0.0, 0.0]},
        "B": {"1": [0.5, 1.5], "2": [4.0, 6.0]},
        "C": {"1": [0.0, 1.0, 2.0], "2": [1.0, 1.0, 1.0]},
    }
    label = {
        "A": {"1": [10.0, 20.0], "2": [0.0, 0.0]},
        "B": {"1": [12.0, 20.0], "2": [0.0, 1.0]},
        "C": {"1": [50.0, 10.0, 0.0], "2": [0.0, 0.0, 3.0]},
    }
    first, second = tables(intensity, "intensity_maxima"), tables(label, "label_volumes")
    replies = {site: Message({**first[site], **second[site]}) for site in "ABC"}
    found = metadata_distances(replies, METADATA, "none")
    by_hand = [
        np.array([[wasserstein(table[a][c], table[b][c]) for b in "ABC"] for a in "ABC"])
        for table, c in ((intensity, "2"), (label, "1"))
    ]
    np.testing.assert_allclose(found.matrix, (by_hand[0] + by_hand[1]) / 2, atol=1e-9)
    scaled = metadata_distances(replies, METADATA, "pooled_std")
    pooled = {
        (kind, c): np.concatenate([table[s][c] for s in "ABC"]).std()
        for kind, table in (("i", intensity), ("l", label))
        for c in "12"
    }
    matrices = {
        key: np.array([[wasserstein(t[a][key[1]], t[b][key[1]]) for b in "ABC"] for a in "ABC"])
        / pooled[key]
        for key, t in ((k, intensity if k[0] == "i" else label) for k in pooled)
    }
    best = [
        max((m for (k, _), m in matrices.items() if k == kind), key=np.sum) for kind in ("i", "l")
    ]
    np.testing.assert_allclose(scaled.matrix, (best[0] + best[1]) / 2, atol=1e-9)


@pytest.mark.parametrize("summary", ["histogram", "quantiles"])
def test_summaries_come_close_to_the_cases(federation: Any, summary: Any) -> None:
    exact = federation.run(Distance(), rounds=1).server[1]["distance"]
    rough = federation.run(Distance(summary=summary, bins=64), rounds=1)
    found = rough.server[1]["distance"]
    assert found["most_distant"] == exact["most_distant"]
    reach = max(entry.x.max() - entry.x.min() for entry in federation.data.values())
    np.testing.assert_allclose(found["matrix"], exact["matrix"], atol=2 * reach / 64)
    for reply in rough.replies("survey"):
        assert all(isinstance(c, dict) for c in reply["intensity_maxima"]["columns"].values())


def test_the_mean_embedding_is_enough_for_the_distance_of_the_means(federation: Any) -> None:
    exact = federation.run(Distance(kind="embedding"), rounds=1)
    rough = federation.run(Distance(kind="embedding", summary="histogram"), rounds=1)
    np.testing.assert_allclose(
        rough.server[1]["distance"]["matrix"], exact.server[1]["distance"]["matrix"], rtol=1e-4
    )
    counts = [len(reply["embeddings"]["cases"]) for reply in exact.replies("survey")]
    assert counts == [5, 8, 11]
    assert [len(reply["embeddings"]["mean"]) for reply in rough.replies("survey")] == [1, 1, 1]


def test_distances_of_embeddings_are_those_of_the_golden_case(
    golden: Callable[[str], dict[str, Any]],
) -> None:
    case = golden("embedding_distance_unequal_counts")
    replies = {
        name: Message.of(embeddings=Tensors({"cases": torch.tensor(case["inputs"][key])}))
        for name, key in (("A", "E1"), ("B", "E2"))
    }
    for between, key in (("centroid", "centroid"), ("pairwise", "mean_pairwise")):
        found = embedding_distances(replies, between)  # type: ignore[arg-type]
        assert found[0, 1] == pytest.approx(case["expected"][key], abs=1e-6)


def test_only_what_the_options_need_leaves(federation: Any) -> None:
    assert {"intensity_maxima", "label_volumes", "embeddings"} <= Distance.all_sends().keys()
    assert "embeddings" not in Distance().all_sends()
    assert "label_volumes" not in Distance(kind="embedding").all_sends()
    outcome = federation.run(Distance(), rounds=1)
    for reply in outcome.replies("survey"):
        assert reply.keys() == {"intensity_maxima", "label_volumes"}
    assert len(outcome.replies("survey")) == 3


@pytest.mark.parametrize(
    ("method", "weights"),
    [(Distance, False), (on(FedProx), False), (on(FedBN), True), (on(Ditto), True)],
)
def test_personal_models_are_those_of_the_method_or_of_clusters(method: Any, weights: bool) -> None:
    assert method().has_personal == weights
    assert method(mode="clusters").has_personal
    assert {"intensity_maxima", "model"} <= method().all_sends().keys()
    assert "embeddings" not in method().all_sends()


def test_a_policy_that_forbids_stops_it_before_it_begins(federation: Any, tmp_path: Any) -> None:
    sites = federation.sites({"B": EgressPolicy(forbid=frozenset({"label_volumes"}))})
    options = {"model": federation.normed, "task": federation.task, "rounds": 1}
    with pytest.raises(EgressError, match=r"Distance sends 'label_volumes' .* policy of site 'B'"):
        simulate(Distance(), sites, output=tmp_path / "a", **options)
    simulate(Distance(kind="embedding"), sites, output=tmp_path / "b", **options)


def test_sites_that_do_not_do_are_told_in_a_sentence(federation: Any) -> None:
    sites = federation.sites()
    with pytest.raises(ConfigError, match="'A' is the only site"):
        federation.run(Distance(), sites=sites[:1])
    with pytest.raises(ConfigError, match="of the two sites A and B neither is more distant"):
        federation.run(Distance(), sites=sites[:2])
    federation.run(Distance(omega=1.0), sites=sites[:2], rounds=1)
    with pytest.raises(ConfigError, match="3 sites do not make two clusters"):
        federation.run(Distance(mode="clusters"), sites=sites)
    nothing = {key: value[:0] for key, value in sites[1].train.inputs.items()}
    sites[1] = Site("B", TensorDataset(nothing), sites[1].val, sites[1].test)
    for kind in ("emd", "embedding"):
        with pytest.raises(DataError, match="site 'B' has no training cases"):
            federation.run(Distance(kind=kind), sites=sites)


def test_a_site_that_does_not_answer_the_survey_is_named(federation: Any) -> None:
    with pytest.raises(ProtocolError, match="site 'B' sent no intensity_maxima"):
        federation.run(Distance(), lose={0: "B"}, participation=SKIPPING)


def test_weights_are_refused_where_nothing_is_averaged(federation: Any) -> None:
    with pytest.raises(ConfigError, match="DistanceAwareIFCA takes no mean of the replies"):
        federation.run(on(IFCA)(), rounds=1)
    for method in (Pooled, Distance):
        with pytest.raises(
            ConfigError, match=f"{method.__name__} cannot be given distance-aware weights"
        ):
            on(method)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"omega": 0.0}, "Distance.omega: should be above 0 and at most 1, not 0.0"),
        ({"omega": 1.5}, "Distance.omega: should be above 0 and at most 1, not 1.5"),
        ({"bins": 0}, "Distance.bins: should be at least 1, not 0"),
        ({"kind": "embedding", "between": "energy", "summary": "quantiles"}, "between is 'energy'"),
        ({"clusters": (("A",), ("B",))}, "mode is 'weights', which has none; set mode to clusters"),
        ({"mode": "clusters", "clusters": (("A", "B"),)}, "two or more clusters"),
        ({"mode": "clusters", "clusters": (("A",), ())}, "of at least one site each"),
        ({"mode": "clusters", "clusters": (("A", "B"), ("B",))}, "names site 'B' more than once"),
    ],
)
def test_a_wrong_option_is_told_at_once(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Distance(**options)


def test_any_method_is_made_distance_aware_by_its_name() -> None:
    kind = ALGORITHMS.load("fedprox+distance")
    assert kind is ALGORITHMS.load("fedprox+distance")
    assert kind is on(FedProx)
    assert kind.neutral == {"mu": 0.0, "omega": 1.0}
    options = {"mu": 0.5, "omega": 0.3}
    name, found = ALGORITHMS.describe(kind(**options))
    assert name == "fedprox+distance"
    assert found.items() >= options.items()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedprox+distance", "scaffold+distance", "fedbn+distance"])
def test_another_method_by_distance_keeps_every_rule(name: str) -> None:
    check_algorithm(ALGORITHMS.load(name)())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distance", "ditto+distance"])
def test_clusters_keep_every_rule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for site, size in (("D", 11), ("E", 9)):
        monkeypatch.setitem(toy.SIZES, site, size)
    defaults: Any = toy.ToyFederation.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "names", tuple("ABCDE"))
    monkeypatch.setattr(statements, "NAMES", tuple("ABCDE"))
    options: dict[str, Any] = {"mode": "clusters"}
    suite = Conformance(ALGORITHMS.load(name)(**options), tmp_path, None)  # type: ignore[arg-type]
    for rule in conformance_checks():
        if rule not in ("workers_do_not_matter", "neutral_setting"):
            getattr(suite, f"check_{rule}")()
