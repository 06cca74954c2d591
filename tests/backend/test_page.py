"""The page of a report in a real browser: it opens without errors, folds, searches, and follows lines through the stages."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer import Decision, Report
from gossamer.backend.report.details import Contender, Details
from gossamer.passes.opt import main as opt
from tests.backend.harness import compile_and_run, prune_

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright drives the browser")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium")
EAGER = {"dense": "eager", "min_gain": 0}


class Encoder(nn.Module):
    """Layers as a sentence encoder has them, but for attention; the first one is denser."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            nn.ModuleDict({"intermediate": nn.Linear(32, 64), "output": nn.Linear(64, 32), "norm": nn.LayerNorm(32)})
            for _ in range(3)
        )
        self.pooler = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer["norm"](layer["output"](nn.functional.gelu(layer["intermediate"](x))) + x)
        return torch.tanh(self.pooler(x))


class Network(nn.Module):
    """A graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return adjacency @ torch.relu(adjacency @ self.lin(x))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of an encoder, a graph network, and a dense model."""
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    adjacency = gossamer.SparseTensor.from_dense((torch.rand(60, 60) < 0.1).float())
    models: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "encoder": (prune_(Encoder()), (torch.randn(8, 32),)),
        "network": (Network(), (adjacency, torch.randn(60, 16))),
    }
    with torch.no_grad():
        for name, (model, inputs) in models.items():
            options = {**EAGER, "dump_ir": str(folder / name)}
            report = gossamer.explain(model.eval(), *inputs, options=options)
            assert report.sparse, str(report)
            report.save(folder / f"{name}.html", profile=gossamer.profile(model, *inputs, options=EAGER, calls=2))
        report = gossamer.explain(nn.Linear(64, 64).eval(), torch.randn(4, 64), options={"dense": "eager"})
        report.save(folder / "dense.html")
        gossamer.explain(torch.relu, torch.randn(4), options={"dense": "eager"}).save(folder / "empty.html")
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


