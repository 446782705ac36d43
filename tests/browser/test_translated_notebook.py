"""05 in a real browser: it runs, the switch between the paths and the ridge redraw, and nothing is fetched."""

import re
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "05_translated_path.ipynb"
DIGEST = """async image => {
    const bytes = await (await fetch(image.src)).arrayBuffer();
    return new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)).toString();
}"""


def test_paths_ridges_and_layers_redraw(open_notebook, run_all, idle, tmp_path):
    from playwright.sync_api import expect

    page = open_notebook(NOTEBOOK)
    run_all(page)
    says = page.locator("div.widget-label", has_text="onset at layer")
    picture = page.locator(".widget-vbox img.widget-image")
    ridge = page.locator(".widget-hslider", has=page.get_by_text("ridge", exact=True))

    def shown(text):
        """The line of text, once it is this one, and the digest of the one picture above it."""
        expect(says).to_have_text(re.compile(text))  # it is set after the picture
        idle(page)
        expect(picture).to_have_count(1)
        return says.inner_text(), picture.evaluate(DIGEST)

    def path(name):
        page.locator(".widget-toggle-buttons").get_by_role("button", name=name, exact=True).click()

    seen = [shown(r"^layers 1 … 30: change of p: 0\.452\d, onset at layer 30$")]
    path("translated")
    seen.append(shown(r"^layers 1 … 30: change of p: 0\.452\d, onset at layer 28$"))
    path("plain")
    assert shown("onset at layer 30$") == seen[0]

    page.locator(".widget-dropdown select").select_option("38 → ␣of")  # Δp depends on what translator 0 knows
    plain = shown(r"^layers 1 … 30: change of p: 0\.96\d\d, onset at layer 13$")
    path("translated")
    seen += [plain, shown(r"^layers 1 … 30: change of p: 0\.42\d\d, onset at layer 12$")]  # the weakest ridge
    expect(ridge.locator(".widget-readout")).to_have_text("0.0001")
    ridge.get_by_role("slider").press("ArrowRight")
    seen.append(shown(r"^layers 1 … 30: change of p: 0\.44\d\d, onset at layer 12$"))
    expect(ridge.locator(".widget-readout")).to_have_text("0.01")
    lower = page.locator(".widget-hslider", has=page.get_by_text("layers", exact=True)).get_by_role("slider").first
    lower.press("ArrowRight")
    seen.append(shown(r"^layers 2 … 30: change of p: 0\.44\d\d, onset at layer 13$"))  # the sum stays

    path("plain")
    seen.append(shown(r"^layers 2 … 30: change of p: 0\.96\d\d, onset at layer 13$"))
    ridge.get_by_role("slider").press("End")  # not used on this path
    expect(ridge.locator(".widget-readout")).to_have_text("1.0")
    assert shown("^layers 2 … 30") == seen[-1]
    lower.press("ArrowLeft")  # the kernel takes it after the ridge
    assert shown("^layers 1 … 30") == plain
    path("translated")
    seen.append(shown(r"^layers 1 … 30: change of p: 0\.92\d\d, onset at layer 13$"))

    texts, pictures = zip(*seen, strict=True)
    assert len(set(texts)) == len(set(pictures)) == len(seen) == 8
    assert picture.evaluate("image => image.complete && image.naturalWidth > 300")
    picture.locator("..").screenshot(path=str(tmp_path / "translated.png"))
    assert page.outside == []
