"""What the page of a report is made of: patterns, counted loops, advice, and what a dump folder keeps."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer import Decision, Report
from gossamer.backend.page import saved
from gossamer.backend.page.advice import advice_for
from gossamer.backend.page.assembly import hot_loops
from gossamer.backend.page.pattern import BLOCKS, pattern_of, pattern_of_places
from gossamer.backend.regions.details import answered
from gossamer.backend.report.details import Details
from gossamer.backend.report.report import collect
from gossamer.view import main
from tests.backend.harness import prune_

EAGER = {"dense": "eager", "min_gain": 0}


def random_mask(rows: int, columns: int, density: float = 0.2) -> torch.Tensor:
    return (torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) < density).float()


def test_a_pattern_counts_rows_and_columns_as_torch_does() -> None:
    weight = random_mask(70, 130)
    found = pattern_of(weight, 3)
    assert found is not None and found["nonzeros"] == int(weight.sum())
    for name, counts in (("rows", weight.sum(1)), ("columns", weight.sum(0))):
        assert (found[name]["low"], found[name]["high"]) == (int(counts.min()), int(counts.max()))
        assert sum(found[name]["bins"]) == counts.numel() and found[name]["mean"] == pytest.approx(float(counts.mean()))
    assert sum(found["shares"]["rows"]) == sum(found["shares"]["nonzeros"]) == found["nonzeros"]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 1), (4, 8), (16, 32), (64, 64)])
def test_the_fill_of_blocks_is_that_of_blocks_cut_by_torch(height: int, width: int) -> None:
    weight = random_mask(100, 150, 0.05)
    padded = nn.functional.pad(weight, (0, -150 % width, 0, -100 % height))
    used = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).sum((1, 3)) > 0
    expected = float(weight.sum()) / (int(used.sum()) * height * width)
    found = pattern_of(weight, 1)
    assert found is not None
    assert found["fill"][BLOCKS.index(height)][BLOCKS.index(width)] == pytest.approx(expected, abs=1e-4)


def test_groups_are_found_nearly_found_and_held_by_chance() -> None:
    kept = torch.rand(64, 32, 4).argsort(-1) < 2
    exact = kept.flatten(1).float()
    nearly = exact.clone()
    nearly[:2] = 1
    sparse = torch.zeros(64, 128)
    sparse[0, 0] = 1
    verdicts = [
        {f"{g['n']}:{g['m']}": g["verdict"] for g in (pattern_of(w, 1) or {})["groups"]} for w in (exact, nearly, sparse)
    ]
    assert [each["2:4"] for each in verdicts] == ["found", "nearly", "by chance"]
    assert verdicts[0]["1:4"] == ""


def test_a_picture_shows_where_blocks_are() -> None:
    weight = torch.zeros(128, 128)
    weight[64:, :32] = 1
    picture = (pattern_of(weight, 1) or {})["picture"]
    levels = torch.frombuffer(bytearray(base64.b64decode(picture["levels"])), dtype=torch.uint8).view(64, 64)
    assert levels[32:, :16].eq(255).all() and levels.sum() == 255 * 32 * 16


def test_places_of_a_large_matrix_give_what_its_mask_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_mask(90, 70)
    rows, columns = weight.nonzero(as_tuple=True)
    assert pattern_of_places(rows, columns, (90, 70), 2) == pattern_of(weight, 2)
    monkeypatch.setattr("gossamer.backend.page.pattern._MOST_ELEMENTS", 0)
    large = pattern_of_places(rows, columns, (90, 70), 2) or {}
    assert large["rows"] == (pattern_of(weight, 2) or {})["rows"] and large["fill"] is None


@pytest.mark.parametrize("weight", [torch.zeros(0, 4), torch.zeros(5)])
def test_what_is_no_matrix_has_no_pattern(weight: torch.Tensor) -> None:
    assert pattern_of(weight, 1) is None


LOOP = """\
# broadcast: inner loop, 2 multiply-adds
.LBB0_4:                                # %loop
                                        # =>    This Inner Loop Header: Depth=3
