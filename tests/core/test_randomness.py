import hashlib

import pytest
import torch

from collegium.core.randomness import ambient, generator, permutation, seed_of


def test_seed_is_blake2b_of_the_path():
    digest = hashlib.blake2b(b"3/client/A/round/2", digest_size=8).digest()
    expected = int.from_bytes(digest, "little") >> 1
    assert seed_of(3, "client", "A", "round", 2) == expected
    assert 0 <= expected < 2**63


def test_generators_of_one_path_agree_and_of_others_differ():
    draws = {
        path: tuple(torch.rand(3, generator=generator(0, *path)).tolist())
        for path in (("a",), ("b",), ("a", 1), ("a", 2))
    }
    assert len(set(draws.values())) == 4
    assert draws["a",] == tuple(torch.rand(3, generator=generator(0, "a")).tolist())
    assert draws["a",] != tuple(torch.rand(3, generator=generator(1, "a")).tolist())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 625, 5000])
@pytest.mark.parametrize("seed", [0, 1, 20_000])
def test_a_permutation_is_that_of_torch(count: int, seed: int):
    expected = torch.randperm(count, generator=generator(seed, "splits", "A"))
    assert permutation(count, seed, "splits", "A") == expected.tolist()


def test_ambient_seeds_inside_and_restores_outside():
    before = torch.random.get_rng_state()
    with ambient(1, "x"):
        first = torch.rand(2)
    with ambient(1, "x"):
        assert torch.equal(torch.rand(2), first)
    expected = torch.rand(2, generator=generator(1, "x"))
    assert torch.equal(first, expected)
    assert torch.equal(torch.random.get_rng_state(), before)


def fail_inside() -> None:
    with ambient(1, "x"):
        torch.rand(1)
        raise KeyError


def test_ambient_restores_after_an_error():
    before = torch.random.get_rng_state()
    with pytest.raises(KeyError):
        fail_inside()
    assert torch.equal(torch.random.get_rng_state(), before)
