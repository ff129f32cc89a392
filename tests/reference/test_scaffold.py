from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collegium.algorithms.scaffold import Scaffold
from collegium.core.dataset import TensorDataset
from collegium.errors import ConfigError
from collegium.runtime.participation import SKIPPING
from collegium.runtime.simulation import simulate
from collegium.training.loop import TrainingConfig

ROUNDS = 3
STEPS = {"A": 2, "B": 4, "C": 6}


def zeros(by_hand: Any, model: Any) -> Any:
    return {
        n: np.zeros_like(value) for n, value in by_hand.select(model, by_hand.PARAMETERS).items()
    }


def expected(
    federation: Any, by_hand: Any, global_lr: float = 1.0, lose: dict[int, str] | None = None
) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Algorithm 1, option II: model, server variate and client variates after every round."""
    x = federation.initial()
    c = zeros(by_hand, x)
    own = {name: zeros(by_hand, x) for name in federation.names}
    history = []
    for t in range(1, ROUNDS + 1):
        lr = 0.1 * 0.8 ** (t - 1)
        sampled = [name for name in federation.names if (lose or {}).get(t) != name]
        moves, changes = [], []
        for name in sampled:

            def corrected(gradient: Any, now: Any, c: Any = c, c_i: Any = own[name]) -> Any:
                return {n: g + c[n] - c_i[n] for n, g in gradient.items()}

            batches = federation.batches(name, t)
            assert len(batches) == STEPS[name]
            y, _ = by_hand.train(x, federation.data[name], batches, lr, change=corrected)
            new = {n: own[name][n] - c[n] + (x[n] - y[n]) / (STEPS[name] * lr) for n in c}
            changes.append({n: new[n] - own[name][n] for n in c})
            moves.append(y)
            own[name] = new
        counter = max(y["conv.num_batches_tracked"] for y in moves)
        x = {
            n: value
            + (global_lr if n in c else 1.0) * sum(y[n] - value for y in moves) / len(sampled)
            for n, value in x.items()
        } | {"conv.num_batches_tracked": counter}
        share = len(sampled) / len(federation.names)
        c = {n: c[n] + share * sum(d[n] for d in changes) / len(sampled) for n in c}
        history.append((x, c, dict(own)))
    return history


@pytest.mark.parametrize("global_lr", [1.0, 0.5, 1.5])
def test_model_and_variates_follow_algorithm_1(
    federation: Any, by_hand: Any, global_lr: float
) -> None:
    outcome = federation.run(Scaffold(global_lr=global_lr), rounds=ROUNDS)
    for t, (x, c, own) in enumerate(expected(federation, by_hand, global_lr), start=1):
        by_hand.assert_same(outcome.server[t]["model"], x, f"round {t}")
        by_hand.assert_same(outcome.server[t]["control"], c, f"round {t}, server variate")
        for name in federation.names:
            by_hand.assert_same(
                outcome.clients[t][name]["control"], own[name], f"round {t}, variate of {name}"
            )
    by_hand.assert_same(outcome.deployed["global"], x)


def test_the_server_variate_is_the_mean_of_the_clients(federation: Any) -> None:
    outcome = federation.run(Scaffold(), rounds=ROUNDS)
    for t in range(1, ROUNDS + 1):
        for name, tensor in outcome.server[t]["control"].items():
            own = [outcome.clients[t][client]["control"][name] for client in federation.names]
            np.testing.assert_allclose(tensor, sum(own) / 3, rtol=1e-9, atol=1e-12)
            assert float(abs(tensor).max()) > 1e-3


def test_a_client_that_is_missing_keeps_its_variate_and_its_share_in_the_servers(
    federation: Any, by_hand: Any
) -> None:
    lose = {2: "B"}
    outcome = federation.run(Scaffold(), rounds=ROUNDS, lose=lose, participation=SKIPPING)
    for t, (x, c, own) in enumerate(expected(federation, by_hand, lose=lose), start=1):
        by_hand.assert_same(outcome.server[t]["model"], x, f"round {t}")
        by_hand.assert_same(outcome.server[t]["control"], c, f"round {t}, server variate")
        by_hand.assert_same(outcome.clients[t]["B"]["control"], own["B"], f"round {t}, B")
    assert outcome.records[1].left_out[0]["client"] == "B"


def test_a_reply_that_is_lost_on_its_way_leaves_the_server_variate_the_mean_of_the_clients(
    federation: Any, by_hand: Any
) -> None:
    lose = {2: "B"}
    outcome = federation.run(
        Scaffold(), rounds=ROUNDS, lose=lose, on_their_way=True, participation=SKIPPING
    )
    wanted = expected(federation, by_hand, lose=lose)
    for t, (x, c, _) in enumerate(wanted, start=1):
        by_hand.assert_same(outcome.server[t]["model"], x, f"round {t}")
        by_hand.assert_same(outcome.server[t]["control"], c, f"round {t}, server variate")
    for name, own in wanted[-1][2].items():
        by_hand.assert_same(outcome.clients[ROUNDS][name]["control"], own, name)
    for name, tensor in outcome.server[ROUNDS]["control"].items():
        own = [outcome.clients[ROUNDS][client]["control"][name] for client in federation.names]
        np.testing.assert_allclose(tensor, sum(own) / 3, rtol=1e-9, atol=1e-12)


def test_after_one_full_batch_step_a_variate_is_the_gradient_at_the_received_model(
    federation: Any,
) -> None:
    outcome = federation.run(Scaffold(), federation.full_batch, rounds=2, network=federation.linear)
    weight, bias = federation.initial(network=federation.linear).values()
    for t in (1, 2):
        gradients = {}
        for name in federation.names:
            x, y = federation.data[name]
            error = x @ weight.T + bias - y
            gradients[name] = 2 / len(x) * error.T @ x, 2 * error.mean(0)
            control = outcome.clients[t][name]["control"]
            np.testing.assert_allclose(control["weight"], gradients[name][0], rtol=1e-8)
            np.testing.assert_allclose(control["bias"], gradients[name][1], rtol=1e-8)
        # with y_i = x - lr (g_i + c - c_i), the mean of the moves is -lr times the mean gradient
        weight = weight - 0.1 * sum(g[0] for g in gradients.values()) / 3
        bias = bias - 0.1 * sum(g[1] for g in gradients.values()) / 3
        np.testing.assert_allclose(outcome.server[t]["model"]["weight"], weight, rtol=1e-9)
        np.testing.assert_allclose(outcome.server[t]["model"]["bias"], bias, rtol=1e-9)


def test_variates_cover_parameters_and_buffers_travel_in_the_update(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(Scaffold(), rounds=1)
    for reply in outcome.replies("train"):
        assert reply.keys() == {"model_update", "control_update", "progress"}
        assert reply["control_update"].keys() == by_hand.PARAMETERS
        assert reply["model_update"].keys() == by_hand.NAMES


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (TrainingConfig(optimizer="sgd", momentum=0.9), "sgd with momentum"),
        (TrainingConfig(optimizer="adam"), "adam"),
        (TrainingConfig(optimizer="adamw"), "adamw"),
    ],
)
def test_other_optimisers_than_plain_sgd_are_refused_before_anything_runs(
    federation: Any, tmp_path: Path, recipe: TrainingConfig, kind: str
) -> None:
    output = tmp_path / "run"
    with pytest.raises(ConfigError, match=f"^Scaffold .* not with {kind};"):
        simulate(
            Scaffold(), federation.sites(), federation.normed, federation.task,
            rounds=1, training=recipe, output=output,
        )  # fmt: skip
    assert not output.exists()


@pytest.mark.parametrize("local_steps", [1, 7])
def test_the_pace_follows_the_steps_where_the_recipe_counts_in_steps(
    federation: Any, by_hand: Any, local_steps: int
) -> None:
    recipe = replace(federation.recipe, local_steps=local_steps)
    outcome = federation.run(Scaffold(), recipe, rounds=1)
    x = federation.initial()
    for name in federation.names:
        batches = federation.batches(name, 1, steps=local_steps)
        y, _ = by_hand.train(x, federation.data[name], batches, 0.1)
        new = {n: (x[n] - y[n]) / (local_steps * 0.1) for n in by_hand.PARAMETERS}
        by_hand.assert_same(outcome.clients[1][name]["control"], new, name)


def test_a_site_without_examples_takes_no_step_and_keeps_its_variate(federation: Any) -> None:
    sites = federation.sites()
    empty = TensorDataset({key: value[:0] for key, value in sites[1].train.inputs.items()})
    sites[1] = replace(sites[1], train=empty)
    outcome = federation.run(Scaffold(), rounds=ROUNDS, sites=sites)
    for t in range(1, ROUNDS + 1):
        own = {name: state["control"] for name, state in outcome.clients[t].items()}
        for name, tensor in outcome.server[t]["control"].items():
            assert float(abs(own["B"][name]).max()) == 0.0
            mean = (own["A"][name] + own["C"][name]) / 3
            np.testing.assert_allclose(tensor, mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_the_pace_counts_the_steps_really_taken(federation: Any, batch_size: int) -> None:
    """In the first round the variate is the way gone over steps times learning rate."""
    recipe = replace(federation.recipe, batch_size=batch_size)
    outcome = federation.run(Scaffold(), recipe, rounds=1, network=federation.linear)
    for name, reply in zip(federation.names, outcome.replies("train"), strict=True):
        way, steps = reply["model_update"]["weight"], outcome.progress(name)[0]["steps"]
        control = outcome.clients[1][name]["control"]["weight"]
        np.testing.assert_allclose(control, -way / (steps * 0.1), rtol=1e-9)
