"""The HTML page of a replay in a browser without a network, and the static figure."""

import html.parser
import shutil
import sys

import jax
import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest

from zclip_jax import rules
from zclip_jax.replay import replay
from zclip_jax.replay._drawing import NONFINITE, SPIKE
from zclip_jax.replay._figure import write_figure
from zclip_jax.replay._page import MARKERS, write_page
from zclip_jax.replay.readers._recording import Recording

pytestmark = pytest.mark.slow

STEPS = 3000
HOSTILE = "<script>document.title = 'owned'</script> & \"quotes\" 'too' <b>bold</b> %{y} $\\frac$ é"
DRAWN = "return document.querySelectorAll('.js-plotly-plot .cartesianlayer .xtick text').length > 0"
PLOT = "const plot = document.querySelector('.js-plotly-plot'), layout = plot._fullLayout; "


def log(steps=STEPS, loss=True, seed=0, **changes):
    rng = np.random.default_rng(seed)
    norms = np.exp(0.1 * rng.standard_normal(steps)) * (0.6 + 3 * np.exp(-np.arange(steps) / 100))
    norms[steps // 2 :: 400] = 30.0
    values = 2 + rng.standard_normal(steps) / 10 if loss else None
    recording = Recording(
        norms, 10 * np.arange(steps), values, "JSON lines", "grad_norm", 10, name="log.jsonl"
    )
    return recording._replace(**changes)


RULES = {
    "zclip": rules.at_most(rules.zscore(), 1.0),
    "uncapped": rules.zscore(),
    f"fixed {HOSTILE}": rules.fixed(0.5),
}


REPLAY = jax.jit(replay, static_argnums=0)  # compiled once for a length


def compared(recording):
    return {name: REPLAY(rule, recording.norms) for name, rule in RULES.items()}


def odd(name):
    """A log with something that can't be drawn like the rest."""
    recording = log(300)
    norms, steps = recording.norms.copy(), np.arange(300)
    if name == "no loss":
        return recording._replace(loss=None)
    if name == "loss on a few rows":
        return recording._replace(loss=np.where(steps % 50, np.nan, 1e300))
    if name == "no finite norm":
        return recording._replace(norms=np.full(300, np.nan))
    if name == "no norm above zero":
        return recording._replace(norms=-steps / 2.0)
    if name == "no spike":
        return recording._replace(norms=np.full(300, 0.1))
    if name == "one row":
        return recording._replace(norms=norms[:1], steps=steps[:1], loss=recording.loss[:1])
    if name == "steps restart":
        return recording._replace(steps=np.r_[steps[:200], steps[:100]])
    norms[[10, 20, 30, 40, 50]] = [np.nan, np.inf, 0.0, 1e30, 1e-60]
    return recording._replace(norms=norms)


ODD = ["no loss", "loss on a few rows", "no finite norm", "no norm above zero", "no spike", "one row"]
QUICK = ["steps restart", "not finite, zero and extreme"]


class Page:
    """A page in the browser, moved with a real mouse."""

    def __init__(self, driver, path):
        self.driver = driver
        driver.get(path.as_uri())
        self.wait(DRAWN)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, script, *arguments):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60, 0.05).until(lambda _: self.run(script, *arguments))

    def mouse(self, kind, x, y):
        event = {
            "type": kind,
            "x": x,
            "y": y,
            "button": "none" if kind == "mouseMoved" else "left",
            "clickCount": 1,
        }
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def click(self, selector, nth=0):
        found = "const e = document.querySelectorAll(arguments[0])[arguments[1]]; if (!e) return null; "
        self.wait(found + "return true", selector, nth)
        place = self.run(
            found + "const r = e.getBoundingClientRect(); return [r.x + 9, r.y + 9]", selector, nth
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, *place)

    def place(self, step, norm):
        """Where a point of the upper panel is in the window."""
        return self.run(
            PLOT + "const r = plot.getBoundingClientRect(), {xaxis: x, yaxis: y} = layout; "
            "return [r.x + x._offset + x.d2p(arguments[0]), r.y + y._offset + y.d2p(arguments[1])]",
            step,
            norm,
        )

    def hover(self, step, norm):
        x, y = self.place(step, norm)
        self.mouse("mouseMoved", x - 3, y - 60)
        self.mouse("mouseMoved", x, y)
        self.wait("return document.querySelectorAll('.hoverlayer .hovertext').length == 1")
        return self.run("return document.querySelector('.hoverlayer .hovertext').textContent")

    def shown(self):
        """The names of the traces that are drawn, and of each how many points."""
        return self.run(
            PLOT + "return plot.calcdata.filter(d => d[0].trace.visible === true)"
            ".map(d => [d[0].trace.name, d[0].trace._length])"
        )

    def markers(self):
        """How many spikes are marked."""
        fill = "rgb" + str(tuple(round(255 * x) for x in matplotlib.colors.to_rgb(SPIKE)))
        points = "return [...document.querySelectorAll('path.point')]"
        return self.run(points + ".filter(e => e.style.fill == arguments[0]).length", fill)

    def errors(self):
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    quiet = ("background-networking", "component-update", "dev-shm-usage", "gpu", "quic", "sync")
    for flag in (
        "headless",
        "no-sandbox",
        "no-first-run",
        "window-size=1400,1000",
        *(f"disable-{x}" for x in quiet),
    ):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def recording():
    return log(notes=(HOSTILE,), name=HOSTILE)


