"""sentence-transformers with `model.compile(backend="sparse")`: encoders, cross-encoders and SPLADE, any number of
texts of any length."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")
import scipy.sparse
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from torch._dynamo.utils import counters
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, BertTokenizerFast

import gossamer
from gossamer.backend.report.report import collect

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(200))]
BATCHES = ((4, 20), (1, 5), (8, 60), (3, 11), (16, 30), (1, 1), (7, 90))  # texts, and words of the longest


def texts(number: int, longest: int) -> list[str]:
    draw = random.Random(number * 100 + longest)
    return [" ".join(draw.choices(WORDS[5:], k=draw.randint(1, longest))) for _ in range(number)]


def bert(kind: Any, folder: Path, **options: Any) -> str:
    """A folder with a small BERT, whose encoder has 90 % zeros, and its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    model = kind(BertConfig(**sizes, vocab_size=len(WORDS), **options))
    gossamer.finalize(gossamer.sparsify(model, "magnitude", density=0.1, only="*encoder*")).save_pretrained(folder)
    BertTokenizerFast(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(folder)
    return str(folder)


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    counters.clear()
    model.compile(backend="sparse", options={"dense": "eager", "min_gain": 0})
    return model


def test_an_encoder_compiles_three_graphs_for_all_batches(tmp_path: Path) -> None:
    """The transformer, pooling and normalisation are one graph: of one size, of one text, of any size."""
    parts = [modules.Transformer(bert(BertModel, tmp_path)), modules.Pooling(64), modules.Normalize()]
    model = SentenceTransformer(modules=parts, device="cpu")
    expected = [model.encode(texts(*batch)) for batch in BATCHES]
    compiled(model)
    with collect() as found:
        for batch, wanted in zip(BATCHES, expected, strict=True):
            np.testing.assert_allclose(model.encode(texts(*batch)), wanted, rtol=0, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 3 and not counters["graph_break"]
    assert found.decisions and all(decision.sparse for decision in found.decisions)


def test_a_cross_encoder(tmp_path: Path) -> None:
    model = CrossEncoder(bert(BertForSequenceClassification, tmp_path, num_labels=1), device="cpu")
    pairs = [list(zip(texts(*batch), texts(*batch)[::-1], strict=True)) for batch in BATCHES[:5]]
    expected = [model.predict(each) for each in pairs]
    compiled(model)
    with collect() as found:
        for each, wanted in zip(pairs, expected, strict=True):
            np.testing.assert_allclose(model.predict(each), wanted, rtol=0, atol=1e-5)
    assert any(decision.sparse for decision in found.decisions) and not counters["graph_break"]


def test_splade_and_search(tmp_path: Path) -> None:
    """Texts become sparse rows; the scores of all documents are one product of a SparseTensor."""
    parts = [MLMTransformer(bert(BertForMaskedLM, tmp_path)), SpladePooling("max")]
    model = SparseEncoder(modules=parts, device="cpu", max_active_dims=16)
    expected = model.encode(texts(50, 20))
    compiled(model)
    with collect() as found:
        rows = model.encode(texts(50, 20))
    assert any(decision.sparse for decision in found.decisions)
    torch.testing.assert_close(rows.to_dense(), expected.to_dense(), rtol=1e-4, atol=1e-5)
    documents = gossamer.SparseTensor.from_torch(rows)
    queries = model.encode(texts(5, 9)).to_dense()
    scores = (documents @ queries.t()).t()
    matrix = scipy.sparse.csr_matrix(rows.to_dense().numpy())
    np.testing.assert_allclose(scores.numpy(), (matrix @ queries.t().numpy()).T, rtol=1e-4, atol=1e-5)
    best = scores.topk(3)
    assert best.indices.shape == (5, 3) and best.values.isfinite().all()
