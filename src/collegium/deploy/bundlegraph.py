"""What a bundle's ``configs/inference.json`` holds: the recipe in MONAI's own transforms.

What MONAI does otherwise than Collegium stands there as an expression: which files are an image and
what it is called, which affine of a NIfTI counts, along which axis a volume is cut into slices,
resizing, how colours become grey, channels that a site lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from collegium.data.federation_config import site_channels
from collegium.data.formats import nifti, pictures
from collegium.data.preprocessing import THICK
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.experiment.config.experiment import ExperimentConfig

Sees = Literal["pictures", "slices", "volumes"]
"""What a network is shown: pictures, the slices of volumes one by one, or whole volumes."""

SUFFIXES: Mapping[Sees, tuple[str, ...]] = {
    "pictures": pictures.SUFFIXES,
    "slices": nifti.SUFFIXES,
    "volumes": nifti.SUFFIXES,
}
"""How the names of the files end that a bundle reads, in lower case."""

_FULL_SCALE = "(65535 if x.meta['mode'].startswith('I') else 255)"
_NORMALISE: Mapping[str, dict[str, Any]] = {
    "zscore": {"_target_": "NormalizeIntensityd", "channel_wise": True},
    "zscore_nonzero": {"_target_": "NormalizeIntensityd", "channel_wise": True, "nonzero": True},
    "minmax": {"_target_": "ScaleIntensityd", "minv": 0.0, "maxv": 1.0, "channel_wise": True},
    "symmetric": {"_target_": "ScaleIntensityd", "minv": -1.0, "maxv": 1.0, "channel_wise": True},
    "scale": {
        "_target_": "Lambdad",  # by the range of the file's integer type
        "func": f"$lambda x: x / {_FULL_SCALE}",
    },
}
_CHANNELS: Mapping[str, str] = {
    "grey": "$lambda x: x if len(x) == 1 else "
    "(0.299 * x[:1].double() + 0.587 * x[1:2].double() + 0.114 * x[2:3].double()).float()",
    "rgb": "$lambda x: torch.cat([x, x, x]) if len(x) == 1 else x",
    "green": "$lambda x: x if len(x) == 1 else x[1:2]",
}
_CONVERT = (
    "$lambda image: ((ImageOps.exif_transpose(image) if image.format in ('JPEG', 'MPO') "
    "else image).convert('L' if image.mode in ('1', 'LA') else image.mode "
    "if image.mode in ('L', 'F') or image.mode.startswith('I') else 'RGB'), image.close())[0]"
)
_PLACE: Mapping[str, str] = {
    "place_by": "$lambda x, affine: (x.meta.update(affine=torch.as_tensor(affine), stored=affine), "
    "x.reshape(len(x), *[*x.shape[1:], 1, 1][:3]))[1]",
    "place": "$lambda x: @place_by(x, nibabel.load(x.meta['filename_or_obj']).affine)",
}
"""The sform where it is set: MONAI takes the qform where only that agrees with the voxel sizes."""

_SINGLE: Mapping[str, str] = {
    "single_of": "$lambda thin: thin[-1] if len(thin) == 1 or 2 in thin else None",
    "single": "$lambda x: @single_of([k for k in range(3) if x.shape[k + 1] == 1])",
}
"""The axis across a volume of a single slice, which Collegium reads with two spatial axes."""

_WHOLE = (
    "$lambda x: x if @single(x) is None else @refuse(x.meta['filename_or_obj'] + ': it holds a "
    "single slice, and the network learnt from volumes; leave the file out')"
)
_TURN: Mapping[str, str] = {
    "across": "$lambda x: @along(x) if @single(x) is None else @single(x)",
    "turn_case": "$lambda x: (x.meta.update(across=@across(x)), "
    "x.movedim(x.meta['across'] + 1, -1))[1]",
    "turn": "$lambda case: {**case, 'image': @turn_case(case['image'])}",
    "turn_back": "$lambda case: {**case, 'image': "
    "case['image'].movedim(-1, int(case['image'].meta['across']) + 1)}",
}
"""Moves the axis across the slices to the end, as `collegium.data.preprocessing` does, and back."""

_WRITE: Mapping[str, str] = {
    "mask": "$lambda x: nibabel.Nifti1Image((x[0] if len(x) == 1 else x.movedim(0, -1))"
    ".cpu().numpy().astype(numpy.uint8), x.affine.cpu().numpy())",
    "path": "$lambda x: os.path.join(@output_dir, @case_of(x.meta['filename_or_obj']) + '.nii.gz')",
    "write_mask": "$lambda x, mask: (mask.set_sform(mask.affine, 1), "
    "mask.set_qform(mask.affine, 1), os.makedirs(@output_dir, exist_ok=True), "
    "mask.to_filename(@path(x)), x)[-1]",
    "write": "$lambda x: @write_mask(x, @mask(x))",
}
"""Of a single slice, MONAI's `SaveImage` drops the axis across it and so its place in space."""

