from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fml import FML
from collegium.core.dataset import TensorDataset
from collegium.data.site import EgressPolicy, Site
from collegium.errors import ConfigError
from collegium.models.factory import build_model
from collegium.runtime.federation import initial_model
from collegium.runtime.simulation import simulate
from collegium.tasks import ClassificationTask

ROUNDS = 3
SIZES = np.array([5, 8, 11])


def output(w: Any, x: Any) -> Any:
    return x @ w["weight"].T + w["bias"]


def moved(w: Any, x: Any, d_output: Any, lr: float) -> Any:
    return {"weight": w["weight"] - lr * d_output.T @ x, "bias": w["bias"] - lr * d_output.sum(0)}


def private_start(federation: Any) -> Any:
    """The private network's own initial weights."""

    def extended() -> nn.Module:
        module: nn.Module = federation.linear()
        FML().at_site("A").extend(module)
        return module

    found = initial_model(extended, federation.seed)
    return {n: found[f"second.network.{n}"].numpy().copy() for n in ("weight", "bias")}


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.9, 0.2), (1.0, 0.0), (0.0, 1.0)])
def test_both_networks_follow_the_equations(
    federation: Any, by_hand: Any, alpha: float, beta: float
) -> None:
    """With one output the divergence is half the squared difference of the two outputs."""
    outcome = federation.run(FML(alpha=alpha, beta=beta), rounds=ROUNDS, network=federation.linear)
    model = federation.initial(network=federation.linear)
    own = {name: private_start(federation) for name in federation.names}
    assert not np.allclose(own["A"]["weight"], model["weight"])
    for t in range(1, ROUNDS + 1):
        lr, trained = 0.1 * 0.8 ** (t - 1), []
        for name in federation.names:
            w, v = dict(model), own[name]
            for rows in federation.batches(name, t):
                x, y = federation.data[name].x[rows], federation.data[name].y[rows]
                of_w, of_v = output(w, x), output(v, x)
                n = y.size
                by_w = beta * 2 * (of_w - y) / n + (1 - beta) * (of_w - of_v) / n
                by_v = alpha * 2 * (of_v - y) / n + (1 - alpha) * (of_v - of_w) / n
                w, v = moved(w, x, by_w, lr), moved(v, x, by_v, lr)
            own[name] = v
            trained.append(w)
        model = {
            n: np.tensordot(SIZES / SIZES.sum(), np.stack([w[n] for w in trained]), axes=1)
            for n in model
        }
        by_hand.assert_same(outcome.server[t]["model"], model, f"round {t}")
        for name in federation.names:
            wanted = {f"second.network.{n}": value for n, value in own[name].items()}
            wanted["second.weight"] = np.array(1.0)
            by_hand.assert_same(outcome.clients[t][name]["own"], wanted, f"round {t}, {name}")


def test_the_private_network_predicts_and_never_leaves(federation: Any, by_hand: Any) -> None:
    sites = federation.sites({"B": EgressPolicy(share=frozenset({"personal"}))})
    outcome = federation.run(FML(), rounds=1, network=federation.linear, sites=sites)
    sent = [reply for _, _, reply in outcome.log]
    models = [reply["model"] for reply in sent if "model" in reply]
    assert len(models) == 3
    assert all({*model} == {"weight", "bias"} for model in models)
    assert not any("personal" in reply for reply in sent)
    assert {*outcome.deployed} == {"global"}
    data, own = federation.validation["B"], outcome.clients[1]["B"]["own"]
    v = {n: np.asarray(own[f"second.network.{n}"]) for n in ("weight", "bias")}
    (scores,) = [
        reply["scores"]
        for request, _, reply in outcome.log
        if request.method == "evaluate" and request.client == "B"
    ]
    wanted = -((output(v, data.x) - data.y) ** 2)[:, 0]
    np.testing.assert_allclose(
        [row["negative_loss"] for row in scores["personal"]], wanted, rtol=1e-6
    )
    w = {n: np.asarray(outcome.server[1]["model"][n]) for n in ("weight", "bias")}
    wanted = -((output(w, data.x) - data.y) ** 2)[:, 0]
    np.testing.assert_allclose(
        [row["negative_loss"] for row in scores["global"]], wanted, rtol=1e-6
    )


def images(seed: int, count: int = 12) -> TensorDataset:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=rng)
    noise = torch.randn(count, 1, 16, 16, generator=rng)
    return TensorDataset({"image": noise + labels.view(-1, 1, 1, 1), "label": labels})


def small_densenet() -> nn.Module:
    return build_model(
        "densenet", in_channels=1, out_channels=2, init_features=4, growth=2, blocks=(2,)
    )


def test_every_site_may_have_a_network_of_its_own(tmp_path: Path) -> None:
    """Channels and classes that are left out are those of the shared network."""
    sites = [Site(name, images(k), images(k + 9), images(k + 19)) for k, name in enumerate("AB")]
    networks = {"B": {"name": "resnet18"}}
    private = {"name": "densenet", "init_features": 6, "growth": 2, "blocks": [1, 1]}
    found = simulate(
        FML(networks=networks, private=private),
        sites,
        small_densenet,
        ClassificationTask(2),
        rounds=2,
        output=tmp_path / "run",
    )
    assert found.model is not None
    assert not [name for name in found.model if name.startswith("second")]
    own = {
        site: {n.removeprefix("second.network.") for n in model if n.startswith("second.network.")}
        for site, model in found.personal.items()
    }
    wanted = {
        "A": build_model("densenet", in_channels=1, out_channels=2, **_params(private)),
        "B": build_model("resnet18", in_channels=1, out_channels=2),
    }
    assert own == {site: {*network.state_dict()} for site, network in wanted.items()}
    assert {*found.scores["A"]} >= {"global", "personal"}


def _params(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "name"}


def test_rounds_at_home_train_the_private_network_alone(federation: Any, tmp_path: Path) -> None:
    sites = {site.name: site for site in federation.sites()}
    options = {"rounds": 2, "training": federation.recipe, "seed": 3}
    make: Callable[[], nn.Module] = federation.linear
    plain = simulate(FML(), sites, make, federation.task, **options)
    found = simulate(FML(), sites, make, federation.task, home_rounds=1, **options)
    for site in sites:
        model = found.personal[site]
        assert not torch.equal(
            model["second.network.weight"], plain.personal[site]["second.network.weight"]
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"private": {"channels": [4]}}, r"FML.private should be a network, such as {name: unet}"),
        ({"networks": {"A": {}}}, r"FML.networks.A should be a network"),
    ],
)
def test_a_network_needs_a_name(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FML(**settings)


def test_a_network_for_nobody_is_refused() -> None:
    method = FML(networks={"Z": {"name": "unet"}})
    with pytest.raises(ConfigError, match=r"FML.networks names Z, which does not train here"):
        method.check_setup(["A", "B"], None)  # type: ignore[arg-type]
