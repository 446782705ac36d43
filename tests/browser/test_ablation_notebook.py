"""04 in a real browser: prompt and ablation are chosen, picture and text follow, and nothing is fetched."""

import re
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "04_ablation_validation.ipynb"


def test_prompt_and_ablation_are_chosen_and_redrawn(open_notebook, run_all, idle, tmp_path):
    from playwright.sync_api import expect

    page = open_notebook(NOTEBOOK, "try")
    run_all(page)
    says = page.locator("div.widget-label", has_text="without the last block")
    picture = page.locator(".widget-vbox img.widget-image")
    prompt, ablation = (
        page.locator(".widget-dropdown", has_text=name).locator("select") for name in ("prompt", "ablation")
    )
    expect(says).to_have_text(re.compile(r"ρ = −?\d\.\d\d; largest drop at block \d+$"))
    seen = [(says.inner_text(), picture.get_attribute("src"))]
    for select, option in ((prompt, "2␣+␣2␣="), (ablation, "resample_all"), (ablation, "skip_last")):
        select.select_option(option)
        expect(picture).not_to_have_attribute("src", seen[-1][1])
        idle(page)
        expect(picture).to_have_count(1)
        seen.append((says.inner_text(), picture.get_attribute("src")))
    assert len(set(seen)) == 4
    page.screenshot(path=str(tmp_path / "drops.png"))
    assert page.outside == []
