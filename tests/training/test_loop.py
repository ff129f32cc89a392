import copy
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from collegium.core.dataset import Batch, TensorDataset
from collegium.core.model_parts import set_memory_format
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DivergedError
from collegium.tasks import SegmentationTask, SupervisedTask
from collegium.testing.toy import toy_model, toy_network, toy_site
from collegium.training.batches import plan_batches
from collegium.training.loop import LocalTraining, TrainingConfig, check_warm_up, count_steps

SGD = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=4)


def task() -> SupervisedTask:
    return SupervisedTask(nn.functional.mse_loss)


def linear(seed: int = 0) -> nn.Linear:
    network = nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator(seed, "linear")))
    return network


def model_of(network: nn.Module) -> Tensors:
    return Tensors(network.state_dict()).clone()


def fit(config: TrainingConfig, network: nn.Module | None = None, **options):
    network = network or linear()
    options = {"seed": 0, "path": ("fit",), "lr": config.lr, **options}
    data = options.pop("data", toy_site("A").train)
    model = options.pop("model", model_of(network))
    return LocalTraining(network, task(), config).fit(model, data, **options)


def batches(count: int, size: int, **options) -> list[list[tuple[int, int]]]:
    options = {"epochs": 1, "steps": None, "seed": 0, "path": ("p",), **options}
    return list(plan_batches(count, size, **options))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3))
def test_every_epoch_sees_every_example_once(count, size, epochs):
    plan = batches(count, size, epochs=epochs)
    seen = Counter(sample for batch in plan for sample in batch)
    assert seen == {(epoch, index): 1 for epoch in range(epochs) for index in range(count)}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(2, 9))
def test_only_a_single_example_is_a_batch_of_one(count, size):
    lengths = [len(batch) for batch in batches(count, size)]
    assert (min(lengths) > 1) == (count > 1)
    assert max(lengths) <= size + 1
    assert lengths[:-1] == [size] * (len(lengths) - 1)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 40), st.integers(1, 9), st.integers(1, 3), st.none() | st.integers(1, 7)
)  # fmt: skip
def test_count_of_steps_is_the_number_of_batches(count, size, epochs, steps):
    config = TrainingConfig(batch_size=size, local_epochs=epochs, local_steps=steps)
    expected = len(batches(count, size, epochs=epochs, steps=steps)) if count else 0
    assert count_steps(count, config) == expected


def test_tail_of_one_is_merged_and_batches_of_one_are_left_alone():
    assert [len(batch) for batch in batches(5, 4)] == [5]
    assert [len(batch) for batch in batches(9, 4)] == [4, 5]
    assert [len(batch) for batch in batches(6, 4)] == [4, 2]
    assert [len(batch) for batch in batches(3, 1)] == [1, 1, 1]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_steps_give_full_batches_and_use_examples_alike(count, size, steps):
    plan = batches(count, size, steps=steps)
    assert [len(batch) for batch in plan] == [size] * steps
    seen = Counter(index for batch in plan for _, index in batch)
    uses = [seen[index] for index in range(count)]
    assert max(uses) - min(uses) <= 1


def test_order_follows_from_seed_path_and_epoch_alone():
    assert batches(20, 4) == batches(20, 4)
    assert batches(20, 4, path=("q",)) != batches(20, 4)
    assert batches(20, 4, seed=1) != batches(20, 4)
    first, second = batches(20, 20, epochs=2)
    assert [index for _, index in first] != [index for _, index in second]
    expected = torch.randperm(20, generator=generator(0, "p", "order", 1)).tolist()
    assert [index for _, index in second] == expected


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (TrainingConfig(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
         lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
        (TrainingConfig(optimizer="adam", lr=0.01, amsgrad=True, weight_decay=0.1),
         lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1)),
        (TrainingConfig(optimizer="adamw", lr=0.01, weight_decay=0.1),
         lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ],
)  # fmt: skip
def test_loop_equals_one_written_by_hand(config, make):
    data: Any = toy_site("B").train
    trained, progress = fit(config, data=data, epochs=2)
    network = linear()
    optimizer = make(network.parameters())
    losses = []
    for batch in batches(len(data), config.batch_size, epochs=2, path=("fit",)):
        rows = [index for _, index in batch]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(
            network(data.inputs["image"][rows]), data.inputs["label"][rows]
        )
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for name, tensor in network.state_dict().items():  # the optimiser's kernel rounds otherwise
        torch.testing.assert_close(trained[name], tensor, rtol=1e-6, atol=1e-7)
    assert progress.steps == len(losses)
    assert progress.loss == pytest.approx(sum(losses) / len(losses))


