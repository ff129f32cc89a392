"""Writes what was rebuilt from shared parts: numbers, tables, sentences and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from collegium.diagnostics.attacks.inversion import DEFAULT, Inversion
from collegium.diagnostics.attacks.inverters import BOUND
from collegium.diagnostics.attacks.shared import (
    IMAGE,
    MEAN,
    OWN,
    WITHDRAWN,
    NotTried,
    SharedResult,
    invert_shared,
)
from collegium.diagnostics.attacks.writing import (
    GAIN,
    Written,
    may_draw,
    write_picture,
    write_results,
)
from collegium.evaluation.report.attacks import FOLDER
from collegium.experiment.config.experiment import ExperimentConfig

EXACT = 1e-3
"""Numbers that are so near to an image's own, relative to their norm, are called exact."""


def write_shared(
    config: ExperimentConfig,
    settings: Inversion = DEFAULT,
    *,
    sites: Sequence[str] = (),
    case: int = 0,
    pictures: bool = False,
    notice: Callable[[str], None] = lambda text: None,
) -> Written:
    """Invert shared parts, and write ``shared.json``, ``.csv``, ``.md`` and ``.txt``.

    They go into the folder ``attack`` of the experiment's output folder. Pictures, the true image
    on the left and the rebuilt one on the right, are drawn of phantoms only, unless asked for.

    Args:
        config: the experiment.
        settings: see `invert_shared`, as are those below.
        sites: whose parts.
        case: the number of the image.
        pictures: whether pictures are drawn of other images than phantoms too.
        notice: called with a sentence before each part.

    Raises:
        StorageError: a file cannot be written.
        CollegiumError: what `invert_shared` raises.
    """
    folder, found, left = Path(config.output) / FOLDER, list[SharedResult](), list[NotTried]()
    pictured = list[dict[str, str]]()
    drawn = may_draw(config, asked=pictures)
    for one in invert_shared(config, settings, sites=sites, case=case, notice=notice):
        if isinstance(one, NotTried):
            left.append(one)
            continue
        result = one.result
        found.append(result)
        if drawn:
            words = [result.algorithm, result.site, result.part, result.of, result.attack]
            images = [one.truth, one.image]
            pictured.append(write_picture(folder, words, images, shared_sentence(result)))
    about = {
        "experiment": config.name, "federation": config.federation.name, "seed": config.seeds[0],
        "case": case, "settings": asdict(settings), "not_tried": [asdict(one) for one in left],
    }  # fmt: skip
    sentences = [
        *(shared_sentence(result) for result in found),
        *dict.fromkeys(
            exact_sentence(result)
            for result in found
            if result.attack == BOUND and result.apart <= EXACT
        ),
        *(not_tried_sentence(one) for one in left),
    ]
    rows = [*map(_row, found)]
    return write_results(folder, "shared", about, found, rows, sentences, pictured)


def _row(result: SharedResult) -> list[str]:
    like = result.likeness
    return [
        result.algorithm, result.site, result.part, result.of, result.attack,
        f"{result.numbers} of {result.pixels}", f"{like.psnr:.1f}", f"{like.ssim:.2f}",
        f"{like.correlation:.2f}", f"{like.fitted_psnr:.1f}", f"{result.own_psnr:.1f}",
        f"{like.blank_psnr:.1f}",
    ]  # fmt: skip


def shared_sentence(result: SharedResult) -> str:
    """Return in a sentence what was rebuilt from a part.

    Args:
        result: the result.
    """
    like = result.likeness
    score = f"PSNR {like.psnr:.1f} dB, SSIM {like.ssim:.2f}"
    if result.images > 1:
        score += f" with the most alike of {result.images} images"
    part = f"the part {result.part} that {result.algorithm} sends"
    if result.attack == OWN:
        return (
            f"Without {part}, an attacker's guess at an image of {result.site} is the mean of his "
            f"own images: {score} (a constant guess has {like.blank_psnr:.1f} dB)."
        )
    start = {
        IMAGE: f"From {part} of one image of {result.site}",
        MEAN: f"From {part}, a mean over images of {result.site}",
        WITHDRAWN: f"From {part}, a mean with and one without a patient of {result.site}, from "
        f"which that patient's numbers follow {_exactly(result)}",
    }[result.of]
    numbers = "1 number" if result.numbers == 1 else f"{result.numbers:,} numbers"
    start += f" ({numbers}; the image has {result.pixels:,}), "
    if result.attack == BOUND:
        return f"{start}whoever had its true phases, which nobody sends, would have {score}."
    more = like.psnr >= max(result.own_psnr, like.blank_psnr) + GAIN
    verdict = f"where own images alone have {result.own_psnr:.1f} dB"
    verdict = verdict if more else f"hardly more than own images alone ({result.own_psnr:.1f} dB)"
    return f"{start}an attacker rebuilds this ({result.attack}): {score}; {verdict}."


def _exactly(result: SharedResult) -> str:
    if result.apart <= EXACT:
        return "exactly"
    return f"within {result.apart:.0%} of their norm, as other samples were drawn"


def exact_sentence(result: SharedResult) -> str:
    """Return in a sentence what amplitudes tell of an image without any search.

    Args:
        result: a result on the amplitudes of one image.
    """
    return (
        f"The part {result.part} of {result.algorithm} tells exactly, without any search, an "
        f"image's mean intensity up to its sign, and the autocorrelation of the image without the "
        f"frequencies that were not sent."
    )


def not_tried_sentence(left: NotTried) -> str:
    """Return in a sentence from which parts nothing is rebuilt.

    Args:
        left: the parts, and why.
    """
    *most, last = left.parts
    parts = f"{', '.join(most)} and {last}" if most else last
    return f"What {left.algorithm} sends as {parts} was not attacked: {left.why}."