@pytest.fixture(scope="module")
def results(recording):
    return compared(recording)


@pytest.fixture(scope="module")
def file(recording, results, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, recording, results, flags=["Capped on most steps.", HOSTILE])
    return path


@pytest.fixture
def page(browser, file):
    page = Page(browser, file)
    yield page
    assert not page.errors()


def test_the_file_refers_to_nothing_outside_it(file):
    class Sources(html.parser.HTMLParser):
        found = []

        def handle_starttag(self, tag, attrs):
            self.found += [
                (tag, name, value) for name, value in attrs if name in ("src", "href", "action", "data")
            ]

    parser = Sources()
    parser.feed(file.read_text(encoding="utf-8"))
    assert not parser.found


def test_opens_without_a_network_and_asks_for_nothing(page):
    assert page.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    # Neither may anything else on the page, such as the button that would upload the chart.
    page.run("fetch('http://localhost:9/').catch(e => window.refused = true)")
    page.wait("return window.refused")
    assert any("Content Security Policy" in entry["message"] for entry in page.errors())
    assert page.run("return document.querySelectorAll('.modebar-btn').length") > 0
    assert "Share" not in page.run(
        "return [...document.querySelectorAll('.modebar-btn')].map(e => e.dataset.title)+''"
    )


def test_draws_the_curves_and_every_spike(page, results):
    fired, capped = (np.asarray(getattr(results["zclip"].outcomes, name)) for name in ("fired", "capped"))
    spikes, scaled = int(fired.sum()), int((capped & ~fired).sum())
    shown = dict(page.shown())
    assert shown["norm"] == shown["zclip fires above"] == STEPS
    assert shown[f"spikes: {spikes}"] == spikes > 4
    assert shown[f"scaled, no spike: {scaled}"] == scaled > 100
    assert page.markers() == spikes
    lines = page.run(
        "return [...document.querySelectorAll('path.js-line')].map(e => e.getAttribute('d').length)"
    )
    assert len([length for length in lines if length > 1000]) == 3
    titles = page.run(
        "return [...document.querySelectorAll('.xtitle, .ytitle, .y2title')].map(e => e.textContent)"
    )
    assert sorted(titles) == ["gradient norm", "loss", "step"]


def test_hovering_a_spike_shows_what_was_decided(page, recording, results):
    at, outcomes = STEPS // 2, results["zclip"].outcomes
    assert outcomes.fired[at]
    text = page.hover(10 * at, recording.norms[at])
    assert f"step {10 * at:,}" in text
    assert "norm 30.00" in text
    for label, column in (
        ("allowed", "threshold"),
        ("fires above", "trigger"),
        ("z-score", "z_score"),
        ("scale", "clip_scale"),
    ):
        assert f"{label} {getattr(outcomes, column)[at]:#.4g}" in text


def test_another_rule_can_be_chosen(page, results):
    name = list(results)[2]
    fired = int(results[name].outcomes.fired.sum())
    page.click(".updatemenu-header")
    page.click(".updatemenu-dropdown-button", 2)
    page.wait(
        "return [...document.querySelectorAll('.legendtext')].some(e => e.textContent == arguments[0])",
        f"spikes: {fired:,}",
    )
    assert "zclip fires above" not in dict(page.shown())
    triggers = page.run(
        PLOT + "const its = plot.calcdata.filter(d => d[0].trace.visible === true); "
        "return [...new Set(its.find(d => /^fixed .* fires above$/s.test(d[0].trace.name)).map(d => d.y))]"
    )
    assert triggers == [0.5]
    # Some are left out, since they are too many, until a zoom leaves fewer in view.
    assert MARKERS < page.markers() < fired
    page.run("return Plotly.relayout('replay', {'xaxis.range': [1005, 2005]}).then(() => null)")
    assert page.markers() == results[name].outcomes.fired[101:201].sum() > 50