def test_received_model_is_left_as_it_is():
    model = model_of(linear())
    before = model.clone()
    trained, _ = fit(SGD, model=model)
    assert torch.equal(model["weight"], before["weight"])
    assert not torch.equal(trained["weight"], before["weight"])


def test_result_depends_on_neither_the_network_before_nor_the_global_generator():
    model = toy_model(0)
    network = toy_network()
    local = LocalTraining(network, task(), SGD)
    options: dict[str, Any] = {"seed": 0, "path": ("fit",), "lr": 0.1}
    first, _ = local.fit(model, toy_site("A").train, **options)
    torch.rand(17)
    local.fit(toy_model(1), toy_site("B").train, **options)
    second, _ = local.fit(model, toy_site("A").train, **options)
    assert all(torch.equal(first[name], second[name]) for name in first)
    third, _ = local.fit(model, toy_site("A").train, **{**options, "path": ("other",)})
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_number_of_steps_replaces_epochs():
    config = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=4, local_steps=7)
    assert fit(config)[1].steps == 7
    assert fit(config, steps=3)[1].steps == 3
    assert fit(config, epochs=2)[1].steps == 2 * 2  # nine examples in batches of four and five
    assert fit(SGD)[1].steps == 2


def test_gradient_is_clipped_to_its_norm():
    start = model_of(linear())
    norm = 1e-3
    free, _ = fit(SGD, epochs=None, steps=1)
    config = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=4, clip_norm=norm)
    clipped, _ = fit(config, steps=1)
    step = clipped - start
    assert step.dot(step) ** 0.5 == pytest.approx(0.1 * norm, rel=1e-3)
    direction = free - start
    cosine = step.dot(direction) / (step.dot(step) * direction.dot(direction)) ** 0.5
    assert cosine == pytest.approx(1.0, abs=1e-5)


def test_norm_below_the_limit_is_left_alone():
    config = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=4, clip_norm=1e6)
    assert torch.equal(fit(config)[0]["weight"], fit(SGD)[0]["weight"])


def test_penalty_and_correction_are_the_same_proximal_term_for_sgd():
    start, mu = model_of(linear()), 0.7
    by_penalty, progress = fit(
        SGD,
        epochs=3,
        penalty=lambda now: mu / 2 * sum((p - start[n]).square().sum() for n, p in now.items()),
    )
    by_gradient, other = fit(
        SGD, epochs=3, correct=lambda g, now: g + mu * (now - start.select(now))
    )
    plain, _ = fit(SGD, epochs=3)
    for name in start:
        assert torch.allclose(by_penalty[name], by_gradient[name], atol=1e-6)
        assert not torch.allclose(by_penalty[name], plain[name], atol=1e-3)
    assert progress.loss == pytest.approx(other.loss, abs=1e-6)  # the penalty is not in the loss


def test_optimiser_that_is_kept_goes_on_where_it_stopped():
    """Two fits that keep the moments are one long optimisation; reset ones are not."""
    config = TrainingConfig(optimizer="sgd", momentum=0.9, lr=0.05, batch_size=100)
    state: dict = {}
    once, _ = fit(config, optimizer_state=state)
    twice, _ = fit(config, model=once, optimizer_state=state)
    long, _ = fit(config, epochs=2)
    reset, _ = fit(config, model=once)
    assert torch.allclose(twice["weight"], long["weight"], atol=1e-6)
    assert not torch.allclose(reset["weight"], long["weight"], atol=1e-2)


def test_kept_adam_counts_its_steps_on():
    config = TrainingConfig(optimizer="adam", lr=0.05, batch_size=100)
    state: dict = {}
    for _ in range(3):
        fit(config, optimizer_state=state)
    assert set(state) == {"weight", "bias"}
    assert float(state["bias"]["step"]) == 3


def test_kept_state_is_read_and_not_changed_by_later_steps():
    config = TrainingConfig(optimizer="sgd", momentum=0.9, lr=0.05, batch_size=100)
    state: dict = {}
    once, _ = fit(config, optimizer_state=state)
    kept = copy.deepcopy({name: dict(moments) for name, moments in state.items()})
    again = dict(state)
    fit(config, model=once, optimizer_state=again)
    for name, moments in kept.items():
        assert torch.equal(state[name]["momentum_buffer"], moments["momentum_buffer"])
    assert not torch.equal(
        again["weight"]["momentum_buffer"], state["weight"]["momentum_buffer"]
    )  # fmt: skip