\tmovq\t(%rax,%rcx,2), %r14
\tleaq\t4(%rcx), %rdx
\tprefetcht0\t512(%rax)
\tvbroadcastss\t(%r13,%rcx,4), %zmm9
\tvfmadd231ps\t(%rdx,%r14), %zmm9, %zmm5 # zmm5 = (zmm9 * mem) + zmm5
\tvfmadd231ps\t%zmm1, %zmm9, %zmm6
\tvmovups\t%zmm5, 64(%rdx)
\tvmovups\t%zmm6, (%rdx) {%k1}
\tcmpq\t%rsi, %rcx
\tjb\t.LBB0_4
\tvmovups\t%zmm6, (%rdi)
"""


def test_an_iteration_is_counted_from_the_assembly() -> None:
    (loop,) = hot_loops(LOOP)
    assert (loop["label"], loop["depth"], loop["first"], loop["last"]) == (".LBB0_4", 3, 2, 13)
    assert (loop["loads"], loop["multiplies"], loop["stores"], loop["instructions"]) == (3, 2, 2, 10)


def decision(name: str, **changes: Any) -> Decision:
    fields = {
        "op": "linear", "shape": (64, 64), "density": 0.58, "format": None, "schedule": None, "sparse": False,
        "reason": "too dense for a gain of 1.1x", "gain": 0.8, "details": Details(32, False, "float32", pays_from=0.55),
    } | changes  # fmt: skip
    return Decision(name, **fields)  # type: ignore[arg-type]


def texts(report: Report) -> str:
    return "\n".join(f"{each['title']}: {each['text']}" for each in advice_for(report.data()))


def test_advice_names_the_zeros_from_which_on_it_pays() -> None:
    assert "42% of w are zeros. From 55% on a sparse kernel is predicted to pay here." in texts(Report([decision("w")]))
    assert "From" not in texts(Report([decision("w", details=Details(32, False, "float32"))]))


def test_advice_names_graph_breaks_gradients_and_ends_of_chains() -> None:
    ends = [
        decision(
            name, sparse=True, reason="", gain=3.0, details=Details(32, False, "float32", region=name, end=f"it goes to {name}")
        )
        for name in "ab"
    ]
    report = Report(
        ends, ["model.py:3: print. Write x = True before you compile."], 2, training=True, other=Report(ends, kernels=1)
    )
    found = texts(report)
    assert "`model.py:3`: print. Write `x = True` before you compile." in found and "on 1 kernel." in found
    assert "In inference" in found and "One kernel ends here: it goes to a." in found
    assert "2 weights are sparse on 1 kernel. Here 2 weights are sparse on 2 kernels." in found


def test_inference_is_no_advice_where_it_gains_nothing() -> None:
    one = [decision("w", sparse=True, reason="", gain=3.0)]
    assert "In inference" not in texts(Report(one, kernels=2, training=True, other=Report(one, kernels=1)))
    assert "1 weight is sparse on 1 kernel." in texts(
        Report([decision("w")], kernels=0, training=True, other=Report(one, kernels=1))
    )


def test_an_unpruned_model_is_told_to_prune() -> None:
    with torch.no_grad():
        report = gossamer.explain(nn.Linear(64, 64).eval(), torch.randn(4, 64), options={"dense": "eager"})
    assert "gossamer.prune" in texts(report)


@pytest.mark.usefixtures("no_chains")
def test_details_have_the_contenders_and_the_arrays() -> None:
    model = prune_(nn.Sequential(nn.Linear(64, 96))).eval()
    with torch.no_grad():
        report = gossamer.explain(model, torch.randn(8, 64), options=EAGER)
    (found,) = report.decisions
    assert found.details is not None and found.details.tokens == 8
    names = [each.name for each in found.details.contenders]
    assert names[0] == "dense" and found.schedule in names
    chosen = next(each for each in found.details.contenders if each.name == found.schedule)
    assert chosen.predicted_us is not None and chosen.predicted_us > chosen.terms["call_us"] > 0
    assert found.details.arrays[-1][0] == "values"
    assert 0 < sum(size for _, size in found.details.arrays) <= found.packed_bytes
    assert found.details.end == "the graph returns its result"
    assert report.patterns["0.weight"]["nonzeros"] == int(model[0].weight.count_nonzero())


def test_convolutions_have_contenders_and_arrays_as_well() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.mul_(torch.rand_like(model[0].weight) < 0.1)
        found = gossamer.explain(model, torch.randn(1, 16, 8, 8), options=EAGER).decisions[0]
    assert found.sparse and found.details is not None and found.details.tokens == 64
    assert [each.name for each in found.details.contenders] == ["dense", "convolve"] and found.schedule == "convolve"
    for each in found.details.contenders:
        assert (each.measured_us or each.predicted_us or 0) > 0
    assert found.details.region and not found.details.end, "rows of convolutions are joined later"
    assert 0 < sum(size for _, size in found.details.arrays) <= found.packed_bytes


def test_nothing_is_predicted_for_a_report_that_nobody_asks_for() -> None:
    model, x = prune_(nn.Sequential(nn.Linear(64, 96))).eval(), torch.randn(8, 64)
    with torch.no_grad(), collect() as found:
        torch.compile(model, backend="sparse", options=EAGER)(x)
    (decision,) = found.decisions
    assert decision.details is not None and decision.details.contenders == () and decision.details.question is not None
    (answer,) = answered(found.decisions)
    assert answer.details is not None and answer.details.contenders and answer.details.question is None


def test_a_masked_weight_has_the_pattern_of_its_product() -> None:
    layer = nn.Linear(64, 64)
    nn.utils.prune.l1_unstructured(layer, "weight", amount=0.75)
    report = gossamer.explain(layer, torch.randn(8, 64), options=EAGER)
    assert [each["nonzeros"] for each in report.patterns.values()] == [1024], str(report)


def test_reports_of_a_folder_are_one(tmp_path: Path) -> None:
    first, second = Report([decision("a"), decision("b")], ["x"]), Report([decision("b", sparse=True, reason="")], ["x", "y"])
    for report in (first, second):
        saved.add(tmp_path, report.data())
    found = saved.read(tmp_path)
    assert found is not None and (found["sparse"], found["dense"], found["breaks"]) == (1, 1, ["x", "y"])
    assert saved.read(tmp_path / "none") is None
    sizes = {"format": "CSR", "sparse": True, "dense_bytes": 8, "packed_bytes": 2}
    for report in (Report([decision("b", **sizes), decision("c", **sizes)]), Report([decision("d", **sizes)])):
        saved.add(tmp_path, report.data())
    found = saved.read(tmp_path)
    assert found is not None and (found["dense_bytes"], found["packed_bytes"]) == (24, 6)


def test_view_writes_the_page_of_a_dump_and_refuses_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--no-browser"]) == 2
    assert main([str(tmp_path / "report.html"), "--no-browser"]) == 2
    assert "dump_ir" in capsys.readouterr().err
    saved.add(tmp_path, Report([decision("a<!--<script></script>")], min_gain=float("inf")).data())
    assert main([str(tmp_path), "--no-browser"]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "index.html"
    page = (tmp_path / "index.html").read_text()
    start = page.index('id="data">') + len('id="data">')
    data = page[start : page.index("</script>", start)]
    assert json.loads(data)["decisions"][0]["name"] == "a<!--<script></script>"
    assert "<" not in data and "Infinity" not in data
