"""Robust means against numpy, SciPy and Krum by hand, and rounds of the methods that have one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch

from collegium.algorithms import _robust_rules as rules
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.robust import Robust, on
from collegium.compression.cer import CER
from collegium.compression.dadaquant import DAdaQuant
from collegium.compression.session.groups import Codecs
from collegium.compression.stc import STC
from collegium.core.message import pack, unpack
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, MissingReply, ProtocolError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.participation import SKIPPING
from collegium.testing.toy import ShuffledTransport, ToyFederation

AVERAGING = {
    "condist", "ditto", "fedadam", "fedavg", "fedavgm", "fedavgp", "fedbabu", "fedbn", "fedper",
    "fedprox", "fedrep", "fedrod", "fedyogi", "finetune", "fml", "iopfl", "l2gd", "apfl", "moon",
    "perfedavg", "pfedme", "silobn", "superfed", "ttt",
}  # fmt: skip
"""The methods of which the server uses nothing but means of models."""


def models(count: int, seed: int, *, rounded: bool = False) -> list[dict[str, Any]]:
    """Random models; rounded to halves they have many equal coordinates."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        numbers = {"weight": rng.normal(0, 2, (3, 5)), "bias": rng.normal(0, 2, 5)}
        if rounded:
            numbers = {name: np.round(values * 2) / 2 for name, values in numbers.items()}
        found.append({n: v.astype(np.float32) for n, v in numbers.items()})
    return found


def tensors(model: Mapping[str, Any]) -> Tensors:
    return Tensors({name: torch.tensor(values) for name, values in model.items()})


def flat(model: Mapping[str, Any]) -> Any:
    return np.concatenate([np.asarray(v, np.float64).ravel() for v in model.values()])


def krum_by_hand(vectors: Sequence[Any], f: int, m: int) -> list[int]:
    """Krum of Section 4, with loops."""
    n, scores = len(vectors), []
    for i in range(n):
        others = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append((sum(others[: n - f - 2]), others, i))
    return sorted(i for _, _, i in sorted(scores)[:m])


# --- the rules


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_median_is_numpy_s(count: int, rounded: bool) -> None:
    sites = models(count, count, rounded=rounded)
    found = rules.median([tensors(site) for site in sites])
    for name in ("weight", "bias"):
        wanted = np.median(np.stack([s[name] for s in sites]).astype(np.float64), axis=0)
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-7)
        assert found[name].dtype == torch.float32


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("count", "trim"), [(4, 0.25), (5, 0.25), (5, 0.4), (10, 0.3), (9, 0.1)])
def test_trimmed_mean_is_scipy_s(count: int, trim: float, rounded: bool) -> None:
    sites = models(count, 7 * count, rounded=rounded)
    cut = rules.trimmed_count(trim, count)
    found = rules.trimmed_mean([tensors(site) for site in sites], cut)
    for name in ("weight", "bias"):
        stacked = np.stack([s[name] for s in sites]).astype(np.float64)
        wanted = scipy.stats.trim_mean(stacked, trim, axis=0)
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-6, atol=1e-7)


def test_a_share_that_floats_just_miss_counts_as_written() -> None:
    assert int(0.29 * 100) == 28  # what a bare product gives
    assert rules.trimmed_count(0.29, 100) == 29


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("count", "f", "m"), [(3, 0, 1), (5, 1, 1), (7, 2, 1), (7, 1, 4)])
def test_krum_selects_as_by_hand(count: int, f: int, m: int, rounded: bool) -> None:
    for seed in range(20):
        sites = models(count, seed, rounded=rounded)
        found = rules.krum(
            [tensors(site) for site in sites], {"weight", "bias"}, hostile=f, selected=m
        )
        assert found == krum_by_hand([flat(site) for site in sites], f, m)


