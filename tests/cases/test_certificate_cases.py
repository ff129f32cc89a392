"""run03 of the field cases: certificates that are not good today."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from collegium.errors import ConfigError, DataError
from collegium.runtime.engines.certificates import check_certificates, read_certificates


def test_run03_an_expired_certificate_names_file_subject_and_date(
    folder: Path, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as error:
        check_certificates(folder / "expired.pem")
    assert "expired.pem: the certificate of synthetic-fl-server.invalid expired on" in str(
        error.value
    )
    assert values["expired_not_after"][:10] in str(error.value)


def test_run03_one_that_is_not_valid_yet_asks_for_the_clock(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"not valid before 2099-01-01.*clock right"):
        check_certificates(folder / "not_yet_valid.pem", datetime(2026, 11, 28, tzinfo=UTC))


def test_run03_sibling_both_are_good_inside_their_dates(folder: Path) -> None:
    (old,) = check_certificates(folder / "expired.pem", datetime(2020, 1, 15, tzinfo=UTC))
    assert (old.begins, old.ends) == (
        datetime(2020, 1, 1, tzinfo=UTC),
        datetime(2020, 2, 1, tzinfo=UTC),
    )
    (new,) = check_certificates(folder / "not_yet_valid.pem", datetime(2099, 6, 1, tzinfo=UTC))
    assert new.subject == "synthetic-fl-server.invalid"


def test_run03_sibling_what_is_no_certificate_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("hello")
    with pytest.raises(DataError, match=r"a\.pem cannot be read \(it holds no certificate\)"):
        read_certificates(tmp_path / "a.pem")
    with pytest.raises(DataError, match=r"b\.pem cannot be read \(No such file"):
        read_certificates(tmp_path / "b.pem")
