"""The page of an adaptation, as `collegium adapt` writes it."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from collegium.evaluation.report.account import CasePicture, mean_scores, write_account

ROUTED: dict[str, Any] = {
    "layers": ["down.0", "<i>up.0"],
    "sources": ["global", "<b>Quito"],
    "values": [[0.25, 0.75], [0.5, 0.5]],
    "deviations": [[0.01, 0.02], [0.03, 0.04]],
    "variation": [0.125, 0.3],
    "variation_deviation": [0.05, 0.0125],
}


def account(**changes: Any) -> dict[str, Any]:
    return {
        "adapter": {
            "name": "routing",
            "label": "<b>mine",
            "epochs": 3,
            "terms": ("shape", "<i>entropy"),
            "transforms": False,
            "crop": None,
        },
        "models": "demo: iopfl, seed 5",
        "seed": 5,
        "handed_out": ["global", "<b>Quito"],
        "cases": 2,
        "classes": None,
        "seconds": 1.25,
        "collegium": "0.1.0",
        "sources": ["global", "<b>Quito"],
        "steps": 3,
        "losses": [{"step": k, "total": 2.0 - k, "entropy": 1.0} for k in range(2)],
        "chosen": 1,
        "over": "pass",
        "coefficients": ROUTED,
        "notes": ["Seen by <b>nobody."],
        **changes,
    }


def written(folder: Path, content: dict[str, Any], **scores: Any) -> str:
    pictures = [CasePicture("<b>case 1", Image.new("RGB", (8, 8), "white"))]
    write_account(folder / "account.html", content, pictures, **scores)
    return (folder / "account.html").read_text(encoding="utf-8")


def test_coefficients_and_weight_variation_stand_in_one_table(tmp_path: Path) -> None:
    text = written(tmp_path, account())
    table = text[text.index('<table class="heat fine">') :]
    rows = re.findall(r"<tr>(.*)</tr>", table[: table.index("</table>")])
    cells = [re.sub(r"(<[^>]+>|\s)+", " ", row).strip() for row in rows]
    assert cells[1:] == [
        "1 down.0 0.250 &plusmn; 0.010 0.750 &plusmn; 0.020 12.50 &plusmn; 5.00",
        "2 &lt;i&gt;up.0 0.500 &plusmn; 0.030 0.500 &plusmn; 0.040 30.00 &plusmn; 1.25",
        "mean 0.375 0.625 21.25",
    ]
    assert (
        "Weight variation of &lt;b&gt;mine over 2 layers; largest at &lt;i&gt;up.0, 30 %." in text
    )


def test_an_account_without_weight_variation_shows_the_rest(tmp_path: Path) -> None:
    old = {key: ROUTED[key] for key in ("layers", "sources", "values")}
    text = written(tmp_path, account(coefficients=old))
    assert "0.250</td>" in text
    assert "eight variation" not in text
    assert "Losses over passes 0 to 1. Last values: total 1; entropy 1." in text


def plain(text: str) -> str:
    """What a reader reads."""
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def test_steps_and_passes_and_the_seed_are_told_apart(tmp_path: Path) -> None:
    text = plain(written(tmp_path, account(steps=12)))
    assert "in 12 optimiser steps; the state after pass 1 over all cases predicts." in text
    assert "Whatever is random follows from the seed 5." in text
    none_better = plain(written(tmp_path, account(chosen=0)))
    assert "the state before the first pass over all cases had the least loss" in none_better


def test_settings_are_folded_and_written_in_words(tmp_path: Path) -> None:
    text = written(tmp_path, account())
    folded = plain(text[text.index("<details>") : text.index("</details>")])
    for setting in ("epochs 3", "terms shape, &lt;i&gt;entropy", "transforms no", "crop none",
                    "seed 5"):  # fmt: skip
        assert setting in folded
    assert "(&#39;" not in text


def test_a_classification_counts_its_classes_and_shows_no_masks(tmp_path: Path) -> None:
    text = written(tmp_path, account(classes={"well": 0, "<b>ill": 2}))
    rows = [plain(row) for row in re.findall(r"<tr>.*?</tr>", text)]
    assert {"well 0", "&lt;b&gt;ill 2"} <= {*rows}
    assert "predictions.csv" in text
    assert "masks" not in plain(text)


def test_an_adapter_without_routing_and_training_has_neither_table_nor_chart(
    tmp_path: Path,
) -> None:
    text = written(tmp_path, account(coefficients=None, losses=[], steps=0, chosen=None))
    assert "Nothing was trained." in text
    assert "<svg" not in text
    assert "What each layer takes" not in text


def test_the_page_escapes_names_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    text = written(tmp_path, account())
    assert not re.search(r"<[bi]>", text)
    assert text.count("&lt;b&gt;Quito") > 2
    sources = re.findall(r'(?:src|href)="([^"]{,20})', text)
    assert sources
    assert all(source.startswith("data:image/webp") for source in sources)
    assert not re.search(r"<script|<link|@import|url\(", text)
    assert text.count("<table") == text.count("<caption")


def test_scores_are_means_over_the_patients_where_they_are_defined(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"case": "a", "patient": "p", "dice": 0.5, "hd95": None},
        {"case": "b", "patient": "q", "dice": 0.75, "hd95": None},
        {"case": "c", "patient": "q", "dice": None, "hd95": None},
        {"case": "d", "patient": "q", "dice": 0.25, "hd95": None},
    ]
    assert mean_scores(rows) == {"dice": (pytest.approx(0.5), 2), "hd95": (None, 0)}
    assert mean_scores([]) == {}
    text = written(tmp_path, account(), scores=rows)
    assert '<th scope="row">dice</th><td>0.500</td><td>2</td>' in text
    assert '<th scope="row">hd95</th><td>undefined</td><td>0</td>' in text
