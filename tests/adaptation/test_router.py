import numpy as np
import pytest
import torch

from collegium.adaptation._router import Router, route
from collegium.errors import ConfigError


def test_a_router_gives_the_coefficients_of_the_paper(golden) -> None:
    case = golden("router")
    inputs, expected = case["inputs"], case["expected"]
    h = torch.tensor(inputs["h"], dtype=torch.float64).unsqueeze(0)
    router = Router(channels=3, sources=case["params"]["K"] + 1).double().eval()
    at_start = router(h).detach().numpy()
    np.testing.assert_allclose(at_start[0], expected["r_at_zero_fc2_weight"], atol=1e-7)
    state = {
        f"{layer}.{kind}": torch.tensor(inputs[f"{short}_{kind[0]}"], dtype=torch.float64)
        for layer, short in (("hidden", "fc1"), ("output", "fc2"))
        for kind in ("weight", "bias")
    }
    router.load_state_dict(state)
    np.testing.assert_allclose(router(h).detach()[0], expected["r"], atol=case["atol"])


def test_routed_weights_are_the_sum_over_the_sources(golden) -> None:
    case = golden("routed_weight")
    weights = torch.tensor(case["inputs"]["W"], dtype=torch.float64)
    r = torch.tensor(case["inputs"]["r"], dtype=torch.float64)
    np.testing.assert_allclose(route(weights, r), case["expected"]["W_o"], atol=case["atol"])


def test_every_sample_gets_weights_of_its_own() -> None:
    rng = np.random.default_rng(0)
    weights, r = rng.normal(size=(4, 5, 2, 3)), rng.random((3, 4))
    found = route(torch.tensor(weights), torch.tensor(r))
    np.testing.assert_allclose(found, np.einsum("bk,koij->boij", r, weights), atol=1e-12)


def test_a_one_hot_coefficient_gives_that_source_bit_by_bit() -> None:
    weights = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    assert route(weights, torch.tensor([0.0, 1.0, 0.0])).equal(weights[1])


def test_one_model_cannot_be_routed() -> None:
    with pytest.raises(ConfigError, match="needs two models or more, but there is 1"):
        Router(channels=3, sources=1)
