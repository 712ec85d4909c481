"""The viewer's page in headless Chromium: recorded text never runs, and keys and filters work."""

import json

import chromium
import pytest
from hostile_texts import HOSTILE
from synthetic_run import make_run, one_turn_groups, recorded_run

from trial_ray.reports.viewer import write_viewer
from trial_ray.rollout.recording import write_groups
from trial_ray.runs.reader import open_run
from trial_ray.runs.recorded_trajectory import TokenTexts

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="there is no chromium on the path")

STORED = [text.encode("utf-8", "replace").decode() for text in HOSTILE]


@pytest.fixture(scope="module")
def browser():
    with chromium.Chromium() as browser:
        browser.look(1300, 900)
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory, tokenizer):
    """Two runs of the same tasks."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [make_run(folder / name, tokenizer, 32, seed=seed) for seed, name in enumerate(("grpo", "trial"))]
    return write_viewer([*map(open_run, runs)], folder / "viewer").page.as_uri()


@pytest.fixture
def opened(browser, page):
    browser.events.clear()
    browser.open("about:blank", "true")
    browser.open(page)
    browser.wait("document.querySelector('article.current')")
    yield browser
    assert not browser.events


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent")


def count(browser, selector):
    return browser.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


def choose(browser, name, value):
    browser.evaluate(
        f"(() => {{ const e = document.querySelector('[name={name}]'); e.value = {json.dumps(value)};"
        " e.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def test_recorded_text_never_runs(browser, tmp_path, tokenizer):
    write_groups(tmp_path / "trajectories", 1, one_turn_groups(STORED, tokenizer.encode), "runner001")
    runs = [recorded_run(tmp_path, name, recorded=[1], tokens=TokenTexts(tokenizer)) for name in STORED[1:3]]
    browser.events.clear()
    browser.open(write_viewer(runs, tmp_path / "viewer", STORED).page.as_uri())
    seen = []
    for _ in STORED:
        browser.wait("document.querySelector('article.current .prompts')")
        browser.press("c")
        browser.wait("document.querySelectorAll('article').length === 2")
        browser.hover("article .tokens span")
        seen.append(text(browser, "#trajectory"))
        browser.press("j")
        browser.wait("document.querySelectorAll('article').length === 1")
    assert browser.evaluate("typeof window.ran") == "undefined"
    # The browser blocked nothing either: no text relied on the page's policy.
    assert not browser.events
    assert count(browser, "main script, main img, nav script, nav img, header img, li img") == 0
    assert "<script>window.ran = 1</script>" in "".join(seen)


def test_policy_blocks_other_scripts(opened):
    tried = """(code => { try { return String(code()); } catch (error) { return error.name; } })"""
    script = "() => { const s = document.createElement('script'); s.text = 'window.ran = 1'; document.head.append(s); }"
    for code in (script, "() => (document.body.innerHTML = '<b>')"):
        assert opened.evaluate(f"{tried}({code})") == "TypeError"
    assert opened.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
    assert opened.evaluate("typeof window.ran") == "undefined"
    opened.events.clear()


def test_tokens_show_their_numbers_and_the_teacher_context_is_marked(opened):
    assert count(opened, ".tokens .up") + count(opened, ".tokens .down") > 20
    opened.hover("article.current .tokens span:nth-child(3)")
    opened.wait("!document.getElementById('tip').hidden")
    gap = opened.evaluate("viewer.readTrajectory(0).then(t => t.turns[0].gap[2])")
    assert f"{gap:.4f}".replace("-", "−") in text(opened, "#tip")
    ordinary, hindsight = opened.evaluate(
        "[...document.querySelectorAll('article.current .prompts .text')].map(p => p.textContent)"
    )
    assert ordinary.replace("▾", "") == hindsight.replace(text(opened, "article.current mark.evidence"), "")


def test_filters_orders_and_search_agree_with_the_index(opened):
    rows = opened.evaluate("viewer.rows")
    chosen = {"success": "1", "run": "1", "family": "pick_two"}
    for name, value in chosen.items():
        choose(opened, name, value)
    expected = [row for row in rows if row["success"] and row["run"] == 1 and row["family"] == "pick_two"]
    assert text(opened, "#status") == f"{len(expected)} of 64 trajectories"
    for name in chosen:
        choose(opened, name, "")
    opened.press("/")
    for letter in "NOTHING HAPPENS":
        opened.press(letter)
    opened.wait("document.querySelector('mark.hit')")
    assert text(opened, "#status") == "64 of 64 trajectories"
