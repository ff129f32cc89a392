import io
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console

from collegium.experiment.jobs import Event, _round_event
from collegium.experiment.progress import measurements, show_progress, sites
from collegium.runtime.records import RoundRecord


def event(kind: str, **changes: Any) -> Event:
    values: dict[str, Any] = {
        "kind": kind, "algorithm": "fedavg", "seed": 0, "round": 0, "rounds": 40, "losses": {},
        "metric": "", "scores": {}, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0, "text": "",
    } | changes  # fmt: skip
    return Event(**values)


ROUND = event(
    "round", round=3, losses={"a": 0.5, "b": 0.324}, metric="dice", scores={"a": 0.7, "b": 0.724},
    bytes_up=2_100_000, bytes_down=2_149_000, seconds=2.7,
)  # fmt: skip


def plain(*events: Event, jobs: int | None = 2, times: Sequence[float] = ()) -> list[str]:
    """What is written where there is no terminal, with each event at its time."""
    stream = io.StringIO()
    clock = [0.0]
    with show_progress(Console(file=stream, width=20), jobs, lambda: clock[0]) as observe:
        for one, time in zip_longest(events, times):
            clock[0] = time or 0.0
            observe(one)
    return stream.getvalue().splitlines()


def live(*events: Event, jobs: int | None = 2) -> str:
    """What is written to a terminal, control characters and all."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=150, _environ={"TERM": "xterm"})
    with show_progress(console, jobs) as observe:
        for one in events:
            observe(one)
    return stream.getvalue()


def test_a_round_is_one_plain_line_with_means_bytes_and_time_left():
    lines = plain(event("job"), ROUND, times=[5, 7.7])
    assert lines[1] == (
        "fedavg seed 0  round 3/40  loss 0.412  dice 0.712  up 2.1 MB  down 2.1 MB  eta 100 s"
    )


def test_every_kind_of_event_has_its_line():
    lines = plain(
        event("job", text="goes on after round 2"),
        event("evaluation", round=4, scores={"a": 0.25, "b": 0.75}),
        event("note", algorithm="", text="site b is left out [round 5]"),
        event("done", round=40),
        event("done", seed=1, round=40),
    )
    assert lines == [
        "fedavg seed 0  40 rounds  goes on after round 2",
        "fedavg seed 0  round 4/40  score 0.500",
        "site b is left out [round 5]",
        "fedavg seed 0  done, 1 of 2",
        "fedavg seed 1  done, 2 of 2",
    ]


def test_plain_lines_hold_no_control_characters():
    text = "\n".join(plain(ROUND, event("note", text=":smile: [red]x[/red]")))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert ":smile: [red]x[/red]" in text


def test_undefined_scores_are_left_out_of_the_mean():
    record = RoundRecord(1, {"a": None, "b": 0.5}, scores={"global": {"a": None}})
    assert measurements(_round_event(record, {})) == ["loss 0.500"]


def test_the_time_left_comes_from_the_rounds_of_the_same_job():
    lines = plain(
        event("job"),
        event("round", round=1),
        event("job", seed=1),
        event("round", seed=1, round=30),
        event("round", round=3),
        times=[10, 11, 11, 17, 22],
    )
    left = [line.rpartition("eta ")[2] for line in lines if "eta" in line]
    assert left == ["39 s", "60 s", "2 min"]  # 39 x 1 s, 10 x 6 s, 37 x 12 s / 3


def test_what_comes_after_the_last_round_is_no_round():
    line = plain(event("round", round=41, scores={"a": 0.5}))[0]
    assert line == "fedavg seed 0  after the last round  score 0.500"


def test_a_run_of_unknown_size_counts_what_is_done():
    assert plain(event("done"), jobs=None) == ["fedavg seed 0  done, 1"]


def test_a_terminal_shows_bars_with_sites_and_clears_up():
    text = live(event("job"), ROUND, event("note", text="look [here]"), event("done"))
    for expected in ("fedavg seed 0", "40/40", "a 0.700 b 0.724", "loss 0.412", "look [here]"):
        assert expected in text
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")


def test_a_dumb_terminal_gets_plain_lines():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, _environ={"TERM": "dumb"})
    with show_progress(console, 1) as observe:
        observe(event("done"))
    assert stream.getvalue() == "fedavg seed 0  done, 1 of 1\n"


def test_many_sites_are_shown_as_a_range():
    assert sites({f"s{i}": i / 10 for i in range(7)}) == "7 sites 0.000 to 0.600"
    assert sites({"b": 0.5, "a": 0.25}) == "a 0.250 b 0.500"