class Tab:
    """A page that is open; `errors` are those of its console."""

    def __init__(self, browser: Any, path: Path, **settings: Any) -> None:
        self.page = browser.new_page(**settings)
        self.errors: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: None if request.url.startswith("file:") else self._asked(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("#tree table, #tree p")

    def _asked(self, url: str) -> None:
        if not url.startswith(("data:", "blob:")):
            self.errors.append(f"asked for {url}")

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.page.locator(selector).all_inner_texts()
        return found

    def close(self) -> None:
        self.page.close()
        assert not self.errors


@pytest.fixture
def encoder(browser: Any, pages: dict[str, Path]) -> Iterator[Tab]:
    tab = Tab(browser, pages["encoder"])
    yield tab
    tab.close()


def test_modules_fold_by_mouse_and_by_keyboard(encoder: Tab) -> None:
    names = encoder.texts("tr[data-at] .path")
    assert names[:2] == ["layer", "0"] and "intermediate.weight" in names
    encoder.page.locator("tr[data-at='0']").click()
    assert encoder.texts("tr[data-at] .path") == ["layer", "pooler.weight"]
    encoder.page.keyboard.press("ArrowRight")
    assert encoder.texts("tr[data-at] .path") == names
    encoder.page.keyboard.press("ArrowDown")
    encoder.page.keyboard.press("ArrowLeft")
    assert len(encoder.texts("tr[data-at] .path")) == len(names) - 2
    assert encoder.page.locator("tr[data-at='1']").get_attribute("aria-expanded") == "false"


def test_search_finds_a_weight_and_shows_its_contenders(encoder: Tab) -> None:
    encoder.page.keyboard.press("/")
    encoder.page.keyboard.type("1.output")
    encoder.page.keyboard.press("Enter")
    detail = encoder.page.locator("#weight").inner_text()
    assert "layer.1.output.weight" in detail and "Schedules that competed" in detail
    assert "dense" in encoder.texts("#weight .bar-label") and "taken" in detail and "null" not in detail
    encoder.page.keyboard.press("Escape")
    assert "pooler.weight" in encoder.texts("tr[data-at] .path")


def test_the_gain_of_a_chain_is_told_from_the_times_of_a_product(browser: Any, tmp_path: Path) -> None:
    times = tuple(Contender(name, 10.0, us, {"call_us": 1.0}) for name, us in (("dense", 100.0), ("broadcast", 105.0)))
    details = Details(32, False, "float32", times, region="key", end="the graph returns its result", whole=True)
    reason = "in a chain of 2; gain of the whole kernel, predicted; alone, measured: dense 100 us, broadcast 105 us"
    weight = ("up.weight", "linear", (64, 64), 0.3, "CSR", "broadcast", True, reason, 4.5)
    Report([Decision(*weight, details=details)], kernels=1).save(tmp_path / "chain.html")
    tab = Tab(browser, tmp_path / "chain.html")
    assert tab.texts("#tree td.verdict") == ["sparse broadcast, in a chain of 2"]
    tab.page.locator("#tree tr[data-at='0']").click()
    detail = tab.page.locator("#weight").inner_text()
    assert re.search(r"4\.5\S predicted", detail) and "alone, measured: dense 100 us" in detail
    assert "These times are for this weight alone. The gain above is for the whole kernel" in detail
    tab.close()


def test_calls_are_drawn_and_a_box_leads_to_its_weight(encoder: Tab) -> None:
    boxes = encoder.page.locator("#flow .flow-box")
    names = encoder.page.locator("#flow .flow-name").all_text_contents()
    assert names[0] == "input" and names[-1] == "output" and "layer.0.intermediate … pooler" in names
    encoder.page.locator("#flow .flow-sparse[role='button']").first.focus()
    encoder.page.keyboard.press("Enter")
    assert "Schedules that competed" in encoder.page.locator("#weight").inner_text()
    assert encoder.page.locator("#flow .flow-box.chosen").count() == 1
    assert encoder.page.locator("#flow .flow-edge").count() >= boxes.count() - 1


def test_a_module_of_many_calls_unfolds(browser: Any, tmp_path: Path) -> None:
    flow = [{"kind": "input", "from": [], "weights": [], "about": "", "module": "", "backward": False}]
    for at in range(60):
        flow.append({**flow[0], "kind": "dense", "from": [at], "module": f"layer.{at // 2}.{at % 2}", "about": "cumsum"})
    flow.append({**flow[0], "kind": "output", "from": [60]})
    report = gossamer.explain(torch.relu, torch.randn(4), options={"dense": "eager"})
    report.flows = [flow]
    report.save(tmp_path / "many.html")
    tab = Tab(browser, tmp_path / "many.html")
    boxes = tab.page.locator("#flow .flow-box")
    assert boxes.count() == 3 and "▸ layer" in tab.page.locator("#flow .flow-name").all_text_contents()
    tab.page.locator("#flow .folded").click()
    assert boxes.count() == 32
    tab.page.locator("#flow .folded").first.click()
    assert boxes.count() == 33 and "layer.0.1" in tab.page.locator("#flow .flow-name").all_text_contents()
    tab.page.get_by_role("button", name="Fold again").click()
    assert boxes.count() == 3
    tab.close()


def test_a_pattern_is_drawn_and_its_bytes_are_listed(encoder: Tab) -> None:
    encoder.page.keyboard.press("2")
    assert len(encoder.texts("#thumbnails .thumbnail")) == 7
    pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
    drawn = f"c => {pixels}.some((value, at) => at % 4 == 3 && value)"
    assert encoder.page.locator("#pattern canvas").evaluate(drawn)
    assert "values" in encoder.texts("#pattern .bar-label")
    encoder.page.locator("#thumbnails .thumbnail").first.press("ArrowRight")
    assert encoder.page.locator("#pattern h2").inner_text() == "layer.0.output.weight"


def follow(tab: Tab, code: str) -> list[str]:
    """Opens the code and selects the first line of the graph with this text; the lines on the right that belong to it."""
    tab.page.keyboard.press("3")
    tab.page.locator("#listings .side").first.locator(".line", has_text=code).first.click()
    tab.page.wait_for_selector("#listings .side:nth-child(2) .line.related")
    return tab.texts("#listings .side:nth-child(2) .line.related .text")


def test_a_line_of_the_graph_is_followed_to_assembly_and_back(encoder: Tab) -> None:
    follow(encoder, "aten.mm.default")
    assert encoder.texts("#listings .side:nth-child(2) .line.related.hot"), "it leads to a loop that multiplies"
    line = encoder.page.locator("#listings .side").nth(1).locator(".line.related").first
    line.scroll_into_view_if_needed()
    encoder.page.evaluate("new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")  # lines are drawn
    line.click()
    encoder.page.wait_for_selector("#listings .side:nth-child(2) .line.current")
    assert any("aten.mm" in line for line in encoder.texts("#listings .side:first-child .line.related .text"))
    encoder.page.keyboard.press("Escape")
    assert not encoder.texts(".line.related")


def test_hot_loops_are_counted_and_the_cost_model_stands_beside_them(encoder: Tab) -> None:
    encoder.page.keyboard.press("3")
    encoder.page.wait_for_selector("#kernel-facts table")
    figures = encoder.texts("#kernel-facts tbody tr:first-child td")
    assert figures[0].startswith(".LBB") and int(figures[2]) > 0 and int(figures[3]) > 0
    encoder.page.locator("#kernel-facts tbody button").first.click()
    encoder.page.wait_for_selector("#listings .side:nth-child(2) .line.current.hot")
    facts = encoder.page.locator("#kernel-facts").inner_text()
    assert "What the cost model says" in facts and "GFLOP/s at" in facts


def test_a_step_shows_differences_and_its_command_repeats_it(
    encoder: Tab, pages: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    encoder.page.keyboard.press("3")
    encoder.page.locator("#listings .side select").nth(1).select_option(label=next(
        each for each in encoder.texts("#listings .side:nth-child(2) option") if " fuse-epilogue " in each
    ))  # fmt: skip
    encoder.page.locator("#code-bar button").nth(0).click()
    encoder.page.wait_for_selector(".line.removed")
    for button in encoder.page.locator("[data-command]").all():
        program, *arguments = shlex.split(button.get_attribute("data-command"))
        if program != "gossamer-opt":
            continue
        assert opt(arguments) == 0
        found = capsys.readouterr().out
        after = sorted(each for each in (pages["encoder"].parent / "encoder").glob("*.mlir") if each > Path(arguments[0]))[0]
        assert found.strip() == after.read_text().strip()


def test_the_page_of_a_graph_network_draws_its_graph_and_follows_its_product(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["network"])
    cards = dict(zip(tab.texts("#summary .card-label"), tab.texts("#summary .card-figure"), strict=True))
    assert int(cards.get("kernel") or cards["kernels"]) > 0
    tab.page.keyboard.press("2")
    assert "adjacency" in tab.page.locator("#pattern h2").inner_text()
    assert follow(tab, "aten.mm.default")
    tab.close()


def test_the_run_shows_each_sparse_operation(encoder: Tab) -> None:
    encoder.page.keyboard.press("4")
    parts = encoder.texts("#run-parts td:first-child .code-text")
    assert parts[0].startswith("layer.0") and "gelu" in parts[0]
    assert "Times are medians of 2 calls" in encoder.page.locator("#run").inner_text()
    assert "kernels" in encoder.page.locator(".run-legend").inner_text()
    encoder.page.keyboard.press("/")
    encoder.page.keyboard.type("nothing of that name")
    assert "No part matches" in encoder.page.locator("#run-parts").inner_text()


def test_a_report_without_a_profile_has_no_run(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["dense"])
    assert not tab.page.locator("#tab-run").is_visible()
    tab.page.keyboard.press("4")
    assert tab.page.locator("#model").is_visible()
    tab.close()


@pytest.mark.parametrize(("name", "words"), [("dense", "gossamer.prune"), ("empty", "nothing to decide")])
def test_a_model_without_sparse_weights_has_a_useful_page(browser: Any, pages: dict[str, Path], name: str, words: str) -> None:
    tab = Tab(browser, pages[name])
    assert words in tab.page.locator("#model").inner_text()
    tab.page.keyboard.press("3")
    assert "dump_ir" in tab.page.locator("#code").inner_text()
    tab.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_no_panel_is_wider_than_the_window_and_the_theme_switches(
    browser: Any, pages: dict[str, Path], theme: str, width: int
) -> None:
    tab = Tab(browser, pages["encoder"], viewport={"width": width, "height": 800}, color_scheme=theme)
    for panel in "1234":
        tab.page.keyboard.press(panel)
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground = "getComputedStyle(document.body).backgroundColor"
    before = tab.page.evaluate(ground)
    tab.page.keyboard.press("t")
    after = tab.page.evaluate(ground)
    assert before != after and (before == "rgb(255, 255, 255)") == (theme == "light")
    tab.close()


def test_a_dump_of_torch_compile_has_a_page(browser: Any, tmp_path: Path) -> None:
    compile_and_run(prune_(nn.Sequential(nn.Linear(32, 48))).eval(), torch.randn(4, 32), dump_ir=str(tmp_path))
    tab = Tab(browser, tmp_path / "index.html")
    assert follow(tab, "aten.add.Tensor")
    tab.close()
