"""Search with SPLADE: the scores of all documents for some queries, and the best of them.

Documents and queries are rows of weights for the words of a vocabulary, random ones with as many words, and as uneven, as those
of SPLADE. Queries are dense, as a batch of few is best, or sparse.
"""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import add_list, sizes, some_of
from benchmarks.operations import Operation, workload
from benchmarks.registry import Case

WORDS, BEST = 30_522, 10
_IN_DOCUMENT, _IN_QUERY = 130, 25
_FORMS = ("dense", "sparse")


@cache
def texts(count: int, words: int, seed: int) -> Any:
    """A csr_array [count, WORDS] of about so many weights in each row. Few words are in most of the texts."""
    from scipy.sparse import csr_array

    random = np.random.default_rng(seed)
    frequency = 1 / np.arange(10, WORDS + 10) ** 0.7
    columns = random.choice(WORDS, size=(count, words), p=frequency / frequency.sum())
    columns = np.random.default_rng(0).permutation(WORDS)[columns]  # the words that are in most texts are in most queries
    values = random.gamma(2.0, 0.4, size=columns.size).astype(np.float32)
    found = csr_array((values, columns.ravel(), np.arange(0, columns.size + 1, words)), shape=(count, WORDS))
    found.sum_duplicates()
    found.sort_indices()
    return csr_array((found.data, found.indices.astype(np.int32), found.indptr.astype(np.int32)), shape=found.shape)


def exact(documents: Any, queries: Any) -> Any:
    """The scores of the best, [queries, BEST]."""
    queries = queries.toarray() if hasattr(queries, "toarray") else queries
    return -np.sort(-(documents @ queries.T).T, axis=1)[:, :BEST]


def build(documents: int, queries: int, form: str) -> Operation:
    matrix, asked = texts(documents, _IN_DOCUMENT, 0), texts(queries, _IN_QUERY, 1)
    given = asked if form == "sparse" else torch.from_numpy(asked.toarray())
    flops = 2 * matrix.nnz * queries if form == "dense" else 2 * int((matrix != 0).sum(0) @ (asked != 0).sum(0))
    return Operation("search", matrix, (given,), exact, flops, 4 * queries * (WORDS + documents))


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--documents", sizes, "20000", "how many")
    add_list(parser, "--queries", sizes, "1,32", "how many at once")
    add_list(parser, "--forms", some_of(*_FORMS), ",".join(_FORMS), "of the queries")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{documents:,} documents, {queries} {form} queries",
            {"documents": documents, "queries": queries, "form": form},
            partial(build, documents, queries, form),
            2e-9 * documents * _IN_DOCUMENT * queries,
        )
        for documents in args.documents
        for queries in args.queries
        for form in args.forms
    ]


WORKLOAD = workload("search", "scores of documents, and the best of them", add_arguments, cases)