def test_only_named_parameters_move_and_their_norm_learns_no_statistics():
    network = toy_network()
    local = LocalTraining(network, task(), SGD)
    start = toy_model(0)
    head, _ = local.fit(
        start, toy_site("A").train, seed=0, path=("h",), lr=0.1, trainable=local.parts.head
    )
    moved = {name for name in start if not torch.equal(start[name], head[name])}
    assert moved == {"4.weight", "4.bias"}
    assert all(parameter.requires_grad for parameter in network.parameters())
    body = local.parts.trainable - local.parts.head
    trained, _ = local.fit(start, toy_site("A").train, seed=0, path=("b",), lr=0.1, trainable=body)
    still = {name for name in start if torch.equal(start[name], trained[name])}
    assert still == {"4.weight", "4.bias"}


def test_parameter_that_the_network_froze_stays_put_under_correction_and_decay():
    network = linear()
    network.bias.requires_grad_(False)
    config = TrainingConfig(optimizer="sgd", lr=0.1, weight_decay=0.5)
    names = []

    def correct(gradient: Tensors, now: Tensors) -> Tensors:
        names.append((set(gradient), set(now)))
        return gradient

    trained, _ = fit(config, network, correct=correct)
    assert names[0] == ({"weight"}, {"weight"})
    assert torch.equal(trained["bias"], linear().bias.detach())
    assert not torch.equal(trained["weight"], linear().weight.detach())


def test_tied_weights_stay_tied_and_are_stepped_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)
            self.b = nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x)).sum(1, keepdim=True)

    network = Twice()
    start = model_of(network)
    trained, _ = fit(SGD, network, model=start, steps=1)
    assert trained["a.weight"] is trained["b.weight"]
    reference = Twice()
    reference.load_state_dict(dict(start))
    data: Any = toy_site("A").train
    rows = [index for _, index in batches(9, 4, steps=1, path=("fit",))[0]]
    loss = nn.functional.mse_loss(
        reference(data.inputs["image"][rows]), data.inputs["label"][rows]
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, [reference.a.weight])
    assert torch.allclose(trained["a.weight"], start["a.weight"] - 0.1 * gradient, atol=1e-6)


def test_single_example_trains_with_running_statistics_and_a_warning(caplog):
    data = TensorDataset({"image": torch.ones(1, 3), "label": torch.ones(1, 1)})
    start = toy_model(0)
    local = LocalTraining(toy_network(), task(), SGD)
    with caplog.at_level(logging.WARNING):
        trained, _ = local.fit(start, data, seed=0, path=("s",), lr=0.1, epochs=3)
    (record,) = caplog.records
    assert "a batch of one example" in record.getMessage()
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(trained[name], start[name])
    assert not torch.equal(trained["4.weight"], start["4.weight"])


def test_divergence_names_step_and_learning_rate():
    with pytest.raises(DivergedError, match=r"the loss became (inf|nan) at step \d+ \(lr 1e\+30\)"):
        fit(SGD, lr=1e30, epochs=20)


def test_no_example_is_an_error():
    empty = TensorDataset({"image": torch.zeros(0, 3), "label": torch.zeros(0, 1)})
    with pytest.raises(ConfigError, match="no training examples"):
        fit(SGD, data=empty)


def test_loss_is_the_mean_over_examples_in_evaluation_mode():
    data: Any = toy_site("B").train
    local = LocalTraining(toy_network(), task(), SGD)
    model = toy_model(0)
    found = local.loss(model, data, seed=0, path=("loss",))
    network = toy_network().eval()
    network.load_state_dict(dict(model))
    with torch.no_grad():
        expected = nn.functional.mse_loss(network(data.inputs["image"]), data.inputs["label"])
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert torch.equal(local.current()["1.running_mean"], model["1.running_mean"])


class Augmented:
    """Every sample is the first number of its own generator."""

    def __init__(self) -> None:
        self.drawn: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return 6

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        values = [float(torch.rand((), generator=rng)) for rng in rngs]
        self.drawn += zip(indices, values, strict=True)
        rows = torch.tensor(values)[:, None].repeat(1, 3)
        return {"image": rows, "label": torch.zeros(len(rows), 1)}

    def example(self, index: int):
        raise NotImplementedError


def test_augmentation_of_a_sample_depends_on_its_epoch_and_index_alone():
    small, large = Augmented(), Augmented()
    fit(TrainingConfig(optimizer="sgd", lr=0.01, batch_size=2), data=small, epochs=2)
    fit(TrainingConfig(optimizer="sgd", lr=0.01, batch_size=6), data=large, epochs=2)
    assert sorted(small.drawn) == sorted(large.drawn)
    assert len(set(small.drawn)) == 12
    first = float(torch.rand((), generator=generator(0, "fit", "sample", 0, 3)))
    assert (3, first) in small.drawn


