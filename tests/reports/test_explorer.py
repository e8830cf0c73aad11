"""The page of a plan holds its description, as data that is never run, and answers clicks, searches and keys."""

import inspect
import json
import re
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compiler import passes
from autopar.compiler.analysis.planned_values import planned_values
from autopar.ir.program import Task
from autopar.reports.explorer import plan_page, shown_events, shown_memory
from autopar.reports.plan_difference import plan_difference
from autopar.runtime.timeline import Event, Timeline
from tests.reports.test_description import METHODS, arguments, deep_loss, planned
from tests.small_steps import draw, sgd


@pytest.fixture(scope="module")
def pipeline():
    return planned(METHODS["two stages"])


@pytest.fixture(scope="module")
def page(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    assert pipeline.view(path) == path
    return path


def _values_of(method):
    made = planned(method)
    return planned_values(made.trace, made.plan, lambda: passes.cut_step(made.trace, made.plan))


def data_of(text):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return data


def test_the_page_holds_the_description_and_the_timeline(pipeline, page):
    data = json.loads(data_of(page.read_text()))
    described = json.loads(pipeline.describe().to_json())
    shown = {name: data[name] for name in described}
    assert shown.pop("results") == [each for each in described.pop("results") if not each["as_input"]]
    assert shown == described
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


def test_names_in_a_forged_plan_stay_data(pipeline):
    forged = "<script>alert(1)</script>"
    data = json.loads(pipeline.plan.to_json())
    data["method"] = forged
    for mesh in data["meshes"]:
        for each in mesh["sharding"]["collectives"]:
            each["scope"] = each["line"] = each["what"] = forged
    data["certificate"] = {"step_time_s": 1.0, "lower_bound_s": 1.0, "tried": [], "stopped": forged,
                           "runners_up": [[forged, 1.0]]}  # fmt: skip
    read = autopar.Plan.from_json(json.dumps(data))
    described = autopar.parallelize(sgd(deep_loss), method=read).trace(*arguments()).plan().describe()
    page = plan_page(described, answers=[plan_difference(pipeline.describe(), described)])
    assert page.count("<script") == 2 and data_of(page).count("alert(1)") > 5
    assert "<script" not in described.to_html()


def test_the_page_has_every_value_of_the_forward_pass_with_its_layout_and_line(pipeline, page):
    values = json.loads(data_of(page.read_text()))["values"]
    texts, found = values["texts"], set()
    for mesh, *places in values["rows"]:
        found.add((mesh, *(texts[place] for place in places[1:])))
    for mesh, planned_mesh in enumerate(pipeline.plan.meshes):
        layouts = planned_mesh.sharding.layouts["values"]
        (planned_layout,) = {text for name, text in layouts.items() if name.startswith("tanh")}
        words = {"data,-": "(data, -)", "-,-": "replicated"}[planned_layout]
        # Of one microbatch of 8 rows.
        assert {each[1:4] for each in found if each[0] == mesh and each[1] == "tanh"} == {
            ("tanh", "float32[8,128]", words)
        }
    line = inspect.getsourcelines(deep_loss)[1] + 2
    lines = {each[4] for each in found if each[1] == "tanh"}
    assert len(lines) == 1 and lines.pop().startswith(f"test_description.py:{line}")
    inputs = {each.name: each.line for each in pipeline.describe().inputs}
    assert inputs["params.layers.0.<up>"].startswith(f"test_description.py:{line}")


def test_what_a_search_leaves_as_a_sum_is_said():
    words = {
        each.layout_words()
        for each in _values_of(autopar.ShardParallel(mesh_shape=(8,), specs={"down": P("data"), "up": P(None, "data")}))
    }
    assert {"replicated", "replicated, sum over data", "(data, -)"} <= words


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


def test_a_step_of_one_program_is_no_update():
    (event,) = shown_events(planned(METHODS["data parallel"]).simulate().timeline)
    assert event[3:5] == ("S", "the whole step")


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
            "return [...t.parentElement.nextElementSibling.tBodies[0].rows]"
            ".map(r => [...r.cells].map(c => c.textContent).join(' '))",
            table,
        )

    all_inputs = rows("Inputs")
    assert len(all_inputs) == 9 and any("params.layers.0.<up>" in row for row in all_inputs)
    meshes = browser.find_elements("css selector", "#cluster button")
    meshes[1].click()
    assert meshes[1].get_attribute("aria-pressed") == "true"
    support = pytest.importorskip("selenium.webdriver.support.ui")
    wait = support.WebDriverWait(browser, 10)  # what is out of sight is drawn after what is seen
    on_second = wait.until(lambda _: len(rows("Inputs")) < len(all_inputs) and rows("Inputs"))
    assert not any("layers.0." in row for row in on_second)
    meshes[1].click()
    wait.until(lambda _: rows("Inputs") == all_inputs)
    search = browser.find_element("css selector", "input[data-table^=Inputs]")
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


