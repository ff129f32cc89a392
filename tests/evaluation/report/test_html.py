import base64
import html
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from collegium.errors import DataError
from collegium.evaluation.report.html import write_report
from collegium.evaluation.results import results_frame, write_results, write_rows
from collegium.runtime.state import Store

SITES = ("Basel", "Kyoto", "Leeds", "<b>Quito")


class Page(HTMLParser):
    """What a browser would see: text, attributes, and whether every element is closed."""

    VOID = frozenset({"meta", "img", "br", "link", "input"})
    SHAPES = frozenset({"line", "circle", "path", "polyline", "rect"})

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.attributes, self.tags = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in self.SHAPES, f"<{tag}/> is not closed in HTML"
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.text.append(data)

    def values(self, tag, name):
        return [value for t, n, value in self.attributes if (t, n) == (tag, name)]


@pytest.fixture(scope="module")
def output(tmp_path_factory, make_run):
    return make_run(tmp_path_factory.mktemp("run"), outside=True)


@pytest.fixture(scope="module")
def text(output):
    return write_report(output).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def words(page):
    return " ".join(" ".join(page.text).split())


def test_the_page_is_well_formed_and_refers_to_nothing_outside(text, page):
    assert page.open == []
    for tag, name, value in page.attributes:
        if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
            assert value.startswith(("#", "data:")), f"<{tag} {name}={value[:60]}>"
    assert not {"link", "iframe", "object", "embed", "img"}.intersection(page.tags)
    assert "@import" not in text
    urls = re.findall(r"url\(([^)]{,20})", text)
    assert all(url.startswith(('"data:', "#figure-")) for url in urls)
    policies = [v for _, name, v in page.attributes if name == "content" and "default-src" in v]
    assert policies[0].startswith("default-src 'none';")


def test_ids_are_unique_and_every_link_has_a_target(page):
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value for value in page.values("a", "href") if value.startswith("#")}
    assert {link[1:] for link in links} <= set(ids)
    pages = ["overview", "results", "site-b-quito", "site-basel", "site-kyoto", "site-leeds",
             "site-oslo", "outside", "distances", "curves", "figures", "routing", "cases",
             "traffic", "ledger", "reproduce"]  # fmt: skip
    assert [v for v in page.values("a", "href") if v[1:] in pages][: len(pages)] == [
        f"#{name}" for name in pages
    ]


def test_headings_are_in_order_and_there_is_one_of_each_landmark(page):
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    jumps = [(a, b) for a, b in pairwise(levels) if b > a + 1]
    assert not jumps
    assert [page.tags.count(tag) for tag in ("main", "nav", "footer")] == [1, 1, 1]


def test_every_table_has_a_caption_and_every_header_a_scope(page):
    assert page.tags.count("table") == page.tags.count("caption") > 20
    headers = page.tags.count("th")
    assert headers > 50
    assert len(page.values("th", "scope")) == headers


def test_every_picture_and_drawing_says_what_it_is_or_hides(page):
    roles = page.values("svg", "role").count("img")
    assert page.values("svg", "aria-label").count("") == 0
    assert len(page.values("svg", "aria-label")) == roles
    hidden = page.values("svg", "aria-hidden").count("true")
    frames = len(page.values("svg", "overflow"))  # inside a drawing that says what it is
    assert roles + hidden + frames == page.tags.count("svg")
    labels = " ".join(page.values("svg", "aria-label"))
    assert "Basel: Dice on validation over rounds 1 to 12. Last values: Local personal 0." in labels
    texts = [v for v in page.values("span", "aria-label") if "contours" in v]
    # every method of a site once on the site's page, the first one also among the cases
    # and all three adapters of Oslo on both
    assert len(texts) == 4 * 6 * 4 + 4 * 4 + 2 * 3 * 4
    assert "Basel, FedBN personal, worst case c003: contours of truth and prediction over the " \
        "image, Dice 0.700" in texts  # fmt: skip


