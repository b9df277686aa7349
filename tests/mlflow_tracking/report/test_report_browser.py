"""The page in a real browser: filters, address, phone, print."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlflow_tracking.report.page import as_html
from mlflow_tracking.report.pictures import draw_pictures
from mlflow_tracking.report.tables import build_report

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
METHODS = ("fedavg", "fedcorr", "oct_fedsir", "oct_fedsir/no_kd", "spectral_pruning", "all_clean")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="Playwright is not installed"),
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on the path"),
]


def varied(row: Mapping[str, Any]) -> float:
    return 0.9 - 0.05 * METHODS.index(row["method"]) - 0.3 * row["ratio"] - 0.01 * row["seed"]


class Opened:
    """A page in the browser. log: everything that the console said or that failed. requests: what it asked for."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.log: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.log.append(message.text))
        page.on("pageerror", lambda error: self.log.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address)

    def choose(self, facet: str, value: str) -> None:
        """Click on a filter as people do, on its words."""
        self.page.locator(f"label:has(input[name='{facet}'][value='{value}'])").click()

    def shown(self, selector: str) -> list[str]:
        """Texts of the elements that can be seen."""
        return [e.inner_text().strip() for e in self.page.locator(selector).all() if e.is_visible()]

    def anchors(self, selector: str) -> list[str]:
        return [e.get_attribute("id") for e in self.page.locator(selector).all() if e.is_visible()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture
def opened(frames: Any, folder: Path) -> Iterator[Opened]:
    from playwright.sync_api import sync_playwright

    file = folder / "report.html"
    if not file.exists():
        rows = frames.grid(METHODS, tasks=("Kermany", "UIC"), seeds=(0, 1), accuracy=varied)
        results = frames.results(rows)
        file.write_text(as_html(build_report(results, "Grid <unit>"), draw_pictures(results)), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Opened(browser.new_page(viewport={"width": 1200, "height": 900}), file.as_uri())
        browser.close()


def test_the_page_opens_quietly_with_every_table_and_asks_for_nothing(opened: Opened) -> None:
    assert opened.requests == [opened.address]
    tables = opened.anchors("article.table")
    keys = ("1", "2", "3", "4", "S1", "S2", "S3", "S4", "ranks", "tests", "costs")
    assert {f"table-{key}" for key in keys} <= set(tables)
    assert all(e.is_visible() for e in opened.page.locator("article.table table").all())
    assert sum(e.is_visible() for e in opened.page.locator("figure svg").all()) >= 6
    assert opened.log == []


def test_filters_hide_what_they_do_not_name_and_the_address_keeps_them(opened: Opened) -> None:
    before = opened.shown("#table-S1 tbody tr")
    for facet, value in (("task", "Kermany"), ("noise", "symmetric"), ("ratio", "0.6"), ("method", "oct_fedsir")):
        opened.choose(facet, value)
    chosen = "Kermany · symmetric · 0.6 · OCT-FedSIR"
    assert opened.shown("#chosen") == [chosen]
    assert opened.shown("#table-S1 thead th[data-column]") == ["60 %", "mean"]
    rows = opened.shown("#table-S1 tbody tr")
    assert len(rows) == 2 < len(before)
    assert all("OCT-FedSIR" in row for row in rows)
    # Where the first row of a group is hidden, the next one says what group it is.
    assert opened.shown("#table-S1 tbody th:first-child") == ["2", "0.1"]
    assert opened.shown("#table-1 thead th.group") == ["Kermany (phantom images)", "Overall"]
    assert opened.shown("#table-1 thead th.group[colspan='1']")[0] == "Kermany (phantom images)"
    assert opened.shown("#table-S3 table") == []
    assert opened.shown("#table-S3 .empty") == ["Nothing of this table passes the filter."]
    assert [a for a in opened.anchors("figure") if a.startswith("figure-f1")] == []
    lines = opened.page.locator("#figure-f0-ratio-symmetric [data-method]").all()
    assert {e.get_attribute("data-method") for e in lines if e.is_visible()} == {"oct_fedsir"}

    address = opened.page.url
    assert "task=Kermany" in address
    opened.page.goto("about:blank")
    opened.page.goto(address)
    assert opened.shown("#chosen") == [chosen]
    assert opened.shown("#table-S1 tbody tr") == rows

    opened.page.locator("nav a[href='#table-S1']").click()
    assert opened.page.url == f"{address}&at=table-S1"
    opened.page.locator("button[type=reset]").click()
    assert opened.shown("#table-S1 tbody tr") == before
    assert opened.log == []


def test_parts_of_cells_can_be_shown_and_hidden(opened: Opened) -> None:
    def parts() -> list[bool]:
        return [bool(opened.shown(f"#table-S1 td .{part}")) for part in ("sd", "interval", "paper")]

    assert parts() == [True, False, True]
    for part in ("sd", "interval", "paper"):
        opened.choose("view", part)
    assert parts() == [False, True, False]
    opened.page.reload()
    assert parts() == [False, True, False]


def test_a_phone_scrolls_tables_and_not_the_page(opened: Opened) -> None:
    opened.page.set_viewport_size({"width": 390, "height": 844})
    opened.page.reload()
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    box = opened.page.locator("#table-S1 .scroll")
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")
    box.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
    method = opened.page.locator("#table-S1 tbody th.pin").first.bounding_box()
    assert method["x"] == pytest.approx(box.bounding_box()["x"], abs=2)
    # The filter is folded and opens.
    assert opened.shown(".facets") == []
    opened.page.locator(".filters summary").click()
    opened.choose("task", "UIC")
    assert opened.shown("#chosen") == ["UIC"]


def test_print_leaves_nothing_out(opened: Opened, tmp_path: Path) -> None:
    opened.page.emulate_media(media="print")
    assert opened.shown(".facets, nav.contents") == []
    cut = "e => [...e.querySelectorAll('.scroll')].filter(s => getComputedStyle(s).overflowX !== 'visible').length"
    assert opened.page.locator("main").evaluate(cut) == 0
    file = tmp_path / "report.pdf"
    opened.page.pdf(path=str(file), prefer_css_page_size=True)
    assert file.read_bytes().startswith(b"%PDF")


def test_the_page_works_inside_of_a_sandboxed_frame(opened: Opened) -> None:
    """As MLflow shows artifacts."""
    html = Path(opened.address.removeprefix("file://")).read_text(encoding="utf-8")
    opened.page.set_content("<iframe sandbox='allow-scripts' width='1100' height='800'></iframe>")
    opened.page.locator("iframe").evaluate("(frame, html) => { frame.srcdoc = html; }", html)
    frame = opened.page.frame_locator("iframe")
    frame.locator("label:has(input[value='UIC'])").click()
    assert frame.locator("#chosen").inner_text() == "UIC"
    assert frame.locator("#table-S1 table").is_hidden()
    assert opened.log == []
