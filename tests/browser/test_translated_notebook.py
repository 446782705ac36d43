"""05 in a real browser: the path is switched between plain and translated, by ridge and layers; nothing is fetched."""

from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "05_translated_path.ipynb"


def test_the_path_is_switched_by_mouse_and_the_ridge_and_layers_move_by_keyboard(
    open_notebook, run_all, idle, tmp_path
):
    from playwright.sync_api import expect

    page = open_notebook(NOTEBOOK, "explore")
    run_all(page)
    words, cells = page.locator(".igl .chart .words"), page.locator(".igl [data-cell^='38,']")

    def slider(name):
        return page.locator(".widget-inline-hbox", has_text=name).get_by_role("slider").first

    def told(change, onset):
        """What stands below the one chart, once it says this change and onset; and the colours of the token's row."""
        expect(words).to_contain_text(f"Δ = {change}: ")
        expect(words).to_contain_text(f"layer {onset}.")
        idle(page)
        return words.inner_text(), [cell.get_attribute("fill") for cell in cells.all()]

    strip = page.locator(".igl .strip button.answer")
    strip.filter(has_text="␣Ho").click()  # which all paths give the same Δp
    expect(words).to_have_count(0)
    strip.filter(has_text="␣of").click()
    seen = [told("+0.4480", 12)]  # translated, as it begins
    slider("ridge").press("End")
    seen.append(told("+0.9240", 13))
    page.get_by_role("button", name="plain", exact=True).click()
    seen.append(told("+0.9659", 13))
    slider("ridge").press("Home")  # of no account on the plain path
    idle(page)
    assert told("+0.9659", 13) == seen[-1]
    page.get_by_role("button", name="translated", exact=True).click()
    seen.append(told("+0.4276", 12))
    slider("layers").press("ArrowRight")  # from 0, which the embedding is, to 1: all are still there
    slider("layers").press("ArrowRight")
    expect(cells).to_have_count(29)
    seen.append(told("+0.4276", 14))
    page.get_by_role("button", name="plain", exact=True).click()
    slider("layers").press("Home")
    expect(cells).to_have_count(30)
    assert told("+0.9659", 13) == seen[2]
    assert len({str(colours) for _, colours in seen}) == 5
    page.screenshot(path=str(tmp_path / "translated.png"))
    assert page.outside == []
