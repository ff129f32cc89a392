"""The interface of a site's data: samples to train on, cases to score.

Image, tabular and toy data all have the same two methods: `batch` returns training samples, cropped
and augmented with the generators passed in, and `example` returns one whole case as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeAlias

from collegium.core.lazy import torch
from collegium.errors import DataError

Batch: TypeAlias = "dict[str, torch.Tensor]"
"""`image` float32 `(B, C, *spatial)`; `label` int64 `(B, *spatial)` for segmentation; `mask` bool
`(B, *spatial)`, optional: the field of view, True where loss and score count."""


@dataclass(frozen=True)
class Example:
    """One whole case, unaugmented, for evaluation.

    Attributes:
        case: The site's own case id; it never leaves the site.
        patient: The site's own patient id; it never leaves the site.
        batch: A batch of one, or of all slices of a volume that is processed slice by slice.
        spacing: Millimetres per spatial axis, for the slices of a volume with the distance between
            slices first; None if it is unknown.
        neighbours: How many slices on either side are channels of the image too, before and after
            its own.
    """

    case: str
    patient: str
    batch: Batch
    spacing: tuple[float, ...] | None
    neighbours: int = 0

    @property
    def image(self) -> torch.Tensor:
        """The image (B, C, *spatial) without the channels of its neighbours."""
        image = self.batch["image"]
        count = image.shape[1] // (2 * self.neighbours + 1)
        return image[:, self.neighbours * count : (self.neighbours + 1) * count]


class Dataset(Protocol):
    """One split of one site."""

    def __len__(self) -> int:
        """Return the number of cases."""

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return a batch with one training sample from each case.

        Args:
            indices: The cases.
            rngs: The generators from which the samples draw, one for each case.
        """

    def example(self, index: int) -> Example:
        """Return one whole case."""


@dataclass(frozen=True)
class TensorDataset:
    """A dataset in memory, without augmentation.

    Attributes:
        inputs: Tensors whose first axis counts the cases.
        patients: One patient id per case; by default each case is a patient of its own.
        cases: One id per case; by default "0", "1", ...
    """

    inputs: Batch
    patients: Sequence[str] | None = None
    cases: Sequence[str] | None = None

    def __post_init__(self) -> None:
        lengths = {key: len(value) for key, value in self.inputs.items()}
        named = {"patients": self.patients, "cases": self.cases}
        lengths |= {key: len(ids) for key, ids in named.items() if ids is not None}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"the inputs of a TensorDataset must be equally long, but are {lengths}"
            )

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values()))) if self.inputs else 0

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return the cases as they are; the generators are not used. See `Dataset.batch`."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return {key: value.index_select(0, rows) for key, value in self.inputs.items()}

    def example(self, index: int) -> Example:
        """Return one case as a batch of one."""
        case = str(index) if self.cases is None else self.cases[index]
        patient = case if self.patients is None else self.patients[index]
        rows = {key: value[index : index + 1] for key, value in self.inputs.items()}
        return Example(case, patient, rows, None)


class UnlabelledDataset:
    """The cases of a dataset, without their labels.

    Args:
        data: The dataset; whatever labels its cases have are not used.
    """

    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return samples without labels. See `Dataset.batch`."""
        return _without_label(self._data.batch(indices, rngs))

    def example(self, index: int) -> Example:
        """Return a whole case without its label."""
        example = self._data.example(index)
        return replace(example, batch=_without_label(example.batch))


def _without_label(batch: Batch) -> Batch:
    return {key: tensor for key, tensor in batch.items() if key != "label"}


class ConcatDataset:
    """Several datasets one after the other, for pooled training.

    Args:
        datasets: The datasets; their cases are numbered in this order.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = tuple(datasets)
        self._ends = tuple(accumulate(len(dataset) for dataset in self.datasets))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return samples in the order of the indices. See `Dataset.batch`."""
        samples = []
        for index, rng in zip(indices, rngs, strict=True):
            dataset, local = self._find(index)
            samples.append(dataset.batch([local], [rng]))
        return join(samples)

    def example(self, index: int) -> Example:
        """Return one whole case from the dataset that holds it."""
        dataset, local = self._find(index)
        return dataset.example(local)

    def _find(self, index: int) -> tuple[Dataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"no case {index} in {len(self)} cases")
        place = bisect_right(self._ends, index)
        return self.datasets[place], index - (self._ends[place - 1] if place else 0)


def join(samples: Sequence[Batch]) -> Batch:
    """Return batches joined along their first axis; a batch without a mask counts everywhere.

    Raises:
        DataError: If the shapes differ, so that they do not fit into one batch.
    """
    if any("mask" in sample for sample in samples):
        samples = [sample if "mask" in sample else _with_full_mask(sample) for sample in samples]
    _check_shapes(samples)
    return {key: torch.cat([sample[key] for sample in samples]) for key in samples[0]}


def _with_full_mask(sample: Mapping[str, torch.Tensor]) -> Batch:
    return {**sample, "mask": full_mask(sample["image"])}


def full_mask(image: torch.Tensor) -> torch.Tensor:
    """Return the mask (B, *spatial) in which all pixels of (B, C, *spatial) count."""
    return torch.ones(len(image), *image.shape[2:], dtype=torch.bool, device=image.device)


def _check_shapes(samples: Sequence[Batch]) -> None:
    shapes = {tuple(value.shape[1:]) for s in samples for key, value in s.items() if key == "image"}
    if len(shapes) > 1:
        raise DataError(
            f"images of the shapes {sorted(shapes)} (channels first) do not fit into one batch: "
            "set sampling.crop or image.size (and image.channels where the first numbers differ)"
        )


SampleTransform: TypeAlias = "Callable[[Batch, torch.Generator], Batch]"
"""Returns one or several versions of one sample, along the batch axis.

It draws from the generator, which belongs to the sample.
"""


def unchanged(sample: Batch, rng: torch.Generator) -> Batch:
    """Return a sample as it is.

    Args:
        sample: A batch of one.
        rng: Not used.
    """
    return sample