def test_every_site_and_method_is_named(page):
    said = words(page)
    for name in (*SITES, "Local personal", "FedAvg global", "FedBN personal", "Ditto global",
                 "Ditto personal", "my own global", "Ditto + Tent", "Ditto + routing"):  # fmt: skip
        assert name in said


def test_names_are_escaped_everywhere(text, page):
    assert not {"b", "i"}.intersection(page.tags)
    assert "<b>Quito" not in text
    assert "<i>Oslo" not in text
    assert "those of <i>Oslo." in words(page)


def test_a_configuration_cannot_break_out_of_the_page(tmp_path, make_run):
    make_run(tmp_path, overlays=False)
    path = tmp_path / "run.json"
    info = json.loads(path.read_text())
    info["config"]["name"] = "</title></style></script><script>alert(1)</script>"
    path.write_text(json.dumps(info))
    assert "alert(1)</script>" not in write_report(tmp_path).read_text(encoding="utf-8")


def test_the_answer_comes_first_and_is_what_the_data_were_made_to_say(page):
    said = words(page)
    assert said.index("Does joining help us?") < said.index("All methods at all sites")
    # Basel and Kyoto gain with every good method; Leeds gains nothing; Quito has 4 patients
    assert (
        "4 sites, the chosen method against training alone: 2 better, 0 worse, 1 without a "
        "relevant difference, 1 cannot tell." in said
    )
    assert "Cannot tell: 4 test patients; at least 6 are needed." in said
    assert re.search(r"Basel Yes, this model With FedBN personal, Dice 0\.\d{3} alone", said)


def test_undefined_scores_are_counted_and_shown(page):
    # one patient of Kyoto, under 6 methods and 2 seeds; 28 patients x 6 x 2 x 2 metrics inside,
    # and 8 patients x 3 adapters x 2 seeds outside
    assert "12 of 720 scores are undefined" in words(page)


def test_what_a_hospital_outside_got_is_shown(page):
    said = words(page)
    assert "A hospital that never took part" in said
    assert "Oslo A hospital that took no part 8 patients" in said
    assert re.search(r"Ditto \+ routing 0\.60\d 0\.68\d \+0\.0(79|8\d) ", said)


def test_the_overview_says_whether_adapting_helps(page):
    said = words(page)
    start = said.index("Does adapting help the hospital outside?")
    assert said.index("Does joining help us?") < start < said.index("What was run")
    assert (
        "2 comparisons with the unadapted model, at 1 site outside: 1 better, 0 worse, 1 without "
        "a relevant difference, 0 cannot tell." in said
    )
    assert re.search(
        r"Oslo No relevant difference With Ditto \+ Tent, Dice 0\.60\d unadapted, 0\.60\d", said
    )
    assert re.search(
        r"Yes, this model With Ditto \+ routing, Dice 0\.60\d unadapted, 0\.68\d adapted", said
    )
    assert "2 adapted methods: 1 better, 0 worse, 1 without a relevant difference" in said


def test_where_nobody_trained_alone_adapting_is_the_first_question(tmp_path):
    rows = [
        {
            "experiment": "e",
            "algorithm": "fedavg",
            "seed": 0,
            "round": 1,
            "site": "A",
            "case": f"c{k}",
            "patient": f"p{k}",
            "split": "outside",
            "model": model,
            "metric": "dice",
            "value": value + k / 99 * (value / 0.5),
        }
        for k in range(8)
        for model, value in (("none", 0.5), ("tent", 0.6))
    ]
    write_results(results_frame(rows), tmp_path)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    said = words(page)
    first = said.index("Does adapting help the hospital outside?")
    assert first < said.index("Does joining help us?") < said.index("Nobody trained alone")
    assert "1 better, 0 worse, 0 cannot tell. A Yes, this model With" in said
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_the_heat_map_holds_the_means_of_the_coefficients_over_seeds(text):
    heat = text[text.index("Routing coefficients of Ditto + routing at Oslo") :]
    cells = re.findall(r'<td style="--v:(\d+)%">([\d.]+)</td>', heat[: heat.index("</table>")])
    # seeds 0 and 1 gave the global model 0.2 and 0.3, Basel 0.5 twice, and Quito 0.3 and 0.2
    assert cells == [("0", "0.250"), ("88", "0.500"), ("0", "0.250")] * 3
    assert "It leans most on <strong>Basel</strong>, by 0.500" in text


