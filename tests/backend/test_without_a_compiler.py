"""A machine without a C++ compiler: all but packages works, and the dense layers run op by op."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import shutil, warnings
assert not [name for name in ("g++", "gcc", "cc", "c++", "clang++", "cl") if shutil.which(name)]
warnings.simplefilter("error")
import torch, gossamer
from torch import nn
from gossamer.backend.dense import has_cpp_compiler

assert not has_cpp_compiler()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48), nn.LogSoftmax(-1))
gossamer.sparsify(model, "magnitude", density=0.1)
gossamer.finalize(model)
tokens, options = torch.randint(50, (4, 7)), {"min_gain": 0, "strict": True}
report = gossamer.explain(model.eval(), tokens, options=options)
assert len(report.sparse) == 2, report
compiled = torch.compile(model, backend="sparse", fullgraph=True, options=options)
with torch.no_grad():
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(tokens[:2]), model(tokens[:2]), rtol=1e-4, atol=1e-5)
model.train()
compiled(tokens).sum().backward()
found = model[1].weight.grad.clone()
model.zero_grad()
model(tokens).sum().backward()
torch.testing.assert_close(found, model[1].weight.grad, rtol=1e-3, atol=1e-4)
warnings.filterwarnings("ignore", ".*LeafSpec.*")
program = gossamer.export(model.eval(), (tokens,), options=options)
torch.testing.assert_close(program.module()(tokens), model(tokens), rtol=1e-4, atol=1e-5)
try:
    gossamer.build(model, (tokens,), "model.so", options=options)
except gossamer.CompileError as refused:
    assert "linked by a C++ compiler, and there is none" in str(refused), refused
print("all is there")
"""


def test_everything_but_packages_works_without_a_compiler(tmp_path: Path) -> None:
    surroundings = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    surroundings |= {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=surroundings, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "all is there" in done.stdout, done.stderr
