"""Seconds: the backend is found by name, compiles something, and computes what dense torch computes."""

import copy

import torch
from torch import nn

import gossamer


def pruned_mlp() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight[torch.rand_like(layer.weight) < 0.9] = 0
    return model


def test_the_backend_is_known_by_name() -> None:
    assert "sparse" in torch._dynamo.list_backends()


def test_a_pruned_model_runs_sparse_and_right() -> None:
    model, x = pruned_mlp(), torch.randn(64, 256)
    with torch.no_grad():
        compiled = torch.compile(copy.deepcopy(model), backend="sparse", fullgraph=True, options={"dense": "eager"})
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        report = gossamer.explain(model, x, options={"dense": "eager"})
    assert [d.sparse for d in report.decisions] == [True, True]
    assert report.graph_breaks == []


def test_gossamer_opt_lists_its_passes() -> None:
    from gossamer.passes import registry

    assert {"fuse-epilogue", "choose-format", "schedule", "lower-broadcast"} <= set(registry.names())