def test_of_equal_scores_krum_takes_the_closer_to_the_rest_and_at_last_the_first() -> None:
    on_a_line = [Tensors({"w": torch.tensor([float(place)])}) for place in (0, 1, 5)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        sites = [on_a_line[position] for position in order]
        (found,) = rules.krum(sites, {"w"}, hostile=0, selected=1)
        assert sites[found]["w"].item() == 1.0
    same = tensors(models(1, 0)[0])
    assert rules.krum([same] * 5, {"weight", "bias"}, hostile=1, selected=2) == [0, 1]


def test_krum_sees_a_poisoned_parameter_beside_large_buffers() -> None:
    rng = np.random.default_rng(1)
    sites = [
        Tensors(
            {
                "weight": torch.tensor(rng.normal(0, 0.01, 20)) + (1.0 if site == 3 else 0.0),
                "running_var": torch.tensor(rng.uniform(900, 1100, 20)),
            }
        )
        for site in range(5)
    ]
    assert 3 not in rules.krum(sites, {"weight"}, hostile=1, selected=4)


def test_updates_that_are_too_long_are_shortened_to_the_bound() -> None:
    start, sites = models(1, 3)[0], models(4, 4)
    sites[2] = {
        name: start[name] + 50 * (values - start[name]) for name, values in sites[2].items()
    }
    named = dict(zip("abcd", map(tensors, sites), strict=True))
    clipped, scales = rules.clip_updates(
        named, dict.fromkeys("abcd", tensors(start)), {"weight", "bias"}, factor=1.5, bound=None
    )
    lengths = [np.linalg.norm(flat(site) - flat(start)) for site in sites]
    limit = 1.5 * np.median(lengths)
    assert sorted(scales.values())[0] == pytest.approx(limit / lengths[2])
    wanted = flat(start) + limit / lengths[2] * (flat(sites[2]) - flat(start))
    np.testing.assert_allclose(flat(clipped["c"]), wanted, rtol=1e-5)
    for client in "abd":
        assert all(clipped[client][name].equal(named[client][name]) for name in named[client])


def test_a_fixed_bound_holds_for_parameters_and_a_multiple_of_the_median_for_buffers() -> None:
    zero = Tensors({"w": torch.zeros(2), "mean": torch.zeros(2)})
    sent = {
        client: Tensors({"w": torch.tensor([3.0, 4.0]), "mean": torch.tensor([size, 0.0])})
        for client, size in {"a": 1.0, "b": 2.0, "c": 100.0}.items()
    }
    clipped, scales = rules.clip_updates(
        sent, dict.fromkeys(sent, zero), {"w"}, factor=3.0, bound=1.0
    )
    for client in sent:
        np.testing.assert_allclose(clipped[client]["w"].numpy(), [0.6, 0.8], rtol=1e-6)
    assert [clipped[client]["mean"][0].item() for client in "abc"] == [1.0, 2.0, 6.0]
    assert scales == pytest.approx({"a": 0.2, "b": 0.2, "c": 0.06})


def test_tied_weights_stay_tied_and_count_once() -> None:
    def tied(value: float) -> Tensors:
        shared = torch.full((4,), value)
        return Tensors({"in": shared, "out": shared})

    start, sites = tied(0.0), {"a": tied(1.0), "b": tied(1.0), "c": tied(8.0)}
    clipped, scales = rules.clip_updates(
        sites, dict.fromkeys(sites, start), {"in", "out"}, factor=2.0, bound=None
    )
    assert scales["c"] == pytest.approx(0.25)
    for found in (clipped["c"], rules.median([*sites.values()])):
        assert found["in"].data_ptr() == found["out"].data_ptr()
    assert clipped["c"]["in"].tolist() == [2.0] * 4


def test_counters_are_never_averaged() -> None:
    sites = [Tensors({"n": torch.tensor(n), "on": torch.tensor(n > 3)}) for n in (9, 2, 4, 10**6)]
    for found in (rules.median(sites), rules.trimmed_mean(sites, 1)):
        assert found["n"].item() == 4
        assert found["n"].dtype == torch.int64
        assert found["on"].item() is True


# --- rounds


def trained(federation: Any, by_hand: Any, model: Any, t: int) -> list[Any]:
    return [
        by_hand.train(
            model, federation.data[name], federation.batches(name, t), 0.1 * 0.8 ** (t - 1)
        )[0]
        for name in federation.names
    ]


def middle(sites: list[Any]) -> Any:
    """The median by numpy; of the three counters the one in the middle."""
    return {
        name: np.median(np.stack([s[name] for s in sites]), axis=0).astype(sites[0][name].dtype)
        for name in sites[0]
    }


@pytest.mark.parametrize("settings", [{}, {"rule": "trimmed_mean", "trim": 0.34}])
def test_rounds_of_the_median(federation: Any, by_hand: Any, settings: Any) -> None:
    """Of three sites the mean without the largest and the smallest value is the median."""
    outcome = federation.run(Robust(**settings), rounds=3)
    model = federation.initial()
    for t in range(1, 4):
        model = middle(trained(federation, by_hand, model, t))
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")


def test_rounds_of_krum(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(Robust(rule="krum", hostile=0), rounds=2)
    model = federation.initial()
    for t in (1, 2):
        sites = trained(federation, by_hand, model, t)
        pairs = [(0, 1), (0, 2), (1, 2)]
        distances = dict.fromkeys(pairs, 0.0)
        for group in (by_hand.PARAMETERS, {"conv.running_mean", "conv.running_var"}):
            vectors = [flat(by_hand.select(site, group)) for site in sites]
            squares = {(i, j): float(((vectors[i] - vectors[j]) ** 2).sum()) for i, j in pairs}
            for pair, square in squares.items():
                distances[pair] += square / np.median([*squares.values()])
        scores = [sorted(d for pair, d in distances.items() if i in pair) for i in range(3)]
        best = scores.index(min(scores))  # two are closest to each other: the third decides
        model = sites[best]
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")
        chosen = outcome.records[t - 1].numbers[""]
        assert chosen == {
            f"krum/{name}": float(i == best) for i, name in enumerate(federation.names)
        }


def test_rounds_with_a_bounded_norm(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(Robust(rule="norm_bound", bound=0.05, factor=0.8), rounds=2)
    model = federation.initial()
    for t in (1, 2):
        sites = trained(federation, by_hand, model, t)
        statistics = {"conv.running_mean", "conv.running_var"}
        for group, limit in ((by_hand.PARAMETERS, 0.05), (statistics, None)):
            names = sorted(group)
            lengths = [
                np.linalg.norm(flat({n: site[n] - model[n] for n in names})) for site in sites
            ]
            bound = 0.8 * np.median(lengths) if limit is None else limit
            assert max(lengths) > bound
            for site, length in zip(sites, lengths, strict=True):
                for name in names:
                    site[name] = model[name] + min(1, bound / length) * (site[name] - model[name])
        model = by_hand.average(sites, [5, 8, 11])
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")


def test_a_bound_that_nobody_reaches_is_fedavg_bit_by_bit(federation: Any) -> None:
    loose = Robust(rule="norm_bound", factor=1e6)
    found = federation.run(loose, rounds=2).server[2]["model"]
    wanted = federation.run(FedAvg(), rounds=2).server[2]["model"]
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())


def test_a_personal_method_takes_the_median_of_what_it_shares(
    federation: Any, by_hand: Any
) -> None:
    kind: Any = ALGORITHMS.load("fedbn+robust")
    outcome = federation.run(kind(), rounds=1)
    model = federation.initial()
    sites = trained(federation, by_hand, model, 1)
    wanted = middle([by_hand.select(s, by_hand.NAMES - by_hand.NORM) for s in sites])
    by_hand.assert_same(outcome.server[1]["model"], model | wanted)
    for name, site in zip(federation.names, sites, strict=True):
        own = outcome.clients[1][name]["private"]
        by_hand.assert_same(own, by_hand.select(site, by_hand.NORM))


@pytest.mark.parametrize("name", ["fedprox+fedavgm+robust", "fedprox+robust+fedavgm"])
def test_the_server_s_optimiser_moves_by_the_robust_mean(federation: Any, name: str) -> None:
    kind: Any = ALGORITHMS.load(name)
    plain: Any = ALGORITHMS.load("fedprox+robust")
    moved = federation.run(kind(mu=0.5, server_lr=0.25), rounds=1).server[1]["model"]
    middle_model = federation.run(plain(mu=0.5), rounds=1).server[1]["model"]
    start = federation.initial()
    for tensor in ("bn_in.weight", "norm.bias"):
        wanted = start[tensor] + 0.25 * (middle_model[tensor].numpy() - start[tensor])
        np.testing.assert_allclose(moved[tensor].numpy(), wanted, rtol=1e-12)


class Poisoned(InProcess):
    """Multiplies the parameters that site C sends by -100."""

    def exchange(self, requests: Any) -> Any:
        for request in requests:
            (response,) = super().exchange([request])
            if request.client == "C" and request.method == "train":
                envelope = unpack(response.data)
                model = envelope["reply"]["model"]
                poison = model | -100.0 * model.select({"0.weight", "4.weight"})
                envelope["reply"]["model"] = poison
                response = replace(response, data=pack(envelope), signed=None)
            yield response


@pytest.mark.parametrize(
    "settings",
    [{}, {"rule": "trimmed_mean", "trim": 0.34}, {"rule": "norm_bound", "factor": 1.0},
     {"rule": "krum", "hostile": 0}],
)  # fmt: skip
def test_one_hostile_site_of_three_moves_the_model_no_further_than_honest_ones(
    settings: Any, tmp_path: Path
) -> None:
    def size(method: Any, folder: str) -> float:
        run = ToyFederation(method, tmp_path / folder, lambda f: Poisoned(f.clients)).run(1)
        model: Tensors = run.server.state["model"]
        return float(model["0.weight"].abs().max())

    honest = ToyFederation(FedAvg(), tmp_path / "honest").run(1).server.state["model"]
    usual = float(honest["0.weight"].abs().max())
    assert size(FedAvg(), "mean") > 20 * usual
    assert size(Robust(**settings), "robust") < 3 * usual


# --- refusals


def test_which_methods_can_have_a_robust_mean() -> None:
    kinds = {name: ALGORITHMS.load(name) for name in ALGORITHMS.names()}
    found = {name for name, kind in kinds.items() if kind.averaged_parts()}
    assert found == AVERAGING | {"robust", "scaffold"}
    assert {name for name in found if kinds[name].commit_on_acknowledgement} == {"scaffold"}


@pytest.mark.parametrize(
    "name",
    ["scaffold", "resfim", "pfednet", "ifca", "distance", "fednova", "grace", "harmofl", "local",
     "fedprox+distance"],
)  # fmt: skip
def test_a_server_that_does_more_than_average_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a robust mean would protect nothing"):
        ToyFederation(ALGORITHMS.load(f"{name}+robust")(), tmp_path).run()


def test_distances_on_top_of_a_robust_mean_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a robust mean would protect nothing"):
        ToyFederation(ALGORITHMS.load("fedavg+robust+distance")(), tmp_path).run()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("robust+robust", "a robust mean, which it has; write the suffix once"),
        ("pooled+robust", "a robust mean: it trains on the data of all sites in one place and"),
    ],
)
def test_a_robust_mean_is_given_once_and_to_sites_alone(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be given {words}"):
        ALGORITHMS.load(name)


@pytest.mark.parametrize(
    ("settings", "count", "words"),
    [
        ({}, 2, r"median needs 3 sites or more \(of two, nobody .*\), and 2 train"),
        ({"rule": "krum"}, 4, r"krum needs 5 sites or more \(2 hostile \+ 3, .*\), and 4 train"),
        ({"rule": "krum", "hostile": 2}, 6, "krum needs 7 sites"),
        ({"rule": "krum", "hostile": 1, "selected": 6}, 6, "krum needs 7 sites"),
        ({"rule": "trimmed_mean", "trim": 0.1}, 9, "trimmed_mean needs 10 sites"),
        ({"rule": "norm_bound"}, 2, "norm_bound needs 3 sites"),
    ],
)
def test_too_few_sites_are_refused_with_the_numbers(
    settings: Any, count: int, words: str, tmp_path: Path
) -> None:
    names = "ABCDEFGHIJ"[:count]
    with pytest.raises(ConfigError, match=words):
        ToyFederation(Robust(**settings), tmp_path, names=names).run()
    fewest = Robust(**settings).fewest_clients
    Robust(**settings).check_setup("ABCDEFGHIJ"[:fewest], None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hostile": 2}, "hostile belongs to the rule krum, and rule is median"),
        ({"rule": "krum", "trim": 0.1}, "trim belongs to the rule trimmed_mean"),
        ({"rule": "trimmed_mean", "trim": 0.5}, "trim is 0.5, which leaves no site"),
        ({"rule": "mean"}, "rule"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Robust(**settings)


def test_the_rules_of_the_method_hold_too() -> None:
    kind: Any = ALGORITHMS.load("pfedme+robust")
    with pytest.raises(ConfigError, match="beta"):
        kind(beta=-1.0)


@pytest.mark.parametrize(
    ("settings", "codec", "refused"),
    [
        ({}, STC(p=0.1), True),
        ({"rule": "trimmed_mean", "trim": 0.34}, STC(p=0.49), True),
        ({}, CER(then="stc", p=0.1), True),
        ({}, DAdaQuant(), True),
        ({}, DAdaQuant(minimum=16, norm="l2"), True),
        ({}, DAdaQuant(minimum=4), False),
        ({}, STC(p=0.5), False),
        ({}, CER(), False),
        ({"rule": "norm_bound"}, STC(p=0.1), False),
        ({"rule": "krum", "hostile": 0}, STC(p=0.1), False),
    ],
)
def test_a_codec_that_leaves_most_numbers_out_is_refused_by_rules_of_coordinates(
    settings: Any, codec: Any, refused: bool, tmp_path: Path
) -> None:
    def run() -> None:
        ToyFederation(Robust(**settings), tmp_path, codecs=Codecs(up=codec)).run(1)

    if not refused:
        run()
        return
    with pytest.raises(ConfigError, match="leaves out most numbers of what a site sends"):
        run()


def test_the_median_of_sparse_updates_hardly_moves() -> None:
    """Why: of numbers that each of four sites keeps with probability p, some 6 p^2 move."""
    rng = np.random.default_rng(0)
    kept = [np.where(rng.random(20000) < 0.05, rng.normal(1, 0.1, 20000), 0) for _ in range(4)]
    found = rules.median([Tensors({"w": torch.tensor(site)}) for site in kept])["w"]
    assert float((found != 0).double().mean()) == pytest.approx(6 * 0.05**2, rel=0.2)


def test_a_round_with_too_few_answers_stops_and_names_who_is_missing(tmp_path: Path) -> None:
    lost = ToyFederation(
        Robust(),
        tmp_path / "lost",
        lambda f: ShuffledTransport(f, lose={2: "B"}),
        participation=SKIPPING,
    )
    with pytest.raises(MissingReply, match=r"round 2: .* and 2 trained and answered \(not B\)"):
        lost.run()
    resumed = ToyFederation(Robust(), tmp_path / "lost").run().states()
    assert resumed == ToyFederation(Robust(), tmp_path / "whole").run().states()


def test_a_mean_that_is_not_declared_is_refused(tmp_path: Path) -> None:
    class Undeclared(FedAvg):
        only_averaged = frozenset({"other"})

    with pytest.raises(ProtocolError, match="the part 'model' is averaged, and only_averaged does"):
        ToyFederation(on(Undeclared)(), tmp_path).run()
