"""The field cases of tables, and for each a sibling of the same kind."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.local import Local
from collegium.core.dataset import Batch, TensorDataset
from collegium.data.columns import read_columns
from collegium.data.federation import find_cases, open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.settings import TaskConfig
from collegium.data.site import Site
from collegium.data.splits import SplitConfig
from collegium.data.table_site import rows_to_predict
from collegium.data.tables import Table, TableConfig, encode, read_table, vocabulary
from collegium.errors import DataError
from collegium.experiment.scaling import FILE, agree_on_scaling, read_scaling
from collegium.models.factory import build_model
from collegium.models.standardised import Standardised
from collegium.runtime.federation import Federation
from collegium.runtime.simulation import Simulated, simulate
from collegium.tasks import ClassificationTask
from collegium.training.loop import TrainingConfig

TASK = TaskConfig("classification", ("0", "1"))


def federation(folder: Path, table: TableConfig, *names: str) -> FederationConfig:
    """Sites a, b with the tables site_a.csv, site_b.csv, all of whose rows train."""
    sites = {name: SiteConfig(table=f"site_{name}.csv") for name in names}
    return FederationConfig(
        "case", sites, str(folder), task=TASK, table=table, splits=SplitConfig(0, 0)
    )


def means(table: Table) -> list[float]:
    found: list[float] = np.nanmean(table.numbers, 0).tolist()
    return found


def test_tab01_question_marks_and_zero_as_missing(folder: Path, values: dict[str, Any]) -> None:
    config = TableConfig("label", ("age", "chol"), {"thal": ("3", "6", "7")})
    a, b = (read_table(folder / f"site_{name}.csv", config) for name in "ab")
    assert {name: a.missing[name] for name in ("chol", "thal")} == values["a_missing"]
    assert np.nanmean(a.numbers[:, 1]) == pytest.approx(values["a_chol_mean"])
    assert a.notes == ()
    assert b.missing["thal"] == values["b_thal_missing"]
    assert np.isnan(b.numbers[:, 1]).all() == values["b_chol_all_zero"]
    assert b.notes[0].startswith("site_b.csv: chol is 0 in every row and is taken as missing")
    told = read_table(
        folder / "site_b.csv", TableConfig("label", ("chol",), zero_is_real=("chol",))
    )
    assert told.numbers.tolist() == [[0], [0], [0], [0]]


def test_tab01_sibling_dashes_and_words_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("chol;label\n-;0\nnicht gemessen;1\n 201 ;1\n-9;0\n")
    config = TableConfig("label", ("chol",), missing=("nicht gemessen", "-9"))
    assert read_table(tmp_path / "t.csv", config).missing == {"chol": 3}


def test_tab02_decimal_comma_semicolon(folder: Path, values: dict[str, Any]) -> None:
    config = TableConfig("label", ("crea", "hb"), case="id")
    for site, stated_means in values.items():
        found = means(read_table(folder / f"site_{site}.csv", config))
        assert found == pytest.approx([stated_means["crea"], stated_means["hb"]])
    columns, separator = read_columns(folder / "site_de.csv")
    assert ([*columns], separator) == (["id", "crea", "hb", "label"], ";")


def test_tab02_sibling_tabs_a_mark_and_quoted_commas(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(
        "\ufeffid\tcrea\tlabel\r\n1\t1,05\t0\r\n2\t0,9\t1\r\n".encode()
    )
    (tmp_path / "q.csv").write_text('id,crea,label\n1,"1,05",0\n')
    config = TableConfig("label", ("crea",))
    assert means(read_table(tmp_path / "t.tsv", config)) == pytest.approx([0.975])
    with pytest.raises(DataError, match=r"cells are separated by ','.*set table\.decimal to ','"):
        read_table(tmp_path / "q.csv", config)


def test_tab03_bom_and_leading_zeros(folder: Path, values: dict[str, Any]) -> None:
    site = SiteConfig(folder="images", manifest="clinical.csv")
    config = FederationConfig("case", {"a": site}, str(folder), task=TASK)
    cases = find_cases(config, "a")
    assert len(cases) == values["joined"]
    assert [case.patient for case in cases] == values["ids"]
    assert [case.images[0].stem for case in cases] == values["ids"]
    assert [case.target for case in cases] == ["1", "0", "1"]
    columns, _ = read_columns(folder / "clinical.csv")
    assert next(iter(columns)) == values["first_column"]


def test_tab03_sibling_ids_that_lost_their_zeros_and_one_without_image(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("IMG_0007", "IMG_0042"):
        (tmp_path / "images" / f"{name}.png").write_bytes(b"x")
    site = SiteConfig(folder="images", manifest="c.csv")
    config = FederationConfig("case", {"a": site}, str(tmp_path), task=TASK)
    (tmp_path / "c.csv").write_text("\ufeffPatient_ID;class\n7;1\n42;0\n", "utf-8")
    assert [(case.patient, case.target) for case in find_cases(config, "a")] == [
        ("7", "1"), ("42", "0"),
    ]  # fmt: skip
    (tmp_path / "c.csv").write_text("patient_id;class\n7;1\n42;0\n0100;1\n", "utf-8")
    with pytest.raises(DataError, match=r"line 4 of .*c\.csv: .*images has no image of 0100"):
        find_cases(config, "a")


def tabnet(config: TableConfig, **settings: Any) -> Any:
    return build_model(
        "tabnet", in_features=config.features, out_features=2, groups=config.groups, **settings
    )


def train(sites: Sequence[Site], config: TableConfig, **settings: Any) -> Simulated:
    training = TrainingConfig(batch_size=settings.pop("batch_size", 32), local_epochs=1, lr=0.02)
    return simulate(
        settings.pop("algorithm", FedAvg()), sites, lambda: tabnet(config, **settings),
        ClassificationTask(2), rounds=1, training=training,
    )  # fmt: skip


def test_tab04_unseen_category(folder: Path, values: dict[str, Any], tmp_path: Path) -> None:
    words = vocabulary((folder / f"site_{name}_train.csv" for name in "ab"), ["stage"])
    assert [*words["stage"]] == values["vocabulary"]
    config = TableConfig("label", ("age",), words)
    assert len(config.groups[1]) == values["embedding_rows_with_unknown"]
    sites = open_federation(federation(folder, config, "a_train", "b_train"), tmp_path, 0, None)
    codes = {
        name: read_table(folder / f"site_{name}_train.csv", config).codes[:, 0].tolist()
        for name in ("a", "b")
    }
    assert codes == {"a": [0, 1, 2, 0], "b": [1, 3, 1]}
    done = train([*sites.values()], config, virtual_batch_size=2)
    test = read_table(folder / "site_b_test.csv", config)
    assert test.unknown == values["unknown_in_test"]
    assert "stage holds V, which is not in its vocabulary, in 1 of 3 rows" in test.notes[0]
    network = tabnet(config, virtual_batch_size=2)
    assert done.model is not None
    network.load_state_dict(dict(done.model.items()))
    data = rows_to_predict(test, config, TASK)
    for index in range(3):
        chances = ClassificationTask(2).predict(network.eval(), data.example(index))
        assert float(chances.detach().sum()) == pytest.approx(1)


def test_tab04_sibling_other_case_and_a_category_of_one_site(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ward,label\nnorth,0\n3,1\n")
    (tmp_path / "b.csv").write_text("label,ward\n0,3.0\n1,?\n1,10\n")
    words = vocabulary([tmp_path / "a.csv", tmp_path / "b.csv"], ["ward"])
    assert words == {"ward": ("3", "10", "north")}
    table = read_table(tmp_path / "b.csv", TableConfig("label", (), words))
    assert table.codes[:, 0].tolist() == [0, 3, 1]


def test_tab05_column_order_and_missing_column(
    folder: Path, values: dict[str, Any], tmp_path: Path
) -> None:
    config = TableConfig("label", ("age", "bmi", "crp"))
    a, b = (means(read_table(folder / f"site_{name}.csv", config)) for name in "ab")
    for place, column in enumerate(("age", "bmi", "crp")):
        assert [a[place], b[place]] == pytest.approx(values[f"{column}_mean"])
    open_federation(federation(folder, config, "a", "b"), tmp_path, 0, None)
    (missing,) = values["missing"]["site_c"]
    with pytest.raises(DataError, match=rf"^site c: site_c\.csv has no column {missing} "):
        open_federation(federation(folder, config, "a", "b", "c"), tmp_path, 0, None)


def test_tab05_missing_everywhere_at_c_where_that_is_chosen(folder: Path, tmp_path: Path) -> None:
    config = TableConfig("label", ("age", "bmi", "crp"), absent="missing", indicators=True)
    sites = open_federation(federation(folder, config, "a", "b", "c"), tmp_path, 0, None)
    rows = torch.cat([sites["c"].train.example(index).batch["image"] for index in range(2)])
    assert rows[:, 2].tolist() == [0, 0]
    assert rows[:, 3:].tolist() == [[0, 0, 1], [0, 0, 1]]


def test_tab05_sibling_an_extra_column_and_other_order_of_categories(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("s,age,label\nx,1,0\nz,2,1\n")
    (tmp_path / "b.csv").write_text("label,note,age,s\n1,hi,2,z\n0,,1,x\n")
    config = TableConfig("label", ("age",), {"s": ("x", "z")}, scale="none")
    a, b = (read_table(tmp_path / f"{name}.csv", config) for name in "ab")
    assert encode(a, config, None).tolist() == encode(b, config, None)[::-1].tolist()


def test_tab07_constant_feature_pooled_scaling(
    folder: Path, values: dict[str, Any], tmp_path: Path
) -> None:
    config = TableConfig("label", ("crea", "ward"), scale="federation")
    sites = open_federation(federation(folder, config, "a", "b"), tmp_path, 0, None)
    network = Standardised(build_model("logistic", in_features=2, out_features=2), 2)
    unscaled = Federation(sites, lambda: network, ClassificationTask(2))
    agree_on_scaling(unscaled, config, tmp_path / "run")
    scaling = read_scaling(tmp_path / "run" / FILE)
    assert scaling.shift[0] == pytest.approx(values["mean"], abs=5e-7)
    assert 1 / scaling.factor[0] == pytest.approx(values["sd"], abs=5e-7)
    table = read_table(folder / "site_b.csv", config)
    scaled = scaling(table.numbers)
    assert scaled[:, 0] == pytest.approx([values["site_b_scaled"]] * 2, abs=5e-7)
    assert scaled[:, 1].tolist() == [values["ward_scaled"]] * 2
    assert "site_b.csv: ward is 1 in every row" in table.notes


def test_tab07_sibling_constant_at_one_site_only_scales_to_0_there(tmp_path: Path) -> None:
    (tmp_path / "site_a.csv").write_text("crea,label\n2,0\n4,1\n")
    (tmp_path / "site_b.csv").write_text("crea,label\n5,0\n5,1\n")
    config = TableConfig("label", ("crea",))
    sites = open_federation(federation(tmp_path, config, "a", "b"), tmp_path, 0, None)
    rows = {
        name: [site.train.example(index).batch["image"].item() for index in range(2)]
        for name, site in sites.items()
    }
    assert rows == {"a": [-1, 1], "b": [0, 0]}


class Noted(TensorDataset):
    """Notes which rows were drawn, batch by batch."""

    drawn: list[list[int]]

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        self.drawn.append([*indices])
        return super().batch(indices, rngs)


def noted(sites: dict[str, Site]) -> list[Site]:
    found = []
    for name, site in sites.items():
        assert isinstance(site.train, TensorDataset)
        data = Noted(site.train.inputs)
        object.__setattr__(data, "drawn", [])
        found.append(Site(name, data, site.val, site.test))
    return found


@pytest.mark.parametrize(
    ("batch_size", "batches"),
    [
        (32, {"a": [33], "b": [20]}),
        (8, {"a": [8, 8, 8, 9], "b": [8, 8, 4]}),
        (1024, {"a": [33], "b": [20]}),
    ],
)
def test_tab09_last_batch_of_one(
    folder: Path,
    values: dict[str, Any],
    tmp_path: Path,
    batch_size: int,
    batches: dict[str, list[int]],
) -> None:
    """The last row of site a, alone in its batch, joins the batch before it."""
    config = TableConfig("label", ("x1", "x2"))
    sites = noted(open_federation(federation(folder, config, "a", "b"), tmp_path, 0, None))
    done = train(
        sites, config, batch_size=batch_size, virtual_batch_size=8, algorithm=Local()
    )  # fmt: skip
    rows = {"a": values["site_a_rows"], "b": values["site_b_rows"]}
    for site in sites:
        assert isinstance(site.train, Noted)
        assert [len(batch) for batch in site.train.drawn] == batches[site.name]
        assert sorted(chain(*site.train.drawn)) == [*range(rows[site.name])]
        assert len(site.train.drawn) >= values["site_b_updates_at_least"]
    a, b = (done.personal[name] for name in "ab")
    assert not torch.equal(a["head.weight"], b["head.weight"])
    assert all(torch.isfinite(tensor).all() for tensor in (*a.values(), *b.values()))
    averaged = train(
        noted(open_federation(federation(folder, config, "a", "b"), tmp_path, 0, None)), config,
        batch_size=batch_size, virtual_batch_size=8,
    )  # fmt: skip
    assert averaged.model is not None
    expected = (33 * a["head.weight"] + 20 * b["head.weight"]) / 53
    torch.testing.assert_close(averaged.model["head.weight"], expected)


def test_tab09_sibling_a_site_of_one_row(tmp_path: Path) -> None:
    (tmp_path / "site_a.csv").write_text("x1,label\n" + "".join(f"{n},{n % 2}\n" for n in range(9)))
    (tmp_path / "site_b.csv").write_text("x1,label\n4,1\n")
    config = TableConfig("label", ("x1",), scale="none")
    sites = noted(open_federation(federation(tmp_path, config, "a", "b"), tmp_path, 0, None))
    done = train(sites, config, batch_size=8, virtual_batch_size=8, algorithm=Local())
    drawn = [site.train.drawn for site in sites if isinstance(site.train, Noted)]
    assert [[len(batch) for batch in site] for site in drawn] == [[9], [1]]
    assert all(torch.isfinite(tensor).all() for tensor in done.personal["b"].values())