def test_predictions_are_in_evaluation_mode_and_may_be_a_choice():
    local = LocalTraining(toy_network(), task(), SGD)
    model = toy_model(0)
    data: Any = toy_site("A").test
    everything = {index: output for index, _, output in local.predictions(model, data)}
    assert list(everything) == [0, 1, 2, 3]
    network = toy_network().eval()
    network.load_state_dict(dict(model))
    expected = network(data.inputs["image"]).detach()
    assert torch.allclose(torch.cat(list(everything.values())), expected, atol=1e-6)
    assert [index for index, _, _ in local.predictions(model, data, only={3, 1})] == [1, 3]


def test_bfloat16_changes_the_numbers_a_little():
    plain, _ = fit(SGD)
    config = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=4, precision="bf16")
    rounded, _ = fit(config)
    assert rounded["weight"].dtype == torch.float32
    assert not torch.equal(plain["weight"], rounded["weight"])
    assert torch.allclose(plain["weight"], rounded["weight"], atol=0.05)


def test_models_are_scored_in_float32_whatever_they_are_trained_in():
    model, data = toy_model(0), toy_site("A").test
    found = [
        [
            output
            for _, _, output in LocalTraining(
                toy_network(), task(), TrainingConfig(precision=precision)
            ).predictions(model, data)
        ]
        for precision in ("fp32", "bf16")
    ]
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))


class Convolutions(nn.Module):
    """A small classifier of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3), nn.Linear(8, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.norm(self.first(images))))
        scores: torch.Tensor = self.last(hidden.mean(dim=(2, 3)))
        return scores


@pytest.mark.parametrize("optimizer_state", [None, {}])
def test_channels_last_trains_the_same_model_up_to_rounding_and_hands_it_out_contiguous(
    optimizer_state,
):
    draw = generator(0, "images")
    inputs = {"image": torch.randn(16, 3, 12, 12, generator=draw)}
    data = TensorDataset({**inputs, "label": torch.randn(16, 1, generator=draw)})
    config = TrainingConfig(optimizer="sgd", momentum=0.9, lr=0.05, batch_size=4, local_epochs=3)
    plain = Convolutions()
    model = model_of(plain)
    found: list[Tensors] = []
    for choice in ("contiguous", "channels_last"):
        network = copy.deepcopy(plain)
        set_memory_format(network, choice)
        kept: Any = None if optimizer_state is None else {}
        for _ in range(2):
            start = model if len(found) % 2 == 0 else found[-1]
            trained, _ = fit(config, network, data=data, model=start, optimizer_state=kept)
            found.append(trained)
    assert all(tensor.is_contiguous() for model in found for tensor in model.values())
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
    assert not torch.equal(found[0]["first.weight"], model["first.weight"])


@pytest.mark.parametrize("choice", ["contiguous", "channels_last"])
def test_images_enter_the_network_in_the_order_of_its_weights(choice):
    draw = generator(0, "images")
    inputs = {"image": torch.randn(8, 3, 12, 12, generator=draw)}
    data = TensorDataset({**inputs, "label": torch.randn(8, 1, generator=draw)})
    network, entered = Convolutions(), []
    set_memory_format(network, choice)
    network.first.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    local = LocalTraining(network, task(), TrainingConfig(batch_size=4))
    model, _ = local.fit(model_of(network), data, seed=0, path=("fit",), lr=0.05, steps=2)
    assert len([*local.predictions(model, data)]) == 8
    assert [len(images) for images in entered] == [4, 4, *[1] * 8]
    assert all(images.is_contiguous() == (choice == "contiguous") for images in entered)
    assert torch.equal(torch.cat(entered[2:]), inputs["image"])


def test_momentum_has_a_kind_of_its_own():
    assert TrainingConfig(optimizer="sgd").optimizer_kind == "sgd"
    assert TrainingConfig(optimizer="sgd", momentum=0.9).optimizer_kind == "sgd with momentum"
    assert TrainingConfig(optimizer="adamw", momentum=0.9).optimizer_kind == "adamw"


def rates_of_torch(
    rounds: int, warm_up: int, make: Callable[[torch.optim.Optimizer], LRScheduler]
) -> list[float]:
    """The rates of one of torch's schedulers after its linear one, stepped once in a round."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler: Any = make(optimizer)
    if warm_up:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
        first = LinearLR(optimizer, 1 / (warm_up + 1), 1.0, warm_up)
        scheduler = SequentialLR(optimizer, [first, make(optimizer)], [warm_up])
    found = []
    for _ in range(rounds):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warm_up", [0, 1, 3])
