"""The examples run, on small inputs, and what they compare agrees."""

import asyncio
import copy
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import gossamer
from gossamer.backend.report.report import collect
from tests.backend.harness import assert_same, compile_and_run

EXAMPLES = Path(__file__).parent.parent / "examples"

GLOSSES = """  1 This software and database is being provided
00000001 03 n 01 entity 0 002 ~ 00000002 n 0000 + 00000001 v 0101 | that which exists
00000002 04 n 02 act 0 deed 0 001 @ 00000001 n 0000 | something that people do
"""


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    try:
        return importlib.import_module(name)
    except SystemExit as missing:
        pytest.skip(str(missing))


def test_wordnet_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb = "00000001 30 v 01 be 0 000 01 + 02 00 | have the quality of being\n"
    for part, text in (("noun", GLOSSES), ("verb", verb), ("adj", ""), ("adv", "")):
        (tmp_path / f"data.{part}").write_text(text)
    graph = example("sources.wordnet", monkeypatch).load(tmp_path)
    assert graph.edge_index.tolist() == [[0, 0, 1], [1, 2, 0]]
    assert graph.classes.tolist() == [3, 4, 30]
    assert graph.glosses[0] == "that which exists"


def test_a_compiled_graph_network_trains_like_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = example("graph_networks", monkeypatch)
    texts = ["an animal", "to move", "a plant that moves"] * 20
    edges = torch.randint(0, len(texts), (2, 300))
    data = graphs.Data(graphs.words(texts, 16), edges, torch.randint(0, 5, (len(texts),)), torch.rand(len(texts)) < 0.8)
    network = graphs.Network("gcn", 16, 8, 5)
    torch._dynamo.reset()
    options = {"dense": "eager", "min_gain": 0, "strict": True}
    compiled = torch.compile(copy.deepcopy(network), backend="sparse", fullgraph=True, options=options)
    counters.clear()
    ours, theirs = graphs.train(compiled, data, 3), graphs.train(network, data, 3)
    assert counters["gossamer"]["regions"] >= 4
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
    assert ours.accuracy == theirs.accuracy


def test_a_mixture_of_experts_trains_and_writes_like_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = example("mixture_of_experts", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["mixture_of_experts.py", "--experts", "4", "--layers", "1", "--width", "32"])
    given, (ids, letters) = experts.arguments(), experts.text()
    model = experts.model_of(letters, given)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    options = {"dense": "eager", "strict": True}
    compiled = torch.compile(other.forward, backend="sparse", fullgraph=True, options=options)
    counters.clear()
    experts.train(model, model, ids, 2)
    experts.train(other, compiled, ids, 2)
    assert counters["gossamer"]["regions"] >= 2
    starts = torch.arange(2)
    with torch.no_grad():
        ours, theirs = (experts.loss_of(each.eval(), ids, starts).item() for each in (other, model))
    assert ours == pytest.approx(theirs, rel=1e-3)
    written, _ = experts.write(model, ids[: experts.TOKENS], 3)
    assert written.shape == (3,)


def test_products_on_a_mesh_are_those_of_scipy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = example("spgemm_mesh", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["spgemm_mesh.py", "--nodes", "200", "--boxes", "3"])
    mesh.main()  # exits where results differ
    assert "27 x 27" in capsys.readouterr().out


def test_a_format_of_ones_own_computes_what_dense_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = example("custom_format", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["custom_format.py"])
    digits.main()  # raises where results differ
    assert "compiled: differs from dense by" in capsys.readouterr().out


def test_digits_are_learned_sparse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    digits = example("train_digits", monkeypatch)
    written = tmp_path / "digits.csv"
    given = ["--recipes", "rigl", "sr-ste, 2:4", "--steps", "60", "--csv", str(written)]
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *given])
    digits.main()
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [name.strip() for name, _ in rows] == ["rigl", "sr-ste, 2:4"] and all(float(found) > 15 for _, found in rows)
    final = [line.split(",") for line in written.read_text().splitlines() if line.startswith("rigl,0,59,")]
    assert [line[3] for line in final] == ["1", "3"] and all(0 < float(line[4]) < 0.5 for line in final)


def test_each_example_is_a_script_with_help() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "argparse.ArgumentParser" in text and "print(" in text and 'if __name__ == "__main__":' in text, path


def test_one_layer_shows_every_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layer = example("one_layer", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["one_layer.py", "--ir", str(tmp_path)])
    torch._dynamo.reset()
    layer.main()  # exits where results differ
    text = capsys.readouterr().out
    assert "1 sparse on 1 kernel" in text and "assembly.s" in text
    (assembly,) = tmp_path.glob("*assembly.s")
    assert "inner loop" in assembly.read_text()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4e6


def test_attention_over_documents_is_compared_with_dense_attention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = example("long_documents", monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda q, k, v: 0 * v)
    with pytest.raises(SystemExit, match="the results differ"):
        documents.measured(128)
    assert "Gossamer" in capsys.readouterr().out


