"""The report in a real browser: headless Chromium, driven by Playwright."""

import re
import shutil

import pytest

from collegium.evaluation.report.html import write_report
from collegium.evaluation.results import results_frame, write_results

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: on Debian, apt-get install chromium"
)

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
PAGES = ["overview", "results", "site-b-quito", "site-basel", "site-kyoto", "site-leeds",
         "site-oslo", "outside", "distances", "curves", "figures", "routing", "cases", "traffic",
         "ledger", "reproduce"]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory, make_run):
    output = make_run(tmp_path_factory.mktemp("run"), outside=True)
    return write_report(output).as_uri()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser, report):
    """A function that opens the report; afterwards nothing may have gone wrong in any page."""
    contexts, troubles = [], []

    def watch(page):
        def note(message):
            if message.type in ("error", "warning"):
                troubles.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: seen.append(request.url))

    seen: list[str] = []

    def open_(where="", **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        watch(page)
        page.goto(report + where)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not troubles
    outside = [
        url
        for url in seen
        if not url.startswith("data:") and not re.match(r"file:.*/report\.html(#|$)", url)
    ]
    assert not outside


def shown(page):
    """The ids of the pages that can be seen."""
    return page.evaluate(
        "[...document.querySelectorAll('.page')].filter(p => p.checkVisibility()).map(p => p.id)"
    )


def arrive(page, name):
    """Wait for a page: the browser reports a new address after the click is over."""
    page.locator(f"#{name}").wait_for()  # the page's policy forbids functions made of text


def test_every_page_opens_alone_and_has_the_focus(open_page):
    page = open_page()
    assert shown(page) == ["overview"]
    links = page.locator("nav a")
    assert [link.get_attribute("href")[1:] for link in links.all()] == PAGES
    for link, name in zip(links.all(), PAGES, strict=True):
        link.click()
        arrive(page, name)
        assert shown(page) == [name]
        assert link.get_attribute("aria-current") == "page"
        assert page.evaluate("document.activeElement.id") == f"{name}-title"
        assert page.evaluate("scrollY") == 0
    page.go_back()
    arrive(page, "ledger")
    assert shown(page) == ["ledger"]


def test_an_address_leads_to_its_page_and_a_wrong_one_to_the_first(open_page):
    assert shown(open_page("#site-kyoto")) == ["site-kyoto"]
    assert shown(open_page("#site-nowhere")) == ["overview"]


def test_a_site_on_the_overview_leads_to_its_page(open_page):
    page = open_page()
    page.locator(".answers a", has_text="Leeds").click()
    arrive(page, "site-leeds")
    assert shown(page) == ["site-leeds"]


@pytest.mark.parametrize("width", [1280, 800, 400])
def test_no_page_is_wider_than_the_window(open_page, width):
    page = open_page(viewport={"width": width, "height": 800})
    for name in PAGES:
        page.evaluate(f"location.hash = '{name}'")
        arrive(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name


def test_tables_need_no_scrolling_on_a_laptop(open_page):
    page = open_page()
    for name in PAGES:
        page.evaluate(f"location.hash = '{name}'")
        arrive(page, name)
        cut = page.evaluate(
            "[...document.querySelectorAll('.shown .scroll')]"
            ".filter(s => s.scrollWidth > s.clientWidth + 1).map(s => s.ariaLabel)"
        )
        assert not cut, name


@pytest.fixture(scope="module")
def broad_report(tmp_path_factory):
    """A run of 6 sites with long names, 2 seeds and a metric with a unit."""
    folder = tmp_path_factory.mktemp("broad")
    sites = ["University of Aachen", "Basel", "Chennai Eye", "Dublin General", "Essen", "Fukuoka"]
    rows = [
        {
            "experiment": "broad",
            "algorithm": algorithm,
            "seed": seed,
            "round": 1,
            "site": site,
            "split": "test",
            "case": f"c{case}",
            "patient": f"p{case}",
            "model": model,
            "metric": metric,
            "unit": unit,
            "value": value + place + seed / 9 + case / 50,
        }
        for algorithm, model in (("local", "personal"), ("distance", "personal"))
        for place, site in enumerate(sites)
        for seed in (0, 1)
        for case in range(7)
        for metric, unit, value in (("dice", "", 0.5), ("hd95", "mm", 20.25))
    ]
    write_results(results_frame(rows), folder)
    return write_report(folder).as_uri()


@pytest.mark.parametrize(("media", "width"), [("screen", 1280), ("print", 703)])
def test_a_table_of_six_sites_fits_a_laptop_and_a_sheet(open_page, broad_report, media, width):
    page = open_page(viewport={"width": width, "height": 800})
    page.goto(f"{broad_report}#results")
    page.emulate_media(media=media)
    cells = page.locator("#results tr:has(th:text('Distance-aware personal')) td")
    assert cells.count() >= 2 * 10
    rights = [cell.bounding_box() for cell in cells.all()]
    assert max(box["x"] + box["width"] for box in rights) <= width


def about(page):
    return page.locator(".viewer h2").inner_text(), page.locator(".viewer .about").inner_text()


def test_cases_are_browsed_with_the_keyboard_alone(open_page):
    page = open_page("#site-basel")
    first = page.locator("#site-basel .case").first
    first.focus()
    page.keyboard.press("Enter")
    assert about(page) == ("Basel: FedBN personal", "Best, case c001, Dice 0.900 (1 of 24)")
    page.keyboard.press("ArrowRight")
    assert about(page)[1] == "Median, case c002, Dice 0.800 (2 of 24)"
    page.keyboard.press("ArrowDown")  # the same case under the next method
    title, text = about(page)
    assert title != "Basel: FedBN personal"
    assert "case c002" in text
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert about(page)[1].endswith("(24 of 24)")
    page.keyboard.press("Escape")
    assert not page.locator("#viewer").is_visible()
    focused = page.evaluate("document.activeElement.dataset.about")
    assert focused is not None
    assert focused.startswith("Common, case c004")


def test_a_case_outside_is_compared_between_adapters(open_page):
    page = open_page("#cases")
    page.locator("#cases .case[data-site='Oslo, outside']").first.click()
    assert about(page)[0] == "Oslo, outside: Ditto"
    page.keyboard.press("ArrowDown")
    title, text = about(page)
    assert title == "Oslo, outside: Ditto + Tent"
    assert text.startswith("Best, case outside-c001, Dice 0.900")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")  # three methods, and none of them of a site inside
    assert about(page)[0] == "Oslo, outside: Ditto"


def test_a_picture_is_zoomed_and_moved_and_its_layers_hidden(open_page):
    page = open_page("#cases")
    page.locator("#cases .case").first.click()
    picture = page.locator(".stage .picture")
    whole = picture.bounding_box()
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert picture.bounding_box()["width"] == pytest.approx(2.25 * whole["width"], rel=1e-3)
    before = picture.bounding_box()["x"]
    page.keyboard.press("Shift+ArrowRight")
    assert picture.bounding_box()["x"] == pytest.approx(before - 60, abs=0.5)
    page.mouse.move(640, 400)
    page.mouse.down()
    page.mouse.move(660, 400)
    page.mouse.up()
    assert picture.bounding_box()["x"] == pytest.approx(before - 40, abs=0.5)
    page.keyboard.press("0")
    assert picture.bounding_box() == whole
    page.mouse.wheel(0, -100)
    assert picture.bounding_box()["width"] == pytest.approx(1.25 * whole["width"], rel=1e-3)
    for key, name, before_, after in (("t", "truth", True, False), ("p", "prediction", True, False),
                                      ("e", "errors", False, True)):  # fmt: skip
        layer = page.locator(f".stage .{name}")
        assert layer.is_visible() is before_
        page.keyboard.press(key)
        assert layer.is_visible() is after
        assert page.locator(f"[data-layer={name}]").is_checked() is after


def test_both_contours_together_are_white(open_page):
    page = open_page("#cases")
    page.locator("#cases .case").first.click()
    mode = "getComputedStyle(document.querySelector('.stage .prediction')).mixBlendMode"
    assert page.evaluate(mode) == "screen"
    # screen of the two colours, see collegium.evaluation.report.overlays
    blended = [
        round(255 - (255 - a) * (255 - b) / 255) for a, b in ((86, 230), (180, 159), (233, 0))
    ]
    assert min(blended) >= 225


def paper(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_theme_follows_the_system_and_the_button_and_nothing_is_stored(open_page):
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 26)"
    page = open_page(color_scheme="light")
    assert paper(page) == light
    page.emulate_media(color_scheme="dark")
    assert paper(page) == dark
    button = page.locator("#theme")
    assert button.inner_text() == "Light"
    button.click()
    assert (paper(page), button.inner_text()) == (light, "Dark")
    assert (
        page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    )
    page.reload()
    assert paper(page) == dark


def test_in_print_every_page_and_every_fold_is_open_and_no_table_is_cut(open_page):
    # A4 without its margins of 12 mm is 186 mm wide, which at 96 per inch are 703 pixels
    page = open_page(viewport={"width": 703, "height": 1000}, color_scheme="dark")
    page.emulate_media(media="print")
    assert shown(page) == PAGES
    assert paper(page) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    cases = page.locator("#site-basel .case")
    assert cases.count() == 24
    assert all(case.is_visible() for case in cases.all())
    wide = page.evaluate(
        "[...document.querySelectorAll('table, svg, pre')].filter(t => t.checkVisibility()"
        " && t.getBoundingClientRect().right > 704).map(t => t.outerHTML.slice(0, 200))"
    )
    assert not wide


def test_the_printed_page_is_made(open_page):
    content = open_page().pdf(prefer_css_page_size=True)
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", content)) >= len(PAGES)


def test_without_scripts_everything_is_there_in_order(open_page):
    page = open_page(java_script_enabled=False)
    for name in PAGES:
        assert page.locator(f"#{name}").is_visible(), name
    assert not page.locator("#theme").is_visible()
    assert not page.locator("#viewer").is_visible()


def test_the_legend_hides_lines_and_the_pointer_reads_them(open_page):
    page = open_page("#curves")
    line = page.locator("#curves .line.l1g polyline").first
    button = page.locator("#curves .legend button", has_text="FedAvg global")
    button.click()
    assert not line.is_visible()
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert line.is_visible()
    chart = page.locator("#curves .chart").first
    end = page.evaluate(
        "(() => { const line = document.querySelector('#curves .line.l1g polyline');"
        " const p = Array.from(line.points).at(-1).matrixTransform(line.getScreenCTM());"
        " return [p.x, p.y]; })()"
    )
    page.mouse.move(end[0] + 2, end[1])
    read = page.locator("#curves .readout").first.inner_text()
    last = re.search(r"FedAvg global (0\.\d+)", chart.get_attribute("aria-label"))
    found = re.fullmatch(r"FedAvg global, round 12: (0\.\d{3})", read)
    assert found is not None
    assert last is not None
    assert float(found[1]) == pytest.approx(float(last[1]), abs=0.002)
    assert page.locator("#curves .lit").count() == 1


def test_the_focus_can_be_seen_and_the_first_key_skips_the_list_of_pages(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert shown(page) == ["overview"]
    page.keyboard.press("Tab")
    style = "getComputedStyle(document.activeElement)"
    assert page.evaluate(f"{style}.outlineStyle") == "solid"
    assert page.evaluate(f"{style}.outlineWidth") == "3px"


def test_nothing_moves_for_those_who_asked_for_it(open_page):
    style = "getComputedStyle(document.querySelector('.line')).transitionDuration"
    assert open_page(reduced_motion="reduce").evaluate(style) == "0s"
    assert open_page(reduced_motion="no-preference").evaluate(style) == "0.15s"


HEIGHTS = "all => all.map(text => text.getBoundingClientRect().height)"
VALUES = "names => names.map(n => getComputedStyle(document.documentElement).getPropertyValue(n))"


@pytest.mark.parametrize(
    ("scheme", "width", "media"),
    [("light", 1280, "screen"), ("dark", 1280, "screen"), ("dark", 400, "screen"),
     ("dark", 703, "print")],
)  # fmt: skip
def test_figures_can_be_read_on_light_dark_paper_and_small_windows(open_page, scheme, width, media):
    page = open_page("#figures", viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.emulate_media(media=media)
    drawn = page.locator("svg.drawn")
    assert drawn.count() >= 6  # curves, losses, boxes inside and outside, single cases, time, bytes
    heights = page.locator("svg.drawn text").evaluate_all(HEIGHTS)
    assert min(heights) > 9  # of a line of text, and a letter of it is narrower when turned
    paper, ink = page.evaluate(VALUES, ["--paper", "--ink"])
    dark = scheme == "dark" and media == "screen"
    assert (paper.strip() == "#14171a") == dark
    fill = page.locator("svg.drawn text").first.evaluate("e => getComputedStyle(e).fill")
    wanted = ", ".join(str(int(ink.strip()[k : k + 2], 16)) for k in (1, 3, 5))
    assert fill == f"rgb({wanted})"