@pytest.mark.parametrize(
    ("recipe", "make"),
    [
        ({"schedule": "constant"}, lambda o, left: ConstantLR(o, 1.0)),
        ({"schedule": "cosine"}, lambda o, left: CosineAnnealingLR(o, left)),
        ({"schedule": "polynomial"}, lambda o, left: PolynomialLR(o, left, 1.0)),
        ({"schedule": "polynomial", "power": 0.9}, lambda o, left: PolynomialLR(o, left, 0.9)),
        ({"lr_decay": 0.9}, lambda o, left: ExponentialLR(o, 0.9)),
        ({"lr_decay": 0.1, "decay_every": 4}, lambda o, left: StepLR(o, 4, 0.1)),
    ],
)
def test_rates_are_those_of_torchs_schedulers_stepped_once_in_a_round(warm_up, recipe, make):
    config = TrainingConfig(lr=0.4, warm_up=warm_up, **recipe)
    found = [config.lr_of(number, 12) for number in range(1, 13)]
    expected = rates_of_torch(12, warm_up, lambda optimizer: make(optimizer, 12 - warm_up))
    assert found == pytest.approx(expected, rel=1e-9)
    assert config.lr_of(0, 12) == found[0]


@pytest.mark.parametrize("schedule", ["cosine", "polynomial"])
def test_work_after_the_last_round_has_its_rate(schedule):
    config = TrainingConfig(schedule=schedule, warm_up=2)
    assert config.lr_of(6, 5) == config.lr_of(5, 5) > 0


def test_a_warm_up_over_all_rounds_is_refused():
    check_warm_up(TrainingConfig(warm_up=2), 3)
    with pytest.raises(ConfigError, match="warm_up is 3, of 3 rounds in all; give a number from 0"):
        check_warm_up(TrainingConfig(warm_up=3), 3)


def segmentation_fit(device: str, *, dropout: float = 0.0, **recipe: Any) -> Tensors:
    """Train a small network in two fits of three steps on masked images of two classes."""
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.PReLU(), nn.Dropout(dropout),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 2, 2, stride=2),
    )  # fmt: skip
    draw = generator(0, "images")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    label = torch.randint(2, (24, 16, 16), generator=draw)
    image = torch.randn(24, 3, 16, 16, generator=draw) + label[:, None]
    mask = torch.rand(24, 16, 16, generator=draw) < 0.9
    data = TensorDataset({"image": image, "label": label, "mask": mask})
    config = TrainingConfig(**{
        "optimizer": "sgd", "momentum": 0.9, "lr": 0.05, "batch_size": 4, "local_steps": 3, **recipe
    })  # fmt: skip
    set_memory_format(network, config.memory_format)
    local = LocalTraining(network, SegmentationTask(2, "dice_ce"), config, device)
    kept: dict[str, Any] = {}
    model = model_of(network)
    for number in range(2):  # the second continues with the optimiser's state
        model, _ = local.fit(
            model, data, seed=0, path=("fit", number), lr=config.lr, optimizer_state=kept
        )
    return model.map(lambda tensor: tensor.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_a_gpu_trains_the_same_model_as_the_processor_up_to_rounding(cuda, memory_format):
    ours = segmentation_fit(cuda, memory_format=memory_format)
    theirs = segmentation_fit("cpu", memory_format=memory_format)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [{}, {"precision": "bf16"}, {"clip_norm": 0.1}])
def test_a_gpu_gives_the_same_bits_again(cuda, recipe):
    first, second = (segmentation_fit(cuda, dropout=0.2, **recipe) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
def test_bfloat16_on_a_gpu_is_near_to_single_precision(cuda):
    half, single = segmentation_fit(cuda, precision="bf16"), segmentation_fit(cuda)
    assert all(torch.allclose(half[n].float(), single[n].float(), atol=0.05) for n in half)
    assert not all(torch.equal(half[name], single[name]) for name in half)


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_processor(cuda):
    site = toy_site("A")
    found = [
        LocalTraining(toy_network(), task(), SGD, device).draw(site.train, [(0, 1)], 0, ("p",))
        for device in ("cpu", cuda)
    ]
    assert {value.device.type for value in found[1].values()} == {"cuda"}
    assert all(torch.equal(found[0][key], found[1][key].cpu()) for key in found[0])


def test_the_network_of_the_tests_on_gpus_trains_here():
    """The fit that the GPU tests compare has equal bits and finite weights on a processor."""
    first, second = segmentation_fit("cpu"), segmentation_fit("cpu")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