_ACQUIRED: Mapping[str, str] = {
    "thick": f"$lambda mm: mm.index(max(mm)) if max(mm) >= {THICK} * sorted(mm)[1] else None",
    "third": "$lambda x: int(nibabel.io_orientation(x.meta['stored'])[2, 0])",
    "along": "$lambda x: @third(x) if @thick(@spacing(x)) is None else @thick(@spacing(x))",
}
"""See `collegium.data.preprocessing.slice_axis`."""

_SPACING = (  # in metres, millimetres or microns, along x, y, z
    "$lambda x: numpy.linalg.norm({1: 1000, 3: 0.001}.get(int(x.meta['xyzt_units']) & 7, 1) "
    "* numpy.asarray(x.affine)[:3, :3], axis=0).tolist()"
)
_RESIZE: Mapping[str, str] = {
    "interpolate": "$torch.nn.functional.interpolate",
    "resize_plane": "$lambda x, size: @interpolate(x, size, mode='bilinear', antialias=True)",
    "resize_space": "$lambda x, size: @interpolate(x, size, mode='trilinear')",
    "resize_slices": "$lambda x, size: "
    "@resize_plane(x.permute(3, 0, 1, 2), size[:2]).permute(1, 2, 3, 0)",
    "resize_image": "$lambda x, size: x if list(x.shape[1:]) == size "
    "else @resize_plane(x[None], size)[0] if len(size) == 2 "
    "else @resize_slices(x, size) if x.shape[3] == size[2] else @resize_space(x[None], size)[0]",
    "resize_case": "$lambda x: "
    "(x.meta.update(before=[*x.shape[1:]]), @resize_image(x, @target_size(x)))[1]",
    "resize": "$lambda case: {**case, 'image': @resize_case(case['image'])}",
    "nearest": "$lambda old, new: (2 * torch.arange(new) + 1) * old // (2 * new)",
    "restore_case": "$lambda x: functools.reduce(lambda y, k: y.index_select(k, "
    "@nearest(y.shape[k], int(x.meta['before'][k - 1])).to(y.device)), range(1, x.ndim), x)",
    "restore": "$lambda case: {**case, 'image': @restore_case(case['image'])}",
}
"""Resizes as `collegium.data.preprocessing` does, and brings masks back by the nearest centre."""


@dataclass(frozen=True)
class Plan:
    """The computation of a bundle.

    Attributes:
        config: The experiment.
        name: The model's name; of a personal model its site.
        sees: What the network is shown.
        network: How the network is made.
        divisors: What sizes are padded to multiples of, axis by axis of the network; empty where
            nothing is padded.
    """

    config: ExperimentConfig
    name: str
    sees: Sees
    network: Mapping[str, Any]
    divisors: Sequence[int]

    @property
    def image(self) -> ImageConfig:
        """The recipe."""
        return self.config.federation.image

    @property
    def task(self) -> TaskConfig:
        """The task."""
        return self.config.federation.task

    @property
    def needs_collegium(self) -> bool:
        """Whether Collegium builds the network, because MONAI does not have it."""
        return str(self.network["_target_"]).startswith("collegium.")

    @property
    def turns(self) -> bool:
        """Whether the axes of volumes come in another order, or the slices are cut."""
        return self.sees == "slices" or (self.sees == "volumes" and self.image.slices_along != "z")


