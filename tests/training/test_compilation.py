"""Compiled training: near to the plain one, and equal bit by bit wherever it is compiled."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from collegium.core.dataset import TensorDataset
from collegium.core.message import unpack
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.tasks import SupervisedTask
from collegium.training.compilation import compiler_problem
from collegium.training.loop import LocalTraining, TrainingConfig

TRAIN = """if True:
    import sys
    from pathlib import Path
    import torch
    from torch import nn
    from collegium.core.dataset import TensorDataset
    from collegium.core.message import pack
    from collegium.core.model_parts import set_memory_format
    from collegium.core.randomness import generator
    from collegium.core.tensors import Tensors
    from collegium.runtime import process
    from collegium.tasks import SupervisedTask
    from collegium.training.loop import LocalTraining, TrainingConfig

    process.prepare(1)
    draw = generator(0, "images")
    images = torch.randn(10, 3, 16, 16, generator=draw)
    data = TensorDataset({"image": images, "label": torch.randn(10, 1, generator=draw)})
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3),
        nn.Flatten(), nn.Linear(8 * 12 * 12, 1),
    )
    set_memory_format(network, "auto")
    model = Tensors(network.state_dict()).clone()
    config = TrainingConfig(lr=0.01, batch_size=4, compile=sys.argv[1], precision=sys.argv[2])
    task = SupervisedTask(nn.functional.mse_loss)
    for run in range(2):  # the second finds the graph of the first
        local = LocalTraining(network, task, config)
        trained, progress = local.fit(model, data, seed=0, path=("fit",), lr=0.01, epochs=2)
        Path(f"{sys.argv[3]}-{run}").write_bytes(pack({"model": trained, "loss": progress.loss}))
"""


def train(folder, name, *, choice="on", precision="fp32", cache="cache"):
    """Train twice in a process of its own; return what both trainings wrote."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / cache)}
    command = [sys.executable, "-c", TRAIN, choice, precision, str(folder / name)]
    subprocess.run(command, check=True, env=environment, timeout=500)
    return [(folder / f"{name}-{run}").read_bytes() for run in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(bool(compiler_problem("cpu")), reason="there is no C++ compiler")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_training_has_the_same_bits_in_every_process_and_nearly_those_of_the_plain_one(
    tmp_path, precision
):
    first, second = train(tmp_path, "first", precision=precision)
    assert (tmp_path / "cache").exists()
    assert first == second
    assert train(tmp_path, "cached", precision=precision) == [first, first]
    assert train(tmp_path, "new", precision=precision, cache="other") == [first, first]
    plain, _ = train(tmp_path, "plain", choice="off", precision=precision)
    assert hashlib.sha256(plain).digest() != hashlib.sha256(first).digest()
    one, other = unpack(plain)["model"], unpack(first)["model"]
    for name in one:  # dropout draws other masks, so that weights differ by single steps of 0.01
        assert (one[name].float() - other[name].float()).abs().max() < 0.1, name


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_cuda_graphs_have_the_same_bits_again_and_nearly_those_of_the_plain_network(
    cuda, tmp_path, monkeypatch
):
    if problem := compiler_problem(cuda):
        pytest.skip(problem)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    draw = generator(0, "images")
    images = torch.randn(14, 3, 16, 16, generator=draw)
    data = TensorDataset({"image": images, "label": torch.randn(14, 1, generator=draw)})
    found = {}
    for run, choice in (("plain", "off"), ("first", "on"), ("second", "on")):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 1)
        )
        model = Tensors(network.state_dict()).clone()
        config = TrainingConfig(optimizer="sgd", lr=0.01, batch_size=4, compile=choice)  # type: ignore[arg-type]
        local = LocalTraining(network, SupervisedTask(nn.functional.mse_loss), config, cuda)
        for epochs in (3, 2):  # a graph is recorded, and then replayed with other weights
            model, _ = local.fit(model, data, seed=0, path=("fit",), lr=0.01, epochs=epochs)
        found[run] = model
    assert all(torch.equal(found["first"][name], found["second"][name]) for name in model)
    for name in model:
        torch.testing.assert_close(found["first"][name], found["plain"][name], rtol=1e-3, atol=1e-4)
