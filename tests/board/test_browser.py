"""Every page in a real browser: clicked through, nothing executed that a model wrote, no error on the console.

With STROP_SCREENSHOTS=FOLDER the pages are also written there as pictures (`make board-images`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from strop.run.heartbeat import Heartbeat
from strop.types import ImageInput
from tests.board.scene import CONFIG, LONG, answer, line, metrics, serving, write_run, write_step

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = (
    "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'><b>bold</b> javascript:alert(1)"
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'strop[browser]'")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experiments")
    if "STROP_SCREENSHOTS" in os.environ:  # a picture shows the path
        root = Path("/tmp/strop-board-images/runs")
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
    write_run(root / "grpo-lr1e-6")
    other = json.loads(json.dumps(CONFIG))
    other["actor_rollout_ref"]["actor"]["optim"]["lr"] = 5e-6
    other["actor_rollout_ref"]["rollout"]["n"] = 8
    write_run(root / "grpo-lr5e-6", shift=0.08, config=other)
    running = write_run(
        root / "ppo-critic", steps=23, shift=0.02, config=CONFIG | {"algorithm": {"adv_estimator": "gae"}}
    )
    Heartbeat(running).beat(24, "gen")
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root) as url:
        yield url


class Seen:
    """A page that remembers what went wrong in it."""

    def __init__(self, browser: Any, url: str, page: str = "", scheme: str = "light"):
        context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
        self.page = context.new_page()
        self.page.set_default_timeout(10_000)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text)
        )
        self.page.on("dialog", lambda dialog: (self.problems.append("a dialog opened"), dialog.dismiss()))
        self.page.on(
            "request",
            lambda asked: asked.url.startswith((url, "data:")) or self.problems.append(f"asked {asked.url}"),
        )
        self.page.goto(url + page)

    def shot(self, name: str) -> None:
        if folder := os.environ.get("STROP_SCREENSHOTS"):
            self.page.wait_for_timeout(400)
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=f"{folder}/{name}.png")

    def close(self) -> None:
        assert self.problems == []
        self.page.context.close()


@pytest.fixture
def seen(browser: Any, url: str) -> Iterator[Seen]:
    seen = Seen(browser, url)
    yield seen
    seen.close()


def test_runs_are_listed_filtered_and_compared(seen: Seen) -> None:
    page = seen.page
    page.wait_for_selector(".runs-table tbody tr >> nth=2")
    assert page.locator(".runs-table tbody tr").count() == 3
    page.wait_for_selector(".spark polyline")
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    seen.shot("runs")
    page.keyboard.press("/")
    page.keyboard.type("5e-6")
    page.wait_for_selector("text=1 of 3 runs")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Compare 2").click()
    page.wait_for_selector(".charts .u-over")
    assert page.locator("header .chip").count() == 2


def open_page(seen: Seen, name: str) -> None:
    page = seen.page
    page.wait_for_selector(".runs-table tbody tr >> nth=2")
    for run in ("grpo-lr1e-6", "grpo-lr5e-6"):
        page.get_by_label(f"compare {run}").check()
    page.get_by_role("link", name=name).click()


def test_curves_are_smoothed_found_and_stacked(seen: Seen) -> None:
    page = seen.page
    open_page(seen, "Curves")
    page.wait_for_selector(".charts .u-over >> nth=5")
    page.locator("input[type=range]").fill("60")
    page.locator(".charts .u-over").first.hover()
    seen.shot("curves")
    page.get_by_role("button", name="Time", exact=True).click()
    page.get_by_role("button", name="Time per phase").click()
    page.wait_for_selector(".wide .u-over >> nth=1")
    assert "update_actor" in page.locator(".wide .u-legend").first.inner_text()
    page.get_by_role("button", name="Step", exact=True).click()
    page.locator(".wide .u-over").first.hover()
    seen.shot("phases")
    page.get_by_role("button", name="Memory").click()
    page.wait_for_selector("text=perf/max_memory_allocated_gb")
    page.locator("input[type=search]").fill("nothing like this")
    page.wait_for_selector("text=No metric matches")
    page.locator("input[type=search]").fill("entropy")
    page.wait_for_selector("h3:has-text('actor/entropy')")
    assert page.locator(".charts .card").count() == 1


def test_rollouts_are_browsed_filtered_searched_and_coloured(seen: Seen) -> None:
    page = seen.page
    page.get_by_role("link", name="Rollouts").click()
    page.wait_for_selector(".samples .sample >> nth=3")
    assert page.locator(".group-list .line").count() == 5
    seen.shot("rollouts")
    for name, kind in (
        ("Log-prob", "hot"),
        ("Advantage", "plus"),
        ("Ratio", "plus"),
        ("Entropy", "hot"),
        ("Mask", "role-1"),
    ):
        page.get_by_role("button", name=name, exact=True).click()
        page.wait_for_selector(f".tokens .text span.{kind}")
    page.get_by_role("button", name="Log-prob", exact=True).click()
    page.locator(".tokens .text span").nth(4).hover()
    assert "log-prob" in page.locator(".token-facts").first.inner_text()
    seen.shot("tokens")
    page.get_by_label("which prompts").select_option("failed")
    page.wait_for_selector(".group-list .line:has-text('Prove it')")
    page.wait_for_selector("text=reward failed")
    page.get_by_label("which prompts").select_option("all")
    page.get_by_label("order").select_option("worst")
    page.wait_for_selector(".group-list .line:first-child:has-text('Count to')")
    page.locator("input[type=search]").fill("use the tool")
    page.wait_for_selector(".turn.environment")
    assert "tool_response" in page.locator(".turn.environment").first.inner_text()
    page.get_by_role("button", name="Mask", exact=True).click()
    seen.shot("conversation")
    page.locator("input[type=search]").fill("")
    page.get_by_label("step", exact=True).select_option("all")
    page.wait_for_selector(".group-list .facts:has-text('step 37')")


def test_keys_walk_through_prompts_and_steps(seen: Seen) -> None:
    page = seen.page
    page.wait_for_selector(".runs-table")
    page.keyboard.press("3")
    page.wait_for_selector("h2:has-text('step 40')")
    page.keyboard.press("j")
    page.wait_for_selector("h2:has-text('Row 401')")
    page.keyboard.press("[")
    page.wait_for_selector("h2:has-text('Row 390')")
    assert page.get_by_label("step", exact=True).input_value() == "39"
    page.keyboard.press("?")
    page.wait_for_selector(".sheet")
    seen.shot("keys")
    page.keyboard.press("Escape")
    page.wait_for_selector(".sheet", state="detached")
    for key, what in (
        ("4", ".config-table"),
        ("5", ".alert"),
        ("6", "text=global_step_40"),
        ("2", ".charts"),
        ("1", ".runs-table"),
    ):
        page.keyboard.press(key)
        page.wait_for_selector(what)


def test_a_step_of_a_long_run_is_found(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "long")
    whole = (run / "samples" / "train_000040.parquet").read_bytes()
    for step in range(41, 700):
        if step % 10 != 3:
            (run / "samples" / f"train_{step:06d}.parquet").write_bytes(whole)
    with serving(tmp_path) as url:
        seen = Seen(browser, url, "/#/rollouts")
        page, step = seen.page, seen.page.get_by_label("step", exact=True)
        page.wait_for_selector("h2:has-text('step 699')")
        assert 80 < step.locator("option").count() < 150
        page.get_by_label("go to step").fill("333")
        page.keyboard.press("Enter")
        page.wait_for_selector("h2:has-text('step 332')")
        assert step.input_value() == "332" and page.get_by_label("go to step").input_value() == ""
        page.keyboard.press("Escape")
        page.keyboard.press("]")
        page.wait_for_selector("h2:has-text('step 334')")
        seen.close()


def test_images_are_shown_beside_the_tokens(browser: Any, tmp_path: Path) -> None:
    def shown(colour: str, width: int) -> ImageInput:
        picture = Image.new("RGB", (width, 300), colour)
        return ImageInput(colour, {}, 3, picture.size, ord("§"), picture=picture)

    run = write_run(tmp_path / "pictures")
    wide, tool = shown("red", 2000), shown("blue", 300)
    plain = answer("a wide one", prompt="see §§§ now", images=(wide,))
    write_step(run, "train", 41, [plain, answer("and blue", prompt="see §§§ now", images=(wide, tool))])
    with serving(tmp_path) as url:
        seen = Seen(browser, url, "/#/rollouts")
        page = seen.page
        page.wait_for_selector(".prompt-box .pictures img")
        assert page.locator(".prompt-box .pictures img").count() == 1
        assert page.locator(".sample .pictures img").count() == 1, "of a tool, in the second sample"
        assert "image 1, 2000 x 300 pixels" in page.locator(".prompt-box figcaption").inner_text()
        seen.shot("images")
        page.set_viewport_size({"width": 390, "height": 800})
        for place in (".prompt-box", ".sample"):
            box = page.locator(f"{place} .pictures img").evaluate(
                "one => [one.complete, one.naturalWidth, one.getBoundingClientRect().width,"
                " one.getBoundingClientRect().right]"
            )
            complete, natural, width, right = box
            assert complete and natural > 0 and width > 40 and right <= 390, (place, box)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        seen.close()


def test_two_steps_of_one_validation_prompt_are_compared(seen: Seen) -> None:
    page = seen.page
    page.get_by_role("link", name="Rollouts").click()
    page.get_by_role("button", name="Validation").click()
    page.wait_for_selector(".pill >> nth=4")
    page.locator(".pill", has_text="0").first.click()
    page.wait_for_selector(".pair ins")
    assert (
        "41" in page.locator(".pair ins").all_inner_texts()
        and "nine" in page.locator(".pair del").all_inner_texts()
    )
    seen.shot("difference")


def test_configurations_are_compared(seen: Seen) -> None:
    page = seen.page
    open_page(seen, "Config")
    page.wait_for_selector(".config-table")
    keys = page.locator(".config-table td:first-child").all_inner_texts()
    assert keys == ["actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n"]
    page.wait_for_selector("text=sequences per step")
    seen.shot("config")
    page.get_by_role("button", name="All keys").click()
    page.locator("input[type=search]").fill("adv_estimator")
    page.wait_for_selector("text=1 of")


def test_health_and_checkpoints(seen: Seen) -> None:
    page = seen.page
    page.get_by_role("link", name="Health").click()
    page.wait_for_selector("text=Raise entropy_coeff")
    seen.shot("health")
    page.get_by_role("link", name="Checkpoints").click()
    page.wait_for_selector("text=strop merge")
    assert page.locator(".badge.finished", has_text="latest").count() == 1
    seen.shot("checkpoints")


def test_dark_by_the_system_and_by_hand(browser: Any, url: str) -> None:
    seen = Seen(browser, url, scheme="dark")
    page = seen.page
    page.wait_for_selector(".runs-table")
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    open_page(seen, "Curves")
    page.wait_for_selector(".charts .u-over >> nth=5")
    seen.shot("curves-dark")
    page.keyboard.press("3")
    page.wait_for_selector(".samples .sample")
    page.get_by_role("button", name="Advantage", exact=True).click()
    page.wait_for_selector(".tokens .text span.minus")
    seen.shot("rollouts-dark")
    page.keyboard.press("t")
    page.wait_for_selector("html[data-theme=light]")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != dark
    seen.close()


def test_nothing_a_model_wrote_is_executed(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / EVIL.replace("/", "_")[:120])
    write_step(
        run,
        "train",
        41,
        [
            answer(EVIL, prompt=EVIL, truth=EVIL, source=EVIL, extras={EVIL: EVIL}, score=score)
            for score in (0.0, 1.0)
        ],
    )
    write_step(run, "validation", 41, [answer(EVIL, prompt=EVIL, index=0)])
    (run / "alerts.jsonl").write_text(
        json.dumps(
            {
                "step": 1,
                "name": EVIL,
                "severity": EVIL,
                "message": EVIL,
                "advice": EVIL,
                "values": {EVIL: EVIL},
            }
        )
        + "\n"
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(41, **metrics(41), **{f"val-core/{EVIL}": 1.0}))
    (run / "metrics.config.json").write_text(json.dumps({EVIL: EVIL, "trainer": {"project_name": EVIL}}))
    with serving(tmp_path) as url:
        seen = Seen(browser, url)
        page = seen.page
        page.wait_for_selector(".runs-table")
        for key, what in (
            ("2", ".charts .u-over"),
            ("3", ".samples .sample"),
            ("4", ".config-table"),
            ("5", ".alert"),
            ("6", "table"),
        ):
            page.keyboard.press(key)
            page.wait_for_selector(what)
            if key == "3":
                page.get_by_role("button", name="Log-prob", exact=True).click()
                page.wait_for_selector(".tokens .text span.hot")
            page.wait_for_timeout(150)
            assert page.evaluate("window.stolen") is None
            assert page.locator("main img, main script, main b:has-text('bold')").count() == 0
        seen.close()


def test_an_answer_of_five_megabytes_does_not_stop_the_page(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "long")
    write_step(run, "train", 41, [answer("x" * 500_000, prompt="?"), answer("short", score=0.0)], texts=LONG)
    with serving(tmp_path) as url:
        seen = Seen(browser, url, "/#/rollouts")
        seen.page.wait_for_selector("text=4,980,000 more characters")
        seen.page.get_by_role("button", name="Log-prob", exact=True).click()
        seen.page.wait_for_selector("text=495,904 more tokens")
        seen.page.get_by_role("button", name="495,904 more tokens").click()
        seen.page.wait_for_selector("text=491,808 more tokens")
        seen.close()


def test_a_long_answer_with_emojis_is_shown_whole(browser: Any, tmp_path: Path) -> None:
    """An emoji is one character for the server and two for a browser."""
    run = write_run(tmp_path / "smiles")
    write_step(run, "train", 41, [answer("\U0001f642" * 5000 + "x" * 20_000 + "END", prompt="?")])
    with serving(tmp_path) as url:
        seen = Seen(browser, url, "/#/rollouts")
        seen.page.get_by_role("button", name="5,003 more characters").click()
        seen.page.wait_for_selector("text=xEND")
        shown = seen.page.locator(".sample .text").inner_text()
        assert shown == "\U0001f642" * 5000 + "x" * 20_000 + "END"
        seen.close()


def test_a_damaged_file_is_shown_beside_the_rest(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "hurt")
    whole = (run / "samples" / "train_000040.parquet").read_bytes()
    (run / "samples" / "train_000040.parquet").write_bytes(whole[:-100])
    with (run / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    with serving(tmp_path) as url:
        seen = Seen(browser, url)
        page = seen.page
        page.wait_for_selector("text=damaged file")
        page.keyboard.press("3")
        page.wait_for_selector("text=train_000040.parquet is damaged")
        seen.shot("damaged")
        page.keyboard.press("[")
        page.wait_for_selector(".samples .sample")
        seen.close()


def test_a_run_that_is_written_while_it_is_looked_at(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", steps=40)
    with serving(tmp_path) as url:
        seen = Seen(browser, url)
        seen.page.wait_for_selector(".runs-table td:has-text('40')")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(77, **metrics(77)))
        seen.page.wait_for_selector(".runs-table td:has-text('77')", timeout=12_000)
        seen.close()


def test_an_empty_folder_says_what_to_do(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        seen = Seen(browser, url)
        seen.page.wait_for_selector("text=No runs here yet")
        seen.page.keyboard.press("2")
        seen.page.wait_for_selector("text=strop quickstart")
        seen.shot("empty")
        seen.close()