def test_distances_and_network_are_those_of_the_assessment(text):
    part = text[text.index('id="distances-title"') : text.index('id="curves-title"')]
    assert '<td class="deep" style="--v:88%">9</td>' in part
    assert "Network of the sites by channel 1 and vessel; joined are Basel with Kyoto" in part


def heat(text, caption):
    """The numbers of a heat table, 0 where it has a dash, without the sums."""
    table = text[text.index(f"<caption>{caption}</caption>") :]
    rows = table[: table.index("</table>")].split("<tr>")[2:]
    cells = [re.findall(r'<td class="(?:deep)?" style[^>]*>([^<]*)|<td style[^>]*>&ndash;', r)
             for r in rows]  # fmt: skip
    return [[float(cell or 0) for cell in row] for row in cells]


def test_distances_and_networks_of_methods_are_those_of_the_servers_states(output, text):
    part = text[text.index('id="distances-title"') : text.index('id="curves-title"')]
    assert re.findall(r"<(h[34]>[^<]*)</h", part) == [
        "h3>The assessment", "h4>By metadata, in their own units",
        "h4>How well a classifier tells two sites apart",
        "h3>What the methods went by", "h4>FedBN", "h4>Ditto",
    ]  # fmt: skip
    for label, key, made_of, shown in (
        ("fedbn", "distance", "descriptions of their data: FedBN", {"seeds 0 and 1": 0}),
        ("ditto", "graph", "sketches of their data: Ditto", {"seed 0": 0, "seed 1": 1}),
    ):
        for title, seed in shown.items():
            state = Store(output / label / f"seed-{seed}" / "server").load("000012")[key]
            found = heat(part, f"Distances by {made_of}, {title}")
            assert found == (state.get("matrix") or state["distances"])
    said = " ".join(html.unescape(re.sub("<[^>]*>", " ", part)).split())
    assert "Most distant: <b>Quito ; in the mean <b>Quito weighs 0.25 times what it would." in said
    assert said.count("Joined: 2 pairs of sites that the method ties to each other.") == 2
    assert "Here seed 0; the other seeds are folded below." in said
    assert re.findall(r"<summary>(.*)</summary>", part) == ["Seed 1"]
    joined = "joined are Basel with Kyoto, Leeds with &lt;b&gt;Quito."
    assert part.count(f"Network of the sites by sketches of their data; {joined}") == 2
    assert "Network of the sites by descriptions of their data; none are joined." in part


def test_the_page_of_distances_stands_without_an_assessment_and_not_without_both(
    tmp_path, make_run
):
    make_run(tmp_path, overlays=False)
    assert 'id="distances"' not in write_report(tmp_path).read_text(encoding="utf-8")
    two = {"clients": ["A", "B"], "distances": [[0.0, 3.5], [3.5, 0.0]], "edges": [["A", "B"]]}
    Store(tmp_path / "fedbn" / "seed-0" / "server").save("000012", {"graph": two})
    text = write_report(tmp_path).read_text(encoding="utf-8")
    part = text[text.index('id="distances-title"') : text.index('id="curves-title"')]
    assert re.findall(r"<h[34]>([^<]*)</h", part) == ["What the methods went by", "FedBN"]
    assert heat(part, "Distances by sketches of their data: FedBN, seed 0") == two["distances"]
    assert "assess" not in part


def test_broken_and_missing_ledgers_are_told(page):
    said = words(page)
    # on the site's page, and among the ledgers
    assert said.count("Broken") == 2
    assert said.count("nothing 0 0 B none kept") == 2 * len(SITES)


def test_the_configuration_can_be_saved_and_reads_back(output, page):
    import yaml

    (link,) = page.values("a", "href")[-1:]
    kind, _, data = link.partition(",")
    assert kind == "data:application/yaml;base64"
    saved = yaml.safe_load(base64.b64decode(data))
    assert saved == json.loads((output / "run.json").read_text())["config"]
    said = words(page)
    assert "python -m pip install torch==2.9.1" in said
    assert "collegium run experiment.yaml" in said
    assert "collegium tables runs/vessels" in said


