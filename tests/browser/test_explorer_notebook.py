"""00 in a real browser: type, run, select, hover, click, move the layers, and take the figure away."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "00_explorer.ipynb"


@pytest.fixture
def explorer(open_notebook, run_all):
    page = open_notebook(NOTEBOOK)
    run_all(page)
    page.locator(".igl svg.map").first.wait_for()
    return page


def control(page, name):
    """The element that is typed into, of the control of this name."""
    box = page.locator(".widget-inline-hbox", has=page.locator(".widget-label", has_text=re.compile(f"^{name}$")))
    return box.locator("input, textarea, select").first


def type_into(page, name, text):
    control(page, name).fill(text)
    control(page, name).press("Tab")


def press_run(page):
    page.get_by_role("button", name="Run", exact=True).click()


def download(page, kind, folder):
    with page.expect_download() as waiting:
        page.get_by_role("button", name=kind, exact=True).click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


def test_a_prompt_is_typed_run_explored_and_taken_away(explorer, idle, chromium, tmp_path):
    from playwright.sync_api import expect

    page = explorer
    badge, maps, tip, charts = (page.locator(f".igl {what}") for what in (".badge", "svg.map", ".tip", ".chart"))
    expect(maps).to_have_count(2)
    expect(badge).to_contain_text("✓ checked")
    maps.first.scroll_into_view_if_needed()
    page.screenshot(path=str(tmp_path / "start.png"))

    # nothing runs while typing; Run does
    titles = page.locator(".igl .pane .title").all_inner_texts()
    type_into(page, "prompt", "The capital of France is")
    type_into(page, "beside it", "")
    type_into(page, "answer", " Paris")
    page.get_by_label("chat template").uncheck()
    assert page.locator(".igl .pane .title").all_inner_texts() == titles
    press_run(page)
    expect(maps).to_have_count(1)
    expect(page.locator(".igl .pane .title")).to_have_text("The capital of France is → Paris")
    expect(badge).to_contain_text("✓ checked")
    strip = page.locator(".igl .strip button")
    expect(strip).to_have_text(["The", "␣capital", "␣of", "␣France", "␣is", "␣Paris"])
    expect(page.locator(".igl .chart .words")).to_contain_text("Δ = +0.7725")

    # hover: token, layer, level, credit and what the lens reads
    page.locator("[data-cell='4,30']").hover()
    expect(tip).to_contain_text("4 → ␣Paris")
    expect(tip).to_contain_text("layer 30")
    expect(tip).to_contain_text("level 0.7725    credit +0.7022")
    expect(tip).to_contain_text("the lens reads  ␣Paris 0.77")

    # a token of the prompt, by click: a row of the map and a trajectory more
    strip.nth(3).click()
    expect(charts).to_have_count(2)
    expect(page.locator(".igl svg.map text[data-row]")).to_have_text(["2 → ␣France", "4 → ␣Paris"])
    expect(strip.nth(3)).to_have_attribute("aria-pressed", "true")
    strip.nth(3).press("Enter")  # and away again, by keyboard; the focus stayed on it
    expect(charts).to_have_count(1)
    strip.last.click()
    expect(charts).to_have_count(0)

    # click a cell: it stays, and its token's trajectory comes
    page.locator("[data-cell='4,29']").click()
    expect(page.locator(".igl .pinned")).to_contain_text("layer 29")
    expect(page.locator(".igl .pinned")).to_contain_text("the lens reads")
    expect(charts).to_have_count(1)
    page.mouse.move(0, 0)

    # the map by keyboard
    maps.focus()
    maps.press("ArrowLeft")
    expect(tip).to_contain_text("layer 29")
    maps.press("Home")
    expect(tip).to_contain_text("layer 1\n")
    maps.press("Enter")
    expect(page.locator(".igl .pinned")).to_contain_text("layer 1\n")

    # the layers by keyboard: fewer columns, the same sum
    handle = page.locator(".widget-inline-hbox", has_text="layers").get_by_role("slider").first
    for _ in range(3):
        handle.press("ArrowRight")
    expect(page.locator(".igl [data-cell]")).to_have_count(28)
    expect(page.locator(".igl .chart .words")).to_contain_text("Δ = +0.7725")

    # another token in its place, one that does not exist, levels
    type_into(page, "target", "␣London")
    expect(page.locator(".igl svg.map text[data-row]")).to_have_text("4 → ␣London")
    expect(page.locator(".igl .chart")).to_contain_text("dashed: level of 4 → ␣Paris")
    type_into(page, "target", "id 9999999")
    expect(page.locator(".igl [role=alert]")).to_contain_text("9999999")
    expect(maps).to_have_count(0)  # not the map of another selection
    type_into(page, "target", "")
    expect(page.locator(".igl svg.map text[data-row]")).to_have_text("4 → ␣Paris")
    expect(page.locator(".igl [role=alert]")).to_have_text("")
    page.get_by_role("radio", name="levels").or_(page.get_by_role("button", name="levels")).first.click()
    expect(page.locator(".igl [data-cell='4,base']")).to_have_count(1)
    idle(page)

    # away
    image = download(page, "SVG", tmp_path).read_text(encoding="utf-8")
    assert image.startswith("<?xml") and "<svg" in image and "<script" not in image
    assert download(page, "PNG", tmp_path).read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO(download(page, "CSV", tmp_path).read_text(encoding="utf-8"))))
    assert len(rows) == 28 and abs(sum(float(row["credit"]) for row in rows) - 0.7725) < 1e-3
    saved = download(page, "HTML", tmp_path)
    page.screenshot(path=str(tmp_path / "explorer.png"))
    assert page.outside == []

    chromium.set_offline(True)
    other, wrong = chromium.new_page(), []
    try:
        other.on("pageerror", lambda error: wrong.append(str(error)))
        other.on("request", lambda asked: None if asked.url == saved.as_uri() else wrong.append(asked.url))
        other.goto(saved.as_uri())
        other.locator("[data-cell='4,29']").hover()
        expect(other.locator(".tip")).to_contain_text("the lens reads")
        other.locator(".strip button").last.click()
        expect(other.locator(".chart")).to_have_count(0)
        other.screenshot(path=str(tmp_path / "page.png"))
        assert wrong == []
    finally:
        chromium.set_offline(False)
        other.close()


def test_markup_mathematics_and_other_scripts_are_shown_as_text(explorer, tmp_path):
    from playwright.sync_api import expect

    page, asked = explorer, "<img src=x onerror=alert(1)> $$x 日本 🙂 </script>"
    page.on("dialog", lambda dialog: pytest.fail("a prompt was run as HTML"))
    type_into(page, "prompt", asked)
    type_into(page, "beside it", "")
    type_into(page, "answer", " $$y$$ <b>")
    page.get_by_label("chat template").uncheck()
    press_run(page)
    expect(page.locator(".igl svg.map")).to_have_count(1)
    expect(page.locator(".igl .pane .title")).to_contain_text("<img src=x onerror=alert(1)> $$x ")
    expect(page.locator(".igl .strip")).to_contain_text("onerror")
    for button in page.locator(".igl .strip button:enabled").all()[:12]:
        button.click()
    expect(page.locator(".igl .chart")).to_have_count(13)
    assert page.locator(".igl img, .igl b, .igl script, .igl mjx-container").count() == 0
    page.screenshot(path=str(tmp_path / "odd.png"))
    saved = download(page, "HTML", tmp_path)
    other = page.context.new_page()
    other.on("dialog", lambda dialog: pytest.fail("a prompt was run as HTML"))
    other.goto(saved.as_uri())
    expect(other.locator("svg.map")).to_have_count(1)
    assert other.locator("img, b, mjx-container").count() == 0
    other.close()
    assert page.outside == []


def test_an_explorer_built_again_takes_the_place_of_the_first(explorer, idle):
    from playwright.sync_api import expect

    page = explorer
    cell = page.locator(".jp-CodeCell", has_text="explorer = Explorer(")
    for _ in range(2):
        cell.locator(".jp-InputArea-editor").click()
        page.keyboard.press("Control+Enter")
        idle(page)
        expect(page.locator(".igl svg.map")).to_have_count(2)
    counted = "sum(type(one).__name__ == 'View' for one in __import__('ipywidgets').widgets.widget._instances.values())"
    asked = page.evaluate(
        """async (code) => {
          const panel = window.jupyterapp.shell.currentWidget, kernel = panel.sessionContext.session.kernel;
          let said = "";
          const run = kernel.requestExecute({ code });
          run.onIOPub = (message) => { said += message.content.text ?? ""; };
          await run.done;
          return said;
        }""",
        f"print({counted}, sum(map(len, [explorer._all])))",
    )
    assert json.loads("[" + asked.strip().replace(" ", ",") + "]") == [1, 1]
    page.get_by_role("button", name="levels").or_(page.get_by_role("radio", name="levels")).first.click()
    expect(page.locator(".igl [data-cell$=',base']").first).to_be_attached()


def test_it_works_under_voila(open_voila, tmp_path):
    from playwright.sync_api import expect

    page = open_voila(NOTEBOOK)
    expect(page.locator(".igl svg.map")).to_have_count(2)
    expect(page.locator(".igl .badge")).to_contain_text("✓ checked")
    page.locator(".igl .strip button.answer", has_text="␣Vietnam").first.click()
    expect(page.locator(".igl .chart")).to_have_count(2)
    page.locator("[data-cell='39,30']").first.hover()
    expect(page.locator(".igl .tip")).to_contain_text("the lens reads  ␣Vietnam")
    page.screenshot(path=str(tmp_path / "voila.png"))
    icons = "https://cdn.jsdelivr.net/npm/@fortawesome/"  # styles of Voilà's own page; it does without
    assert [asked for asked in page.outside if not asked.startswith(icons)] == []
