from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.iopfl import IOPFL
from collegium.data.site import EgressPolicy

ROUNDS = 3
OPEN = EgressPolicy(share=frozenset({"personal"}))
TAU = 0.7


def trajectory(federation: Any, by_hand: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Global and personal models after every round, first those before the first."""
    models = [federation.initial()]
    personal = [dict.fromkeys(federation.names, models[0])]
    for t in range(1, ROUNDS + 1):
        trained = {
            name: by_hand.train(
                models[-1], federation.data[name], federation.batches(name, t),
                0.1 * 0.8 ** (t - 1),
            )[0]
            for name in federation.names
        }  # fmt: skip
        personal.append(
            {
                name: by_hand.combine([personal[-1][name], trained[name]], [1 - TAU, TAU])
                for name in federation.names
            }
        )
        models.append(by_hand.average([*trained.values()], [5, 8, 11]))
    return models, personal


def test_every_entry_of_the_personal_model_moves_towards_the_local_one(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(IOPFL(tau=TAU), rounds=ROUNDS, deploy=False)
    models, personal = trajectory(federation, by_hand)
    for t in range(1, ROUNDS + 1):
        by_hand.assert_same(outcome.server[t]["model"], models[t], f"round {t}")
        for name in federation.names:
            found = outcome.clients[t][name]["personal"]
            by_hand.assert_same(found, personal[t][name], f"round {t}, {name}")
    for name in federation.names:
        history = [models[name] for models in personal[1:]]
        best = by_hand.best(history, federation.validation[name])
        by_hand.assert_same(outcome.best[name], best, name)


def test_statistics_are_blended_and_counters_are_not(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(IOPFL(tau=TAU), rounds=1, deploy=False)
    start = federation.initial()
    for name, steps in {"A": 2, "B": 4, "C": 6}.items():
        local, _ = by_hand.train(start, federation.data[name], federation.batches(name, 1), 0.1)
        found = outcome.clients[1][name]["personal"]
        mean = (1 - TAU) * start["conv.running_mean"] + TAU * local["conv.running_mean"]
        np.testing.assert_allclose(found["conv.running_mean"], mean, rtol=1e-9)
        assert int(found["conv.num_batches_tracked"]) == steps


def test_the_sequence_of_the_reference_values(
    golden: Callable[[str], dict[str, Any]], one_client_moves_to: Callable[..., Any]
) -> None:
    case = golden("P_update_sequence")
    start, path = case["inputs"]["P0"], case["inputs"]["w_local_per_round"]
    outcome = one_client_moves_to(IOPFL(tau=case["params"]["tau"]), start, path)
    for t, (local, expected) in enumerate(zip(path, case["expected"]["P"], strict=True), start=1):
        received = outcome.server[t]["model"]["weight"][0]
        np.testing.assert_allclose(received, local, atol=case["atol"])  # one client: w_g is its w_k
        found = outcome.clients[t]["A"]["personal"]["weight"][0]
        np.testing.assert_allclose(found, expected, atol=case["atol"])


def test_the_printed_equation_4_is_not_what_is_computed(
    one_client_moves_to: Callable[..., Any],
) -> None:
    """(1 - tau) P - tau (g_L + g_G) shrinks weights that no gradient moves."""
    start = [1.0, -2.0, 0.5]
    outcome = one_client_moves_to(IOPFL(tau=0.9), start, [start, start])
    found = outcome.clients[2]["A"]["personal"]["weight"][0]
    np.testing.assert_allclose(found, start, rtol=1e-12)
    assert not np.allclose(found, 0.1 * 0.1 * np.array(start))


def test_the_default_tau_is_one_minus_the_alpha_of_the_released_code() -> None:
    assert IOPFL().tau == pytest.approx(1 - 0.1)


def test_the_global_model_is_that_of_fedavg_bit_by_bit(federation: Any) -> None:
    found = federation.run(IOPFL(), deploy=False).server[ROUNDS]["model"]
    expected = federation.run(FedAvg()).server[ROUNDS]["model"]
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_the_personal_model_stays_at_the_site_during_training(federation: Any) -> None:
    outcome = federation.run(IOPFL(), deploy=False)
    sent = {part for _, _, reply in outcome.log for part in reply}
    assert sent == {"model", "num_examples", "progress", "scores"}


def test_an_outsider_receives_the_global_and_all_personal_models(
    federation: Any, by_hand: Any
) -> None:
    sites = federation.sites(dict.fromkeys(federation.names, OPEN))
    outcome = federation.run(IOPFL(tau=TAU), rounds=ROUNDS, sites=sites)
    models, personal = trajectory(federation, by_hand)
    assert outcome.deployed.keys() == {"global", "A", "B", "C"}
    by_hand.assert_same(outcome.deployed["global"], models[-1])
    for name in federation.names:
        scores = [record.scores["personal"][name] for record in outcome.records]
        best = scores.index(max(scores))
        by_hand.assert_same(outcome.deployed[name], personal[1 + best][name], name)


def test_a_policy_that_does_not_name_the_personal_model_keeps_it_in(federation: Any) -> None:
    closed = EgressPolicy(forbid=frozenset({"personal"}))
    sites = federation.sites({"A": OPEN, "B": closed})
    outcome = federation.run(IOPFL(), rounds=1, sites=sites)
    assert outcome.deployed.keys() == {"global", "A"}
    assert [reply.keys() for reply in outcome.replies("share_personal")] == [
        {"personal"},
        set(),
        set(),
    ]


def test_the_distance_of_local_and_global_model_is_recorded_by_layer(federation: Any) -> None:
    """P moves by tau (w_k - w_g) in its first round, which gives w_k - w_g by hand."""
    plain = federation.run(IOPFL(tau=TAU), rounds=2)
    outcome = federation.run(IOPFL(tau=TAU), rounds=2, diagnostics=["layer_distance"])
    start = federation.initial()
    for name in federation.names:
        moved = {
            key: (outcome.clients[1][name]["personal"][key].numpy() - start[key]) / TAU
            for key in ("bn_in.weight", "conv.weight", "conv.bias", "norm.weight", "norm.bias")
        }
        found = outcome.records[0].numbers[name]
        assert found == pytest.approx(
            {f"layer_distance/{key}": np.linalg.norm(step) for key, step in moved.items()}
        )
        assert outcome.records[1].numbers[name].keys() == found.keys()
    assert all(not record.numbers for record in plain.records)
    for t in (1, 2):
        for key, tensor in plain.server[t]["model"].items():
            assert tensor.equal(outcome.server[t]["model"][key])
    sent = [[(request, reply.keys()) for request, _, reply in o.log] for o in (plain, outcome)]
    assert sent[0] == sent[1]
