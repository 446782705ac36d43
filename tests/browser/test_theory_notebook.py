"""01 in a real browser: it runs, the sliders of its plane redraw text and picture, and nothing is fetched."""

import re
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "01_theory.ipynb"
NUMBERS = r"(\d+) steps: observed (\S+), midpoint (\S+), gauss-legendre (\S+); along the bent curve (\S+)"


def test_sliders_redraw_the_plane_by_keyboard(open_notebook, run_all, idle, tmp_path):
    from playwright.sync_api import expect

    page = open_notebook(NOTEBOOK, "segment")
    run_all(page)
    says = page.locator("div.widget-label", has_text="along the bent curve")
    picture = page.locator(".widget-vbox img.widget-image")
    expect(says).to_have_count(1)
    expect(picture).to_have_count(1)
    seen = [picture.get_attribute("src")]

    def told():
        """The line of text, as its number of steps and the four results."""
        return re.fullmatch(NUMBERS, says.inner_text()).groups()

    def press(name, key, text):
        """Press a key on the slider of this name: what it says then, with another picture."""
        slider = page.locator(".widget-hslider", has=page.get_by_text(name, exact=True)).get_by_role("slider")
        slider.focus()
        slider.press(key)
        expect(picture).not_to_have_attribute("src", seen[-1])
        expect(says).to_have_text(re.compile(text))  # it is set after the picture
        idle(page)
        expect(picture).to_have_count(1)
        seen.append(picture.get_attribute("src"))
        return told()

    start = told()
    assert start[0] == "4" and start[1] == start[4] == "0.9775" and start[2] != start[3] != start[1]
    assert press("bend", "Home", "^4 steps") == start  # the curve is another, its integral is not
    moved = press("end, second", "ArrowLeft", "^4 steps: observed (?!0.9775)")
    assert moved[1] == moved[4] != start[1] and moved[2] != start[2]
    page.locator(".widget-hslider", has=page.get_by_text("steps", exact=True)).get_by_role("slider").press("End")
    expect(says).to_have_text(re.compile("^32 steps"))
    assert told()[1] == moved[1] == told()[3] and told()[2] != moved[2]  # more steps: the same, and closer to it
    assert len(set(seen)) == 3
    assert picture.evaluate("image => image.complete && image.naturalWidth > 300")
    page.screenshot(path=str(tmp_path / "theory.png"))
    assert page.outside == []