def test_pictures_can_be_left_out(output):
    text = write_report(output, pictures=False).read_text(encoding="utf-8")
    assert "data:image" not in text
    assert 'id="cases"' not in text
    assert 'id="viewer"' not in text


def test_a_report_made_twice_has_the_same_bytes(output):
    first = write_report(output).read_bytes()
    assert write_report(output).read_bytes() == first


def test_without_training_alone_the_page_says_so(tmp_path):
    row = {
        "experiment": "e",
        "algorithm": "fedavg",
        "seed": 0,
        "round": 1,
        "site": "A",
        "case": "c001",
        "patient": "p001",
        "split": "test",
        "model": "global",
        "metric": "dice",
        "value": 0.5,
    }
    write_results(results_frame([row]), tmp_path)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Nobody trained alone in this run" in words(page)
    assert "The run left no description" in words(page)
    assert page.open == []


def test_an_unfinished_run_is_reported_from_the_rows_of_its_jobs(tmp_path):
    row = {
        "experiment": "e",
        "algorithm": "fedavg",
        "seed": 3,
        "round": 1,
        "site": "A",
        "split": "train",
        "metric": "loss",
        "value": 0.5,
        "bytes_up": 7,
    }
    write_rows(tmp_path / "fedavg" / "seed-3" / "rows.jsonl", results_frame([row]))
    said = words(Page(write_report(tmp_path).read_text(encoding="utf-8")))
    assert "No test scores yet of: FedAvg, seed 3." in said
    assert "No test case has been scored yet." in said


def test_a_sweep_shows_its_first_setting_and_the_averages_of_all(tmp_path):
    rows = [
        {
            "experiment": "e",
            "algorithm": "fedavg",
            "seed": 0,
            "round": 1,
            "site": "A",
            "case": "c001",
            "patient": "p001",
            "split": "test",
            "model": "global",
            "metric": "dice",
            "value": value,
            "variation": variation,
        }
        for variation, value in (("tau-0.5", 0.25), ("tau-0.9", 0.75))
    ]
    write_results(results_frame(rows), tmp_path)
    config = {"algorithms": ["fedavg"], "variations": {"tau-0.9": {}, "tau-0.5": {}, "tau-1": {}}}
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    said = words(Page(write_report(tmp_path).read_text(encoding="utf-8")))
    assert "of 2 settings, these pages are about tau-0.9" in said
    assert "Method A Average Worst site Disparity Site sd FedAvg global 0.750" in said
    assert "Method tau-0.9 tau-0.5 FedAvg global 0.750 0.250" in said
    assert "setting tau-1" in said


def test_no_results_are_named(tmp_path):
    with pytest.raises(DataError, match="no results to report yet"):
        write_report(tmp_path)


def test_no_folder_of_the_machine_is_on_the_page(tmp_path, make_run):
    make_run(tmp_path, overlays=False)
    path = tmp_path / "run.json"
    info = json.loads(path.read_text())
    info["config"] |= {
        "output": "/home/maria/runs/first",
        "federation": {"root": "/data/maria/vessels", "sites": {"a": {"folder": "scans/a"}}},
        "model": {"name": "/home/maria/own.py:Mine"},
        "engine": {"folder": "C:\\Users\\maria\\kits"},
        "tracking": {"uri": "sqlite:////home/maria/runs.db"},
    }
    path.write_text(json.dumps(info))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    (data,) = re.findall(r"application/yaml;base64,([^\"]+)", page)
    saved = base64.b64decode(data).decode()
    for text in (page, saved):
        assert "maria" not in text
        assert str(tmp_path) not in text
        assert "tmp" not in text
    assert "root: path/to/vessels" in saved
    assert "folder: scans/a" in saved
    assert "name: path/to/own.py:Mine" in saved
    assert "collegium report path/to/first" in page