def test_zooming_the_upper_panel_moves_the_lower_one(page):
    loss = "return [...document.querySelectorAll('.subplot.xy2 path.js-line')].map(e => e.getAttribute('d')).join()"
    before = page.run(loss)
    for kind, step in (
        ("mousePressed", 5000),
        ("mouseMoved", 7000),
        ("mouseMoved", 9000),
        ("mouseReleased", 9000),
    ):
        event = {"type": kind, "button": "left", "buttons": 1, "clickCount": 1}
        x, y = page.place(step, 3)
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event | {"x": x, "y": y})
    page.wait(
        PLOT
        + "return Math.abs(layout.xaxis.range[0] - 5000) < 100 && Math.abs(layout.xaxis.range[1] - 9000) < 100"
    )
    page.wait("return arguments[0] != (() => {" + loss + "})()", before)
    ticks = page.run("return [...document.querySelectorAll('.xtick text')].map(e => e.textContent)")
    assert "5,000" in ticks
    assert "20,000" not in ticks


def test_the_chart_can_be_saved(page):
    page.run("Plotly.toImage('replay').then(image => window.image = image)")
    page.wait("return (window.image || '').startsWith('data:image/png')")


def test_text_from_the_log_stays_text(page):
    items = page.run("return [...document.querySelectorAll('li')].map(e => e.textContent)")
    assert items[:3] == ["For zclip: Capped on most steps.", f"For zclip: {HOSTILE}", HOSTILE]
    assert page.run("return document.querySelectorAll('li *').length") == 0
    assert page.run("return document.title") == f"Replay of {HOSTILE}: 3,000 gradient norms"
    page.click(".updatemenu-header")
    page.wait("return document.querySelectorAll('.updatemenu-dropdown-button').length == 3")
    labels = page.run(
        "return [...document.querySelectorAll('.updatemenu-dropdown-button text')].map(e => e.textContent)"
    )
    assert labels == ["zclip", "uncapped", f"fixed {HOSTILE}"]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ODD)])
def test_odd_logs(browser, tmp_path, name):
    recording = odd(name)
    results = compared(recording)
    write_page(tmp_path / "page.html", recording, results)
    write_figure(tmp_path / "figure.png", recording, results)
    assert has_colour(tmp_path / "figure.png", NONFINITE) == bool(results["zclip"].outcomes.nonfinite.any())
    page = Page(browser, tmp_path / "page.html")
    shown = dict(page.shown())
    drawable = (recording.norms > 0) & ~np.asarray(results["zclip"].outcomes.nonfinite)
    assert shown.get("norm", 0) == drawable.sum()
    bad = int(results["zclip"].outcomes.nonfinite.sum())
    assert shown.get(f"not finite: {bad}", 0) == bad
    assert page.run("return document.querySelectorAll('.subplot.xy2 .scatterlayer .trace').length") == (
        recording.loss is not None
    )
    assert ("aren't drawn" in page.run("return document.body.innerText")) == bool(
        (recording.norms <= 0).any()
    )
    if name == "steps restart":
        assert "row 250, step 50" in page.hover(250, recording.norms[250])
    if name == "one row":
        assert "step 0" in page.hover(0, recording.norms[0])
    assert not page.errors()


def has_colour(path, colour):
    image = matplotlib.image.imread(path)[..., :3]
    return bool((np.abs(image - matplotlib.colors.to_rgb(colour)) < 0.02).all(-1).any())


def test_the_figure(recording, results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # the caller's figures and backend live there
    write_figure(tmp_path / "figure.png", recording, results)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.image.imread(tmp_path / "figure.png").shape[:2] == (780, 1170)
    assert has_colour(tmp_path / "figure.png", SPIKE)
    calm = log(norms=np.ones(STEPS), loss=None)
    write_figure(tmp_path / "calm.png", calm, {"zclip": replay(rules.zscore(), calm.norms)})
    assert not has_colour(tmp_path / "calm.png", SPIKE)


@pytest.mark.parametrize(("write", "module"), [(write_page, "plotly"), (write_figure, "matplotlib")])
def test_the_extra_is_named_where_it_is_missing(recording, results, tmp_path, monkeypatch, write, module):
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf"needs {module}: pip install 'zclip-jax\[replay\]'"):
        write(tmp_path / "file", recording, results)