def test_the_measured_step_stands_below_the_modelled_one(browser, pipeline, tmp_path):
    result, times = pipeline.lower().compile().measure(*arguments())
    assert jax.tree.leaves(result) and {each.mesh for each in times} == {0, 1}
    path = pipeline.view(tmp_path / "measured.html", measured=times)
    shown = json.loads(data_of(path.read_text()))["measured"]
    tasks = [each.name for each in times if each.is_task]
    assert [each[4] for each in shown["events"] if each[3] != "T"] == tasks and len(tasks) >= 16
    assert shown["step_time_s"] == max(t.stop_s for t in times) - min(t.start_s for t in times)
    browser.get(path.as_uri())
    canvas = browser.find_element("css selector", "#measured canvas")
    assert canvas.is_displayed() and "times the modelled step" in browser.find_element("id", "measured").text
    empty = (
        "const c = document.createElement('canvas'); [c.width, c.height] = [arguments[0].width, arguments[0].height];"
    )
    before = browser.execute_script(f"{empty} return [c.toDataURL(), arguments[0].toDataURL()]", canvas)
    assert before[0] != before[1]
    browser.find_element("id", "in").click()
    assert browser.execute_script("return arguments[0].toDataURL()", canvas) != before[1]
    browser.get(pipeline.view(tmp_path / "modelled.html").as_uri())
    assert not browser.find_elements("css selector", "#measured *")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "javascript:window.hacked=1//",
    "\u202eevitaerc\u202c \u2066\u2069\u2028window.hacked = 1",
    "<!--<script>window.hacked = 1",
    "__DATA__',window.hacked=1,'",
)


@pytest.mark.parametrize("forged", HOSTILE)
def test_nothing_of_a_forged_plan_runs_in_a_browser(browser, pipeline, tmp_path, forged):
    data = json.loads(pipeline.plan.to_json())
    data["method"] = forged
    for mesh in data["meshes"]:
        for each in mesh["sharding"]["collectives"]:
            each["scope"] = each["line"] = each["what"] = forged
    data["certificate"] = {"step_time_s": 1.0, "lower_bound_s": 1.0, "tried": [], "stopped": forged,
                           "runners_up": [[forged, 1.0]]}  # fmt: skip
    (tmp_path / "forged.json").write_text(json.dumps(data))

    def loss(params, batch):
        return deep_loss({"layers": [{"<up>": each[forged], "down": each["down"]} for each in params["layers"]]}, batch)

    params, batch = arguments()
    params = {"layers": [{forged: each["<up>"], "down": each["down"]} for each in params["layers"]]}
    named = autopar.parallelize(sgd(loss), method=METHODS["two stages"]).trace(params, batch).plan()
    read = autopar.parallelize(sgd(deep_loss), method=autopar.Plan.load(tmp_path / "forged.json")).trace(*arguments())
    pages = read.plan().view(tmp_path / "plan.html"), named.view(tmp_path / "names.html", beside=named)
    shown: list[str] = []
    for path in pages:
        browser.get(path.as_uri())
        for part in ("#cluster", "#treemap", "#layers", "#layers", "#up"):
            browser.execute_script(f"(document.querySelector('{part} button, button{part}') || document.body).click()")
        assert browser.execute_script("return window.hacked") is None
        marks = "return [document.scripts.length, document.images.length, document.links.length]"
        assert browser.execute_script(marks) == [2, 0, 0]
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
        shown.append(browser.execute_script("return document.body.textContent"))
    assert forged in shown[0] and "hacked" in shown[1]  # names of inputs are shown as Python writes them


def named_loss(params, batch):
    for name, layer in params.items():
        with jax.named_scope(name):
            batch = batch + jnp.tanh(batch @ layer["up"]) @ layer["down"]
    return jnp.mean(batch**2)


def test_layers_open_to_values_and_memory_to_a_category(browser, tmp_path):
    params = {f"block_{i}": {"up": draw(i, 32, 128), "down": draw(9 + i, 128, 32)} for i in range(4)}
    cluster = autopar.Cluster.parse("1x dgx-a100-80 + 1x p3.16xlarge")
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(sgd(named_loss), method=method, cluster=cluster)
    browser.get(step.trace(params, draw(20, 64, 32)).plan().view(tmp_path / "mixed.html").as_uri())

    def find(selector):
        return browser.find_elements("css selector", selector)

    def press_escape():
        browser.switch_to.active_element.send_keys("\ue00c")

    cards = [each.text for each in find("#cluster button")]
    assert "dgx-a100-80" in cards[0] and "p3.16xlarge" in cards[1]
    layers = find("#layers button")
    assert [each.get_attribute("data-scope") for each in layers] == list(params)
    layers[2].send_keys("\n")  # with the keyboard
    inside = browser.find_element("id", "inside").text
    assert "params.block_2.up" in inside and "block_1" not in inside
    assert "dot_general" in inside and "test_explorer.py" in inside and "(data, -)" in inside
    press_escape()
    assert len(find("#layers button")) == 4

    held = {each.get_attribute("data-category") for each in find("#treemap button")}
    assert {"parameters", "gradients"} <= held
    find("#treemap button[data-category=parameters]")[0].click()
    assert {each.get_attribute("data-category") for each in find("#treemap button")} == {"parameters"}
    assert "as parameters" in browser.find_element("id", "held").text
    press_escape()
    assert {each.get_attribute("data-category") for each in find("#treemap button")} == held

    paper = "return getComputedStyle(document.body).backgroundColor"
    browser.execute_script("document.documentElement.style.colorScheme = 'light'")
    browser.find_element("id", "scheme").click()
    assert browser.execute_script(paper) == "rgb(21, 24, 28)"
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(paper) == "rgb(255, 255, 255)"
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(paper) == "rgb(21, 24, 28)"
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
