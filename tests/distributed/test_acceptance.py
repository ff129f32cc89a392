"""What an operator accepts, and what a site refuses until then."""

import json

import pytest

from collegium.distributed.acceptance import Acceptance
from collegium.errors import ConfigError

ONE, TWO = "ab" * 16, "ac" * 16


@pytest.fixture
def acceptance(tmp_path):
    found = Acceptance(tmp_path)
    for digest, name in ((ONE, "first"), (TWO, "second")):
        with pytest.raises(ConfigError):
            found.check("alder", digest, {"settings": {"name": name}})
    return found


def test_a_refusal_says_which_experiment_and_what_to_do(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Acceptance(tmp_path).check("alder", ONE, {})
    assert str(caught.value) == (
        f"site 'alder' has not accepted the experiment {ONE}; its operator reads it with "
        f"'collegium site experiments SITE' and accepts it with 'collegium site accept SITE "
        f"{ONE}', where SITE is the site's own file"
    )
    assert caught.value.exit_code == 2


def test_what_was_asked_for_is_listed_with_its_description(acceptance):
    assert acceptance.listed() == {
        ONE: (False, {"settings": {"name": "first"}}),
        TWO: (False, {"settings": {"name": "second"}}),
    }


def test_an_experiment_is_accepted_by_its_first_digits_and_no_other_with_it(acceptance, tmp_path):
    acceptance.accept("ac")
    assert [(digest, yes) for digest, (yes, _) in acceptance.listed().items()] == [
        (ONE, False),
        (TWO, True),
    ]
    Acceptance(tmp_path).check("alder", TWO, {"settings": {"name": "second"}})
    with pytest.raises(ConfigError):
        acceptance.check("alder", ONE, {})


def test_the_description_that_was_read_is_the_one_that_is_kept(acceptance, tmp_path):
    acceptance.accept(ONE)
    kept = json.loads((tmp_path / "accepted" / f"{ONE}.json").read_text())
    assert kept == {"settings": {"name": "first"}}
    assert not (tmp_path / "asked" / f"{ONE}.json").exists()


@pytest.mark.parametrize(("digits", "count"), [("a", 2), ("", 2), ("ad", 0), (ONE + "0", 0)])
def test_digits_that_mean_no_single_experiment_accept_none(acceptance, digits, count):
    with pytest.raises(ConfigError, match=f"^{count} experiments .* {digits!r}; .*{ONE}, {TWO}"):
        acceptance.accept(digits)
    assert not any(yes for yes, _ in acceptance.listed().values())


def test_where_nothing_was_asked_for_there_is_nothing_to_accept(tmp_path):
    assert Acceptance(tmp_path).listed() == {}
    with pytest.raises(ConfigError, match="there are: none"):
        Acceptance(tmp_path).accept("a")


@pytest.mark.parametrize("digits", ["../accepted/x", "*", "[a]"])
def test_digits_are_no_pattern_and_no_path(acceptance, digits):
    with pytest.raises(ConfigError, match=r"^0 experiments"):
        acceptance.accept(digits)