def inference_of(plan: Plan) -> dict[str, Any]:
    """Return the content of ``configs/inference.json``."""
    reader = "from PIL import ImageOps" if plan.sees == "pictures" else "import nibabel"
    return {
        "imports": [
            "$import collections", "$import functools", "$import itertools", "$import numpy",
            "$import os", "$import re", "$import sys", "$import torch",
            "$from safetensors.torch import load_file", f"${reader}",
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/predictions'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "weights": "$load_file(@bundle_root + '/models/model.safetensors')",
        **_files(SUFFIXES[plan.sees]),
        "network_def": plan.network,
        "network": "$@network_def.to(@device)",
        **_turning(plan),
        **_resizing(plan),
        **_colour_constancy(plan),
        "preprocessing": {"_target_": "Compose", "transforms": _preprocessing(plan)},
        "dataset": {
            "_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
        "inferer": _inferer(plan),
        "postprocessing": {"_target_": "Compose", "transforms": _postprocessing(plan)},
        "handlers": _handlers(plan.task),
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "initialize": ["$@network.load_state_dict(@weights)", "$@network.eval()"],
        "run": ["$@evaluator.run()"],
    }  # fmt: skip


def _files(suffixes: Sequence[str]) -> dict[str, str]:
    """Return how images are found and named, as `collegium.data.unlabelled.list_images` does."""
    ends = "|".join(sorted((end.lstrip(".").replace(".", r"\.") for end in suffixes), reverse=True))
    kinds = ", ".join(suffixes)
    return {
        "refuse": "$lambda sentence: sys.exit(sentence)",
        "listed": "$[os.path.join(@dataset_dir, name) for name in sorted(os.listdir(@dataset_dir)) "
        f"if name.lower().endswith({suffixes}) and not name.startswith('.')]",
        "found": "$[path for path in @listed if os.path.isfile(path)] "
        f"or @refuse(@dataset_dir + ' holds no image; add some of the kinds {kinds}')",
        "stem_of": f"$lambda path: re.sub(r'\\.({ends})$', '', os.path.basename(path), flags=re.I)",
        "stems": "$collections.Counter(map(@stem_of, @found))",
        "bases": "$[stem.removesuffix('_0000') for stem in @stems]",
        "channel_of": "$lambda stem: re.fullmatch(r'(.+)_[0-9]{4}', stem)",
        "named": "$lambda stem, channel: channel[1] if channel and channel[1] in @bases else stem",
        "case_of": "$lambda path: @named(@stem_of(path), @channel_of(@stem_of(path)))",
        "files": "$sorted(@found, key=lambda path: (@case_of(path), path)) "
        "if len(@stems) == len(@found) else "
        "@refuse('there are several images called ' + @stems.most_common(1)[0][0] + ' in ' "
        "+ @dataset_dir + '; rename one')",
        "datalist": "$[{'image': files if len(files) > 1 else files[0]} "
        "for files in (list(group) for _, group in itertools.groupby(@files, @case_of))]",
    }


def _turning(plan: Plan) -> dict[str, str]:
    """Return the expressions by which volumes are placed, turned and, as slices, written."""
    if plan.sees == "pictures":
        return {}
    parts = {**_PLACE, **_SINGLE, "spacing": _SPACING}
    if plan.sees == "slices":
        parts |= _WRITE
    if not plan.turns:
        return parts
    if plan.image.slices_along == "acquisition":
        return {**parts, **_ACQUIRED, **_TURN}
    return {**parts, "along": f"$lambda x: {'xyz'.index(plan.image.slices_along)}", **_TURN}


def _resizing(plan: Plan) -> dict[str, str]:
    """Return the expressions by which images are resized, if they are."""
    image, more = plan.image, {}
    if image.spacing is not None:
        have = "@spacing(x)"
        if plan.turns:
            have = "@steps(@spacing(x), int(x.meta['across']))"
            more["steps"] = "$lambda mm, across: [*mm[:across], *mm[across + 1:], mm[across]]"
        zipped = f"zip(x.shape[1:], {have}, {[*image.spacing]})"
        rest = f"*x.shape[{1 + len(image.spacing)}:]"
        size = f"[*(max(1, round(n * old / new)) for n, old, new in {zipped}), {rest}]"
    elif isinstance(image.size, int):
        side = "max" if image.side == "longest" else "min"
        size = f"[max(1, round(n * {image.size} / {side}(x.shape[1:]))) for n in x.shape[1:]]"
    elif image.size is not None:
        size = f"[{', '.join(map(str, image.size))}, *x.shape[{1 + len(image.size)}:]]"
    else:
        return {}
    if plan.sees == "slices":  # a single slice stays one
        size = f"[*{size}[:2], 1] if x.shape[3] == 1 else {size}"
    return {**_RESIZE, **more, "target_size": f"$lambda x: {size}"}


def _colour_constancy(plan: Plan) -> dict[str, str]:
    """Return the expressions by which the light's colour is taken out, if it is."""
    norm = plan.image.colour_constancy
    if norm is None:
        return {}
    return {
        "full": f"$lambda x: {_FULL_SCALE}",
        "light": f"$lambda x: (x.double() ** {norm}).flatten(1).mean(1) ** (1 / {norm})",
        "gains": "$lambda e: torch.where(e > 0, e.norm() / 3 ** 0.5 / e, 1.0).view(3, 1, 1)",
        "constant": "$lambda x: (x * @gains(@light(x / @full(x)))).clip(0, @full(x)).float()",
    }


def _preprocessing(plan: Plan) -> list[dict[str, Any]]:
    image, steps = plan.image, _loading(plan)
    federation = plan.config.federation
    channels = site_channels(federation, plan.name) if plan.name in federation.sites else None
    if image.channels in _CHANNELS:
        steps.append({"_target_": "Lambdad", "func": _CHANNELS[image.channels]})
    if channels is not None and len(channels) < (image.inputs or 0):
        have = f"$lambda x: x[{[*channels]}] if len(x) == {image.inputs} else x"
        steps.append({"_target_": "Lambdad", "func": have})
    if plan.turns:
        steps.append({"_target_": "Lambda", "func": "@turn", "inv_func": "@turn_back"})
    if image.clip is not None:
        low, high = image.clip
        steps += [
            {"_target_": "ThresholdIntensityd", "threshold": end, "above": end == low, "cval": end}
            for end in (low, high)
        ]
    if image.size is not None or image.spacing is not None:
        steps.append({"_target_": "Lambda", "func": "@resize", "inv_func": "@restore"})
    if image.colour_constancy is not None:
        steps.append({"_target_": "Lambdad", "func": "@constant"})
    if image.normalise != "none":
        steps.append({**_NORMALISE[image.normalise]})
    if channels is not None:
        places = [channels.index(k) if k in channels else None for k in range(image.inputs or 0)]
        place = f"torch.stack([0 * x[0] if k is None else x[k] for k in {places}])"
        steps.append({"_target_": "Lambdad", "func": f"$lambda x: {place}"})
    steps += _as_the_network_takes(plan)
    return [step if step["_target_"] == "Lambda" else {**step, "keys": "image"} for step in steps]


def _loading(plan: Plan) -> list[dict[str, Any]]:
    """Return the steps that read an image; volumes run towards right, front and head."""
    load = {"_target_": "LoadImaged", "ensure_channel_first": True}
    if plan.sees == "pictures":
        how = {"reader": "PILReader", "reverse_indexing": False, "converter": _CONVERT}
        return [{**load, **how}]
    whole = [{"_target_": "Lambdad", "func": _WHOLE}] if plan.sees == "volumes" else []
    return [
        {**load, "reader": "NibabelReader"},
        {"_target_": "Lambdad", "func": "@place"},
        {"_target_": "Orientationd", "axcodes": "RAS", "labels": ["LR", "PA", "IS"]},
        *whole,
    ]


def _as_the_network_takes(plan: Plan) -> list[dict[str, Any]]:
    """Return the steps that add the channels of neighbouring slices, and that pad."""
    steps: list[dict[str, Any]] = []
    neighbours = plan.config.federation.sampling.neighbours
    if neighbours:
        around = f"for k in range({-neighbours}, {neighbours + 1})"
        moved = "x[..., (torch.arange(x.shape[-1]) + k).clamp(0, x.shape[-1] - 1)]"
        each = moved if plan.sees == "slices" else "x"
        steps.append({"_target_": "Lambdad", "func": f"$lambda x: torch.cat([{each} {around}])"})
    if plan.divisors and plan.config.inference.window is None:
        along = [1] if plan.sees == "slices" else []
        steps.append({"_target_": "DivisiblePadd", "k": [*plan.divisors, *along]})
    return steps


def _inferer(plan: Plan) -> dict[str, Any] | str:
    inference, slices = plan.config.inference, plan.sees == "slices"
    window = inference.window
    if plan.task.name == "classification" and slices:  # the mean of the slices' probabilities
        return (
            "$lambda image, network: torch.cat([network(part) for part in image.as_tensor()[0]"
            f".movedim(-1, 0).split({inference.batch_size})]).softmax(1).mean(0, keepdim=True)"
        )
    if plan.task.name == "classification" or (window is None and not slices):
        return {"_target_": "SimpleInferer"}
    return {
        "_target_": "SliceInferer" if slices else "SlidingWindowInferer",
        "roi_size": [-1, -1] if window is None else [*window],
        "sw_batch_size": inference.batch_size,
        "overlap": inference.overlap,
        **({"spatial_dim": 2} if slices else {}),
    }


def _handlers(task: TaskConfig) -> list[dict[str, Any]]:
    """Return what writes the probabilities of a classification, image by image."""
    if task.name != "classification":
        return []
    return [
        {
            "_target_": "ClassificationSaver",
            "output_dir": "@output_dir",
            "batch_transform": "$lambda batch: [item['image'].meta for item in batch]",
            "output_transform": "$lambda output: [item['pred'] for item in output]",
        }
    ]


def _postprocessing(plan: Plan) -> list[dict[str, Any]]:
    task = plan.task
    if task.name == "classification":
        means = plan.sees == "slices"  # probabilities already
        return [] if means else [{"_target_": "Activationsd", "keys": "pred", "softmax": True}]
    choose = {"threshold": 0.0} if task.regions else {"argmax": True}  # a channel for each region
    steps: list[dict[str, Any]] = [
        {"_target_": "AsDiscreted", "keys": "pred", **choose},
        {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing",
         "orig_keys": "image", "nearest_interp": True, "to_tensor": True},
    ]  # fmt: skip
    save: dict[str, Any] = {
        "_target_": "SaveImaged", "keys": "pred", "output_dir": "@output_dir",
        "output_postfix": "", "separate_folder": False, "resample": False,
        "output_dtype": "$torch.uint8",
        "output_name_formatter": "$lambda meta, saver: "
            "{'subject': @case_of(meta['filename_or_obj']) + '.mask', 'idx': None}",  # cut off
    }  # fmt: skip
    if plan.sees == "pictures":  # MONAI writes columns before rows
        turn = {"_target_": "Transposed", "keys": "pred", "indices": [0, 2, 1]}
        return [*steps, turn, {**save, "output_ext": ".png"}]
    if plan.sees == "slices":
        return [*steps, {"_target_": "Lambdad", "keys": "pred", "func": "@write"}]
    return [*steps, save]
