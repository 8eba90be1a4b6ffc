"""The site in a real browser: sorting, filters, languages, themes, nothing off the page, no axe violation."""

import itertools
import re
import shutil
from pathlib import Path

import pytest

from ruitong_lib.report import release, site
from ruitong_lib.report.markdown import number

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def built(release_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "site"
    site.build(release_folder, out)
    return release_folder, out


@pytest.fixture
def document(release_folder):
    return release.read(release_folder)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "no chromium on this machine: apt-get install chromium"
    with sync_playwright() as p:
        running = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser, built):
    """The English page, with everything that it says to the console and asks of the network written down."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    p = context.new_page()
    p.said, p.asked = [], []
    p.on("console", lambda m: p.said.append(m.text))
    p.on("pageerror", lambda e: p.said.append(str(e)))
    p.on("request", lambda r: p.asked.append(r.url))
    p.goto((built[1] / "index.html").as_uri())
    yield p
    assert p.said == []
    assert [u for u in p.asked if not u.startswith(("file:", "data:"))] == []
    context.close()


def column(page, n):
    return page.locator(f"#table > tbody:not([hidden]) > tr:first-child > *:nth-child({n})").all_inner_texts()


def test_one_row_a_row_of_the_release(page, document):
    assert page.locator("#table > tbody").count() == len(document["rows"])


def test_sorting_by_a_number_in_both_directions_keeps_what_is_not_measured_last(page):
    for direction in ("ascending", "descending"):
        page.get_by_role("button", name="KL, nat", exact=False).click()
        values = page.locator("#table > tbody > tr:first-child > td[data-value]:nth-child(6)").evaluate_all(
            "cells => cells.map(c => c.dataset.value)"
        )
        known = [float(v) for v in values if v]
        assert known == sorted(known, reverse=direction == "descending")
        assert values[len(known) :] == [""] * (len(values) - len(known))
        assert page.locator("#table thead th").nth(5).get_attribute("aria-sort") == direction


def test_filters_leave_the_rows_that_match_and_say_how_many(page):
    page.get_by_label("Axis").select_option("attention")
    assert column(page, 2) == ["attention"]
    assert page.locator("#shown").inner_text() == "1"
    page.get_by_label("Axis").select_option("")
    page.get_by_label("Search").fill("w8a8")
    assert column(page, 3)
    assert all("w8a8" in c.lower() for c in column(page, 3))


def test_a_row_opens_by_keyboard_with_its_figure_floor_and_provenance(page):
    button = page.locator("#table > tbody:not([hidden]) .open").first
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    detail = page.locator("#table > tbody:not([hidden]) > .detail").first
    assert detail.is_visible()
    assert detail.locator("svg[role=img]").get_attribute("aria-label").startswith("R, ")
    assert "shards.json" in detail.inner_text()
    page.keyboard.press("Enter")
    assert not detail.is_visible()


def test_a_link_to_a_row_opens_it(page, built, document):
    row = document["rows"][0]["id"]
    page.goto((built[1] / "index.html").as_uri() + f"#{row}")
    page.reload()
    assert page.locator(f"[id='d-{row}']").is_visible()


@pytest.mark.parametrize(("name", "lang"), [("中文", "zh-Hans"), ("Русский", "ru")])
def test_each_language_is_one_link_away_with_the_same_numbers(page, name, lang):
    numbers = column(page, 6)
    page.get_by_role("link", name=name).click()
    assert page.locator("html").get_attribute("lang") == lang
    assert column(page, 6) == numbers


def test_the_theme_follows_the_system_and_can_be_chosen(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert light != dark
    page.get_by_label("Theme").select_option("light")
    assert page.evaluate(background) == light


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *itertools.product(["index.html"], [390, 1440], ["light", "dark"]),
        ("zh.html", 390, "dark"),
        ("ru.html", 390, "light"),
        ("method.html", 390, "light"),
        ("method.html", 1440, "dark"),
    ],
)
def test_axe_finds_no_violation_and_nothing_is_wider_than_the_screen(browser, built, name, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    p = context.new_page()
    p.goto((built[1] / name).as_uri())
    for button in p.locator(".open").all()[:3]:
        button.click()
    found = Axe().run(p).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found] == []
    assert p.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def test_the_pages_weigh_under_a_megabyte_and_name_no_other_place(built):
    assert site.weight(built[1]) < 1_000_000
    for p in built[1].glob("*.html"):
        text = p.read_text(encoding="utf-8")
        assert not re.findall(r"""(?:src|href)=["']https?:""", text.split("<main>")[0])
        assert "<script src" not in text


def test_a_built_site_is_what_the_release_makes_and_a_changed_digit_is_not(built, tmp_path, document):
    folder, out = built
    copy = Path(shutil.copytree(out, tmp_path / "site"))
    assert site.stale(copy, folder) == []
    kl = number(document["rows"][0]["metrics"]["kl"]["value"])
    text = (copy / "ru.html").read_text(encoding="utf-8")
    (copy / "ru.html").write_text(text.replace(kl, kl[:-1] + str((int(kl[-1]) + 1) % 10), 1), encoding="utf-8")
    assert site.stale(copy, folder) == ["site/ru.html is not what the release makes: build it again (ruitong site)"]