def test_long_documents(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    documents = example("long_documents", monkeypatch)
    monkeypatch.setattr(documents, "measured", lambda length: {})  # three compilers
    monkeypatch.setattr(documents, "LAYERS", 1)
    monkeypatch.setattr("gossamer.backend.compile_module.has_cpp_compiler", lambda: False)
    monkeypatch.setattr(sys, "argv", ["long_documents.py", "--lengths", "300"])
    documents.main()
    text = capsys.readouterr().out
    assert "mask of" in text
    assert "differ by" in text


@torch.no_grad()
def test_attention_over_a_short_document_is_that_of_dense_attention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is mocked: Gossamer and FlexAttention compile, and `measured` exits if a result differs from dense attention."""
    documents = example("long_documents", monkeypatch)
    torch.manual_seed(0)
    with collect() as found:
        times = documents.measured(384)
    assert [each.op for each in found.decisions if each.sparse] == ["attention"], found.decisions
    assert [*times] == ["Gossamer", "FlexAttention", "dense attention"] and min(times.values()) > 0
    assert capsys.readouterr().out.count("differs by") == 2


@torch.no_grad()
def test_the_encoder_of_a_short_document_is_that_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = example("long_documents", monkeypatch)
    words = documents.document(384)
    torch.manual_seed(0)
    model = documents.Encoder(int(words.max()) + 1).eval()
    run = compile_and_run(model, words, regions=documents.LAYERS, disable=["sparse-weights"])  # its weights have no zeros
    assert {each.op for each in run.regions} == {"attention"}
    assert_same(run.output, copy.deepcopy(model).double()(words).float())


def test_a_point_cloud_is_segmented(monkeypatch: pytest.MonkeyPatch) -> None:
    clouds = example("point_cloud", monkeypatch)
    features, indices, labels = clouds.batch(range(2))
    assert len(indices.unique(dim=0)) == len(indices) and int(indices.min()) >= 0 and int(indices.max()) < clouds.SIZE
    assert int(labels.min()) >= 0 and int(labels.max()) < len(clouds.SHAPES)
    torch.manual_seed(0)
    network = clouds.Unet(2)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(network(features, indices), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert clouds.picture(indices, labels).count("\n") == clouds.SIZE // 2 - 1


def test_definitions_find_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary = example("sources.reverse_dictionary", monkeypatch)
    words, definitions = dictionary.held_out()
    assert len(words) == len(definitions) == dictionary.SYNSETS and all(15 < len(each) < 200 for each in definitions)
    own = torch.eye(dictionary.SYNSETS)
    quality, embeddings = dictionary.quality(lambda texts: own, torch.empty(0))
    assert (quality.reciprocal_rank, quality.first, quality.among_ten, quality.cosine) == (100, 100, 100, 1)
    turned = {id(words): own, id(definitions): own.roll(1, 0)}
    monkeypatch.setattr(dictionary, "held_out", lambda: (words, definitions))
    quality, _ = dictionary.quality(lambda texts: turned[id(texts)], embeddings)
    assert (quality.first, quality.cosine) == (0, 0)  # each definition lies on another one's word


def test_the_quality_of_sections_is_that_of_nearest_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = example("sources.package_sections", monkeypatch)
    sections, descriptions = packages.installed()
    assert len(sections) == len(descriptions) == len(set(descriptions))  # none where there is no dpkg
    rows = torch.nn.functional.normalize(torch.tensor([[1, 0.1], [1, 0], [0, 1], [0.1, 1], [1, 0.3]]), dim=1)
    quality, nearest = packages.quality(lambda texts: rows, ["a", "a", "b", "b", "b"], ["text"] * 5, torch.empty(0))
    assert (quality.same_section, quality.same_neighbour) == (80, 100)
    assert nearest.tolist() == [1, 0, 3, 2, 0]
    quality, _ = packages.quality(lambda texts: rows, ["a", "a", "b", "b", "b"], ["text"] * 5, nearest.roll(1))
    assert quality.same_neighbour < 100


def test_the_stored_layers_are_sparse_and_near_the_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    demo, encoders = example("pruned_transformer", monkeypatch), example("sources.sentence_encoder", monkeypatch)
    dense, tokenizer = encoders.load_encoder()
    sparse = copy.deepcopy(dense)
    gossamer.load(sparse.bert.encoder, demo.STORED)
    weights = [module.weight for module in sparse.modules() if isinstance(module, torch.nn.Linear)]
    assert len(weights) == 36 and all((weight == 0).float().mean() >= 0.79 for weight in weights)
    texts = ["to give up a right", "a large body of water", "in a manner that shows no fear"]
    ours, theirs = (encoders.embed(encoder, tokenizer, texts) for encoder in (sparse, dense))
    assert (ours * theirs).sum(1).min() > 0.8


def test_a_compiled_recommender_trains_like_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recommender = example("recommender", monkeypatch)
    graph = example("sources.wordnet", monkeypatch).WordNet(
        torch.randint(0, 60, (2, 300)),
        torch.randint(0, 45, (60,)),
        ["that which exists", "a plant that moves"] * 30,
        ["w"] * 60,
    )
    data = recommender.links(graph, 8)
    assert data.words.max() < 8 and data.test.shape[1] == 30
    model = recommender.Recommender(data, columns=8)
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager", "strict": True})
    counters.clear()
    ours, theirs = recommender.train(model, compiled, data, 3, 64), recommender.train(twin, twin, data, 3, 64, eager=True)
    assert counters["gossamer"]["regions"] >= 6
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    assert recommender.area(compiled, data, 64) == pytest.approx(recommender.area(twin, data, 64), abs=0.01)


def test_a_server_runs_requests_that_come_together_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    server, batches = example("server", monkeypatch), []

    def model(ids: Any, mask: Any) -> Any:
        batches.append(ids.shape)
        return mask.sum(1, keepdims=True).astype("float32")

    async def asked() -> list[dict[str, list[float]]]:
        answer = server.application(model, wait=0.5).routes[-1].endpoint
        return await asyncio.gather(*(answer({"text": text}) for text in ("one", "two words", "and three words")))

    found = asyncio.run(asked())
    assert [each["embedding"] for each in found] == [[3], [4], [5]]  # with the first and the last token
    assert batches == [(3, 5)]
