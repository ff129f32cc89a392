import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError
from collegium.solvers.gram import APART, column_blocks, cosines, gram, gram_by_name, gram_of_blocks

SHAPES = {"a": (3,), "b": (50, 7), "c": (), "d": (11, 2, 3)}
SIZE = sum(math.prod(shape) for shape in SHAPES.values())


def model(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    return Tensors({n: torch.randn(s, generator=rng).to(dtype) for n, s in SHAPES.items()})


def flat(tensors: Tensors) -> Any:
    return np.concatenate([np.asarray(t, dtype=np.float64).ravel() for t in tensors.values()])


def rows(models: list[Tensors], start: Tensors | None = None) -> Any:
    return np.stack([flat(m) - (0 if start is None else flat(start)) for m in models])


MODELS = [model(seed) for seed in range(5)]
START = model(9)


@pytest.fixture(params=[0, 1 << 60], ids=["loops", "torch"], autouse=True)
def _both_roads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds for large models and for small ones."""
    monkeypatch.setattr("collegium.solvers.gram.LARGE", request.param)


@pytest.mark.parametrize("width", [1, 7, 64, SIZE, 1 << 16])
def test_gram_is_the_product_with_the_transpose_whatever_the_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collegium.solvers.gram.WIDTH", width)
    expected = rows(MODELS) @ rows(MODELS).T
    found = gram(MODELS)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-5)
    assert np.array_equal(found, found.T)


def test_differences_are_taken_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collegium.solvers.gram.WIDTH", 13)
    delta = rows(MODELS, START)
    np.testing.assert_allclose(gram(MODELS, START), delta @ delta.T, rtol=1e-5, atol=1e-4)


def test_float64_models_are_compared_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collegium.solvers.gram.WIDTH", 13)
    models = [model(seed, torch.float64) for seed in range(3)]
    start = model(9, torch.float64)
    delta = rows(models, start)
    np.testing.assert_allclose(gram(models, start), delta @ delta.T, rtol=1e-13)


def test_half_precision_is_compared_in_float32() -> None:
    models = [model(seed, torch.float16) for seed in range(3)]
    start = model(9, torch.float16)
    delta = rows(models, start)
    np.testing.assert_allclose(gram(models, start), delta @ delta.T, rtol=1e-5, atol=1e-4)


def test_long_sums_keep_their_digits() -> None:
    """The products of the blocks are added in float64."""
    rng = torch.Generator().manual_seed(0)
    models = [Tensors({"w": torch.rand(1 << 20, generator=rng)}) for _ in range(2)]
    expected = rows(models) @ rows(models).T
    np.testing.assert_allclose(gram(models), expected, rtol=1e-6)


def test_every_tensor_has_a_gram_matrix_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collegium.solvers.gram.WIDTH", 10)
    found = gram_by_name(MODELS, START)
    assert list(found) == list(SHAPES)
    for name, matrix in found.items():
        delta = rows([m.select([name]) for m in MODELS], START.select([name]))
        np.testing.assert_allclose(matrix, delta @ delta.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sum(found.values()), gram(MODELS, START), rtol=1e-5, atol=1e-4)


def test_tied_weights_count_once() -> None:
    tied = [
        Tensors({"a": t, "b": t, "c": t + 1}) for t in (torch.ones(2), torch.tensor([1.0, 3.0]))
    ]
    x = np.array([[1, 1, 2, 2], [1, 3, 2, 4]])
    np.testing.assert_allclose(gram(tied), x @ x.T)
    assert list(gram_by_name(tied)) == ["a", "c"]


def test_counters_do_not_count() -> None:
    counted = [Tensors({"n": torch.tensor(10**6), "w": torch.ones(3)}) for _ in range(2)]
    np.testing.assert_allclose(gram(counted), 3.0)


def test_blocks_are_as_wide_as_asked_and_cover_everything_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("collegium.solvers.gram.WIDTH", 100)
    parts = [part.clone() for part in column_blocks(MODELS, START)]
    assert [part.shape[1] for part in parts] == [100] * (SIZE // 100) + [SIZE % 100]
    np.testing.assert_allclose(torch.cat(parts, 1), rows(MODELS, START), atol=1e-6)


def test_rows_may_come_from_anywhere() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    np.testing.assert_allclose(gram_of_blocks([x[:, :3], x[:, 3:]], 3, 4), x @ x.T)


def test_no_models_and_no_tensors_give_an_empty_and_a_zero_matrix() -> None:
    assert gram([]).shape == (0, 0)
    assert cosines(gram([])).shape == (0, 0)
    assert np.array_equal(gram([Tensors(), Tensors()]), np.zeros((2, 2)))


def test_cosines_are_those_of_the_vectors() -> None:
    delta = rows(MODELS, START)
    unit = delta / np.linalg.norm(delta, axis=1, keepdims=True)
    found = cosines(gram(MODELS, START))
    np.testing.assert_allclose(found, unit @ unit.T, atol=1e-6)
    assert np.array_equal(np.diagonal(found), np.ones(5))


def test_a_zero_vector_agrees_with_nothing_not_even_itself() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0], [-3.0, -4.0]])
    assert cosines(x @ x.T).tolist() == [[1, 0, -1], [0, 0, 0], [-1, 0, 1]]


def test_tiny_vectors_have_directions_too() -> None:
    """`torch.cosine_similarity` with eps 1e-6, as in GRACE's code, would give 1e-14 / 1e-6."""
    tiny = Tensors({"w": torch.tensor([1e-7, 0.0])})
    assert cosines(gram([tiny, tiny])).tolist() == [[1, 1], [1, 1]]


def test_cosines_stay_within_their_bounds() -> None:
    just_over = np.array([[1.0, 1.0 + 1e-12], [1.0 + 1e-12, 1.0]])
    assert cosines(just_over).max() == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: gram([model(0), Tensors({"x": torch.ones(2)})]),
        lambda: gram([model(0)], Tensors({"x": torch.ones(2)})),
    ],
)
def test_other_names_are_named(call: Callable[[], Any]) -> None:
    with pytest.raises(ProtocolError, match=r"missing a, b, c, d; unexpected x"):
        call()


def test_overflow_says_what_to_do() -> None:
    huge = Tensors({"w": torch.full((4,), 1e30)})
    with pytest.raises(ProtocolError, match=r"not finite.*lower training\.lr"):
        gram([huge, huge])


def test_infinite_updates_say_what_to_do_without_a_warning() -> None:
    endless = Tensors({"w": torch.full((4,), torch.inf)})
    with pytest.raises(ProtocolError, match="not finite"):
        gram([endless, endless], endless)


def test_nothing_as_large_as_all_models_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor made on the way is one block."""
    models = [Tensors({"w": torch.randn(100_000)}) for _ in range(4)]
    sizes: list[int] = []
    original = torch.empty

    def watched(*shape: Any, **options: Any) -> Tensor:
        made = original(*shape, **options)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr("collegium.solvers.gram.torch.empty", watched)
    monkeypatch.setattr("collegium.solvers.gram.WIDTH", 1000)
    gram(models, models[0])
    assert sizes == [4 * (1000 + APART)]
