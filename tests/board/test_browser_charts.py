"""Charts in a real browser: sections, search, scales, seeds, files to take away, and a narrow screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.board import test_browser
from tests.board.scene import CONFIG, line, metrics, serving, write_run
from tests.board.test_browser import Seen

pytestmark = test_browser.pytestmark
browser = test_browser.browser
MANY = 60
RUNS = ("sums-seed1", "sums-seed2", "other")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("charts")
    for number, name in enumerate(RUNS):
        config = json.loads(json.dumps(CONFIG))
        config["trainer"] |= {"seed": number, "experiment_name": name}
        if name == "other":
            config["actor_rollout_ref"]["rollout"]["n"] = 16
        run = write_run(root / name, shift=0.05 * number, config=config)
        more = {f"many/metric_{i:02d}": float(i - 3) for i in range(MANY)}
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(line(step, **metrics(step), **more) for step in (41, 42, 43))
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root) as url:
        yield url


@pytest.fixture
def seen(browser: Any, url: str) -> Iterator[Seen]:
    seen = Seen(browser, url)
    seen.page.wait_for_selector(".runs-table tbody tr >> nth=2")
    for run in RUNS:
        seen.page.get_by_label(f"compare {run}").check()
    seen.page.get_by_role("link", name="Curves").click()
    seen.page.wait_for_selector(".charts .u-over >> nth=5")
    yield seen
    seen.close()


def test_sections_open_page_and_are_found_by_expressions(seen: Seen) -> None:
    page = seen.page
    page.get_by_role("button", name="All metrics").click()
    page.wait_for_selector(".metrics >> nth=4")
    assert page.locator(".charts").count() == 0
    page.get_by_role("button", name=f"many {MANY}").click()
    page.wait_for_selector("h3:has-text('many/metric_23')")
    assert page.locator(".charts .card").count() == 24
    page.get_by_label("next metrics").click()
    page.wait_for_selector(f"text=25 to 48 of {MANY} metrics")
    page.reload()
    page.wait_for_selector("h3:has-text('many/metric_00')")  # what is open is in the address
    search = page.locator("input[type=search]")
    search.fill("^actor/(entropy|grad_norm)$")
    page.wait_for_selector("h3:has-text('actor/grad_norm')")
    assert page.locator(".charts .card").count() == 2
    search.fill("actor/(")
    page.wait_for_selector("text=This is not a regular expression")


def test_scale_smoothing_and_colours_stay(seen: Seen) -> None:
    page = seen.page
    page.locator("input[type=range]").fill("70")
    page.get_by_role("button", name="Log").click()
    page.locator("input[type=search]").fill("many/metric_0")  # some are below 0: gaps, no error
    page.wait_for_selector("h3:has-text('many/metric_09')")
    colours = page.locator("header .dot").evaluate_all("all => all.map(one => one.style.background)")
    assert len(set(colours)) == 3
    page.get_by_role("link", name="Config").click()
    page.get_by_role("link", name="Curves").click()
    page.wait_for_selector(".charts .u-over")
    assert "smooth=70" in page.url and "log=1" in page.url
    page.goto(page.url.split("#")[0])  # the board is opened anew
    page.wait_for_selector(".runs-table")
    page.get_by_role("link", name="Curves").click()
    page.wait_for_selector(".charts .u-over")
    assert page.locator("input[type=range]").input_value() == "70"
    assert page.get_by_role("button", name="Log").get_attribute("aria-pressed") == "true"


def test_seeds_are_one_mean(seen: Seen) -> None:
    page = seen.page
    legend = page.locator(".charts .u-legend").first
    assert legend.locator("tr.u-series:visible").count() == 4  # the step, and three runs
    page.get_by_role("button", name="Seeds").click()
    page.wait_for_selector(".u-legend :text('sums-seed (2 runs)')")
    assert legend.locator("tr.u-series:visible").count() == 3
    seen.shot("seeds")


def test_numbers_and_picture_can_be_taken_away(seen: Seen, tmp_path: Path) -> None:
    page = seen.page
    card = page.locator(".charts .card").first
    with page.expect_download() as table:
        card.get_by_role("button", name="CSV").click()
    lines = Path(table.value.path()).read_text().splitlines()
    assert table.value.suggested_filename == "critic_score_mean.csv"
    assert lines[0] == "run,metric,step,time,value" and len(lines) == 1 + 3 * 44
    with page.expect_download() as picture:
        card.get_by_role("button", name="PNG").click()
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")


def test_nothing_is_off_the_screen_of_a_phone(seen: Seen) -> None:
    page = seen.page
    page.set_viewport_size({"width": 390, "height": 800})
    for name, what in (
        ("Runs", ".runs-table"),
        ("Curves", ".charts .u-over"),
        ("Rollouts", ".samples .sample"),
        ("Config", ".config-table"),
        ("Health", ".alert"),
        ("Checkpoints", "text=global_step_40"),
    ):
        page.get_by_role("link", name=name).click()
        page.wait_for_selector(what)
        assert page.evaluate("document.documentElement.scrollWidth") == 390, name
        wide = page.evaluate(
            "[...document.querySelectorAll('header *, main *')]"
            ".filter(one => one.getBoundingClientRect().right > 391"
            " && !one.closest('.config-table, .checkpoints table, .pills, .u-wrap, .text')).map(one => one.outerHTML.slice(0, 120))"
        )
        assert wide == [], name
        seen.shot(f"phone-{name.lower()}")


def test_scores_and_lengths_by_step(seen: Seen) -> None:
    page = seen.page
    page.get_by_role("button", name="Distributions").click()
    page.wait_for_selector(".distributions .heat rect >> nth=10")
    assert page.locator(".distributions").count() == 3
    assert "of 18 samples" in page.locator(".heat rect title").first.text_content()
    seen.shot("distributions")
    page.get_by_role("button", name="Validation").click()
    page.wait_for_selector(".steps :text('step 0')")


def test_two_runs_answer_one_prompt(seen: Seen) -> None:
    page = seen.page
    page.get_by_role("link", name="Rollouts").click()
    page.get_by_role("button", name="Validation").click()
    page.get_by_label("step", exact=True).select_option("0")
    page.get_by_label("compare with run").select_option("sums-seed1")
    page.wait_for_selector(".pair >> nth=0")
    heads = page.locator(".pair .sample-head").all_inner_texts()
    assert "other, step 0, #0" in heads[0] and "sums-seed1, step 0, #0" in heads[1]
    seen.shot("two-runs")
    page.reload()
    page.wait_for_selector(".pair")  # it is in the address
    page.get_by_label("compare with run").select_option("")
    page.wait_for_selector(".samples .sample")


def test_notes_and_tags(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "two")
    with serving(tmp_path) as url:
        seen = Seen(browser, url)
        page = seen.page
        page.get_by_label("note on one").click()
        page.get_by_label("Tags, with commas").fill("baseline, lr sweep")
        page.get_by_label("Note", exact=True).fill("<b>best</b> so far")
        seen.shot("notes")
        page.get_by_role("button", name="Save").click()
        page.wait_for_selector(".badge.tag:has-text('lr sweep')")
        page.locator("input[type=search]").fill("baseline")
        page.wait_for_selector("text=1 of 2 runs")
        page.reload()
        page.wait_for_selector(".note-text:has-text('<b>best</b> so far')")
        seen.close()
