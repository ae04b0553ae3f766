"""The page in a browser: everything is drawn, legible at every width, and nothing leaves the machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import natgrad.page
from natgrad.compare.verdict import judge
from page import made_up

pytest.importorskip("plotly", reason="the page needs plotly")
playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")

FIGURES = ("curves", "step-time", "sweep", "inside-kfac", "layers")
LONG = 'K-FAC with a name of sixty characters, <b>"odd"</b> & %{x} $y$'
GROUND = "#figure-curves .main-svg"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Seen:
    """What a page asked for and complained about."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's, or the one that playwright brought."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with playwright.sync_playwright() as driver:
        try:
            one = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"there is no browser that works: {str(error).splitlines()[0]}")
        yield one
        one.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = made_up.comparison()
    path = tmp_path_factory.mktemp("page") / "page.html"
    natgrad.page.write(path, made, judge(made))
    return path


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight contenders, one with a long and odd name, and a hundred layers."""
    names = ["SGD", "AdamW", "Lion", "LAMB", LONG, "Shampoo", "K-FAC two", "RMSprop"]
    made = made_up.comparison(names=names, seeds=2, layers=100)
    path = tmp_path_factory.mktemp("page") / "crowded.html"
    natgrad.page.write(path, made, judge(made))
    return path


def opened(browser: Any, path: Path, *, width: int = 1280, scheme: str = "light", **more: Any) -> tuple[Any, Seen]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
    page = context.new_page()
    seen = Seen()
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.goto(path.as_uri())
    until(page, "document.querySelectorAll('figure').length === document.querySelectorAll('.drawn').length")
    return page, seen


def until(page: Any, condition: str) -> None:
    """Waits for it. (What playwright has for that evaluates texts in the page, which our policy forbids.)"""
    end = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


@pytest.fixture(scope="module")
def shown(browser: Any, path: Path) -> Iterator[tuple[Any, Seen]]:
    """One page for the tests that leave it as it was."""
    page, seen = opened(browser, path)
    yield page, seen
    page.context.close()


def colour(page: Any, selector: str, name: str) -> str:
    return page.eval_on_selector(selector, f"element => getComputedStyle(element).{name}")


def test_all_figures_are_drawn(shown):
    page, seen = shown
    assert page.eval_on_selector_all("figure", "all => all.map(one => one.id)") == [
        f"figure-{name}" for name in FIGURES
    ]
    marks = {
        "curves": ".scatterlayer .js-line", "step-time": ".barlayer path", "sweep": ".scatterlayer .point",
        "inside-kfac": ".scatterlayer .js-line", "layers": ".heatmaplayer image",
    }  # fmt: skip
    least = {"curves": 24, "step-time": 9, "sweep": 36, "inside-kfac": 2, "layers": 1}
    for name, selector in marks.items():
        assert page.locator(f"#figure-{name} {selector}").count() >= least[name], name
    drawn = page.eval_on_selector_all(
        "#figure-curves .js-line", "all => all.filter(one => one.getAttribute('d')).length"
    )
    assert drawn >= 24
    assert seen.complaints == []


def test_nothing_but_the_file_is_asked_for(shown):
    page, seen = shown
    assert [url for url in seen.requests if not url.startswith(("data:", "blob:"))] == [page.url]
    assert page.url.startswith("file://")


def test_the_policy_lets_nothing_out(browser, path):
    page, seen = opened(browser, path)
    assert page.evaluate("fetch('https://example.org').then(() => false, () => true)")
    assert "Content Security Policy" in seen.complaints[0]
    page.context.close()


def test_the_pointer_shows_the_values_of_all_contenders(shown):
    page, _ = shown
    plot = page.locator("#figure-curves .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 120)
    page.mouse.move(box["x"] + 203, box["y"] + 122)
    page.wait_for_selector("#figure-curves .hoverlayer .legend")
    text = page.locator("#figure-curves .hoverlayer").text_content()
    assert text.count("test 0.") + text.count("test 1.") == 3
    assert text.count("train") == 3
    assert all(name in text for name in ("SGD", "AdamW", "K-FAC", "updates"))
    page.mouse.move(0, 0)


AS_WIDE_AS_THE_PAGE = (
    "[...document.querySelectorAll('.plot')].every((one) => one._fullLayout.width === one.clientWidth)"
)
OVERFLOWING = """() => {
  const wide = [...document.querySelectorAll("body *")].filter((one) => {
    if (one.closest(".wide, svg, .plot, [hidden], noscript, script, .unseen")) return false;
    const box = one.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
  });
  const cut = [...document.querySelectorAll("p, li, h1, h2, h3, summary, figcaption, button, nav a, th, td")].filter(
    (one) => one.offsetWidth > 0 && one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline"
  );
  const texts = [...document.querySelectorAll(".plot")].flatMap((plot) => {
    const frame = plot.getBoundingClientRect();
    return [...plot.querySelectorAll(".main-svg text")].filter((text) => {
      const box = text.getBoundingClientRect();
      return box.width > 0 && (box.left < frame.left - 1 || box.right > frame.right + 1 ||
        box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
    });
  });
  const said = (one) => `${one.tagName} ${one.textContent.slice(0, 40)}`;
  return {
    page: document.documentElement.scrollWidth - innerWidth,
    wide: wide.map(said), cut: cut.map(said), texts: texts.map(said),
  };
}"""


@pytest.mark.parametrize("which", ["path", "crowded"])
def test_nothing_overflows(browser, request, which):
    page, seen = opened(browser, request.getfixturevalue(which), width=360)
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    for width, scheme in (
        (360, "light"),
        (360, "dark"),
        (820, "dark"),
        (820, "light"),
        (1440, "light"),
        (1440, "dark"),
    ):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        until(page, AS_WIDE_AS_THE_PAGE)
        assert page.evaluate(OVERFLOWING) == {"page": 0, "wide": [], "cut": [], "texts": []}, (width, scheme)
    assert seen.complaints == []
    page.context.close()


LEGIBLE = """() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3)
      .map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$|transparent/.test(colour)) return colour;
    }
  };
  const faint = [];
  for (const one of document.querySelectorAll("h1, h2, h3, p, li, a, button, caption, th, td, small, em, summary")) {
    const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${one.tagName} ${one.textContent.slice(0, 30)} ${contrast}`);
  }
  return faint;
}"""


def test_colours_follow_the_system_and_texts_stand_out_from_the_ground(browser, path):
    page, _ = opened(browser, path, scheme="dark")
    assert page.evaluate(LEGIBLE) == []
    dark = colour(page, GROUND, "backgroundColor")
    page.emulate_media(color_scheme="light")
    until(page, f"getComputedStyle(document.querySelector({GROUND!r})).backgroundColor !== {dark!r}")
    assert page.evaluate(LEGIBLE) == []
    page.context.close()


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_figures_can_be_saved(shown, kind, tmp_path):
    page, seen = shown
    for name in ("curves", "layers"):
        with page.expect_download() as waiting:
            page.click(f"#figure-{name} [data-save={kind}]")
        assert waiting.value.suggested_filename == f"natgrad-{name}.{kind}"
        waiting.value.save_as(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        if kind == "png":
            assert data.startswith(b"\x89PNG\r\n")
            assert int.from_bytes(data[16:20], "big") == 2200
        else:
            text = data.decode()
            assert "<svg" in text[:300]
            assert "Layers of K-FAC" in text or all(one in text for one in ("ResNet-32", "AdamW", 'class="legend'))
            assert "@paper" not in text
            assert "background: rgb(255, 255, 255)" in text or "fill: rgb(255, 255, 255)" in text
    assert seen.complaints == []


def test_a_contender_is_hidden_in_all_panels_and_comes_back(shown):
    page, _ = shown
    count = "document.querySelectorAll('#figure-curves .scatterlayer .trace').length"
    before = page.evaluate(count)
    inside = page.locator("#figure-inside-kfac .scatterlayer .trace").count()
    button = page.locator("#figure-curves").get_by_role("button", name="K-FAC", exact=True)
    button.click()
    assert page.locator("[data-contender][aria-pressed=false]").count() == 2  # also over the figure of K-FAC alone
    assert page.evaluate(count) < before
    assert page.locator("#figure-inside-kfac .scatterlayer .trace").count() < inside
    button.click()
    assert page.evaluate(count) == before


def test_the_toggle_changes_page_and_figures_and_is_remembered(browser, path):
    page, seen = opened(browser, path)
    assert page.locator("#scheme").text_content() == "Colours: auto"
    light = colour(page, "body", "backgroundColor"), colour(page, GROUND, "backgroundColor")
    page.click("#scheme")
    assert (colour(page, "body", "backgroundColor"), colour(page, GROUND, "backgroundColor")) == light
    page.click("#scheme")
    assert page.locator("#scheme").text_content() == "Colours: dark"
    dark = colour(page, "body", "backgroundColor"), colour(page, GROUND, "backgroundColor")
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    page.reload()
    page.wait_for_selector("#figure-layers.drawn")
    assert page.locator("#scheme").text_content() == "Colours: dark"
    assert (colour(page, "body", "backgroundColor"), colour(page, GROUND, "backgroundColor")) == dark
    assert seen.complaints == []
    page.context.close()


def test_paper_is_light_and_holds_everything(browser, path):
    page, seen = opened(browser, path, scheme="dark")
    closed = page.locator("details:not([open])").count()
    assert closed > 0
    page.emulate_media(media="print")
    until(page, "document.querySelectorAll('details:not([open])').length === 0")
    assert colour(page, "body", "backgroundColor") == "rgb(255, 255, 255)"
    assert colour(page, GROUND, "backgroundColor") == "rgb(255, 255, 255)"
    assert (
        page.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map((one) => one.clientWidth))") <= 680
    )
    page.emulate_media(media="screen")
    until(page, f"document.querySelectorAll('details:not([open])').length === {closed}")
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert seen.complaints == []
    page.context.close()


def test_fingers_scroll_the_page(browser, path):
    page, _ = opened(browser, path, width=360, has_touch=True, is_mobile=True)
    assert page.evaluate("document.querySelector('#figure-curves .plot').layout.dragmode") is False
    assert colour(page, "#figure-curves .plot .nsewdrag, #figure-curves .plot", "touchAction") == "pan-y"
    page.context.close()


def test_without_scripts_everything_but_the_figures_is_there(browser, path):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator(".sentence").is_visible()
    assert page.locator(".times table").is_visible()
    assert page.locator("noscript").is_visible()
    assert not page.locator("#scheme").is_visible()
    context.close()
