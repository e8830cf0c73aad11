"""The page of a plan holds its description, as data that is never run, and answers clicks, searches and keys."""

import json
import re
import shutil

import pytest

import autopar
from autopar.explorer import plan_page, shown_events, shown_memory
from autopar.ir.program import Task
from autopar.runtime.timeline import Event, Timeline
from tests.small_steps import draw, sgd
from tests.test_description import METHODS, planned


@pytest.fixture(scope="module")
def pipeline():
    return planned(METHODS["two stages"])


@pytest.fixture(scope="module")
def page(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    assert pipeline.view(path) == path
    return path


def data_of(text):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return data


def test_the_page_holds_the_description_and_the_timeline(pipeline, page):
    data = json.loads(data_of(page.read_text()))
    described = json.loads(pipeline.describe().to_json())
    assert {name: data[name] for name in described} == described
    events = pipeline.simulate().timeline.events
    assert [event[:3] for event in data["timeline"]["events"]] == [[e.mesh, e.start_s, e.stop_s] for e in events]


def test_the_page_fetches_nothing_and_runs_no_name(page):
    text = page.read_text()
    assert "<" not in data_of(text)  # the parameters are called <up>
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|\bsrc=|\bhref=|\burl\(|innerHTML|\beval\(", text)


def test_a_hostile_name_stays_data():
    name = "</script><script>alert(1)</script>"

    def loss(params, batch):
        return ((batch @ params[name]) ** 2).mean()

    step = autopar.parallelize(sgd(loss), method=autopar.DataParallel())
    page = plan_page(step.trace({name: draw(0, 32, 32)}, draw(1, 32, 32)).plan().describe())
    assert page.count("<script") == 2 and "alert(1)" in data_of(page)


def test_many_tasks_are_shown_as_few():
    tasks = 50_000
    events = tuple(
        Event(mesh=0, start_s=i, stop_s=i + 0.9, task=Task(kind="FB"[i % 2], stage=0, microbatch=i), collective_s=0.1)
        for i in range(tasks)
    )
    timeline = Timeline(
        name="t", events=events, transfers=(), makespan_s=float(tasks), peak_bytes=(0,), at_peak=(), exposed_s=(0.0,)
    )
    shown = shown_events(timeline)
    assert len(shown) < 10_000
    assert sum(each[5] for each in shown) == pytest.approx(0.1 * tasks)
    assert (shown[0][1], shown[-1][2]) == (0, tasks - 0.1)


def test_memory_over_time_reaches_the_peak_with_few_points():
    points = [(i / 50_000, i % 1_000) for i in range(50_000)]
    shown = shown_memory(points)
    assert len(shown) <= 4_000 and max(n for _, n in shown) == 999
    assert shown == sorted(shown, key=lambda point: point[0])
    report = planned(METHODS["two stages"]).simulate()
    assert tuple(max(n for _, n in curve) for curve in report.timeline.memory) == report.timeline.peak_bytes


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs Chromium and ChromeDriver, as Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    for word in quiet:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as driven:
        yield driven


def test_the_page_answers_clicks_searches_and_keys(browser, page):
    browser.get(page.as_uri())

    def rows(table):
        return browser.execute_script(
            "const t = [...document.querySelectorAll('input')].find(i => i.dataset.table.startsWith(arguments[0]));"
            "return [...t.parentElement.nextElementSibling.tBodies[0].rows].map(r => r.innerText)",
            table,
        )

    all_inputs = rows("Inputs")
    assert len(all_inputs) == 9 and any("params.layers.0.<up>" in row for row in all_inputs)
    meshes = browser.find_elements("css selector", "#cluster button")
    meshes[1].click()
    assert meshes[1].get_attribute("aria-pressed") == "true"
    on_second = rows("Inputs")
    assert 0 < len(on_second) < len(all_inputs) and not any("layers.0." in row for row in on_second)
    meshes[1].click()
    search = browser.find_element("css selector", "input[type=search]")
    search.send_keys("down layers.3")
    assert ["params.layers.3.down" in row for row in rows("Inputs")] == [True]
    canvas = browser.find_element("id", "timeline")
    before = browser.execute_script("return arguments[0].toDataURL()", canvas)
    canvas.send_keys("+")
    zoomed = browser.execute_script("return arguments[0].toDataURL()", canvas)
    canvas.send_keys("0")
    assert zoomed != before == browser.execute_script("return arguments[0].toDataURL()", canvas)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_another_plan_and_answers_stand_beside_it(browser, pipeline, tmp_path):
    other = planned(METHODS["data parallel"])
    answers = pipeline.explain("schedule"), pipeline.what_if(schedule="gpipe")
    browser.get(pipeline.view(tmp_path / "both.html", beside=other, answers=answers).as_uri())
    text = browser.find_element("tag name", "body").text
    for words in ("Beside another plan", "DataParallel", "schedule: 1f1b", "as planned", answers[1].headline()):
        assert words in text
    assert "up to" in browser.find_element("id", "memory-words").text
    assert len(browser.find_elements("tag name", "canvas")) == 3
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
