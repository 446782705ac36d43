"""03 in a real browser: it runs, its controls redraw from the trace, and nothing is fetched from elsewhere."""

import re
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "03_capital_of_vietnam.ipynb"


def test_controls_redraw_by_keyboard_and_by_mouse(open_notebook, run_all, idle, tmp_path):
    from playwright.sync_api import expect

    page = open_notebook(NOTEBOOK)
    run_all(page)
    says = page.locator("div.widget-label", has_text="onset at layer")
    picture = page.locator(".widget-vbox img.widget-image")
    expect(says).to_have_text(re.compile(r"^layers 1 … 30: change of p: 0\.457\d, onset at layer 22$"))
    expect(picture).to_have_count(1)
    seen = [picture.get_attribute("src")]

    def changed(text):
        expect(says).to_have_text(re.compile(text))  # it is set after the picture
        idle(page)
        expect(picture).to_have_count(1)
        expect(picture).not_to_have_attribute("src", seen[-1])
        seen.append(picture.get_attribute("src"))

    page.locator(".widget-dropdown select").select_option("41 → ␣Ho")
    changed(r"^layers 1 … 30: change of p: 0\.452\d, onset at layer 30$")
    page.get_by_role("slider").first.press("ArrowRight")
    changed(r"^layers 2 … 30")
    upper = page.get_by_role("slider").last
    track = page.locator(".widget-slider .noUi-target").bounding_box()
    upper.hover()
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] / 2, track["y"] + track["height"] / 2, steps=8)
    page.mouse.up()
    changed(r"^layers 2 … 1\d, and 30: change of p: 0\.452\d, onset at layer 30$")  # layers left out: the sum stays
    assert len(set(seen)) == 4
    assert picture.evaluate("image => image.complete && image.naturalWidth > 300")
    page.screenshot(path=str(tmp_path / "vietnam.png"))
    assert page.outside == []
