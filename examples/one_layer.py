"""One pruned layer, from `torch.compile` to machine code: what Gossamer decides, what it computes, and every stage as text.

    pip install .
    python examples/one_layer.py --ir ir

The stages take 1.5 MB. The last one, assembly, names the schedule at its top and labels the loops that multiply.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

try:
    import torch

    import gossamer
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install . in the repository")

ZEROS = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=128, help="rows of the input (default 128)")
    parser.add_argument("--ir", type=Path, help="a folder for the text of every stage")
    args = parser.parse_args()

    torch.manual_seed(0)
    layer, x = torch.nn.Linear(768, 3072).eval(), torch.randn(args.tokens, 768)
    with torch.no_grad():
        layer.weight *= torch.rand_like(layer.weight) > ZEROS
        print(gossamer.explain(layer, x))
        compiled = torch.compile(layer, backend="sparse", options={"dump_ir": args.ir and str(args.ir)})
        result, expected = compiled(x), layer(x)
    difference = float((result - expected).abs().max())
    print(f"largest difference from dense PyTorch: {difference:.0e}")
    if args.ir:
        for path in sorted(args.ir.iterdir()):
            print(f"{path.stat().st_size:8,} bytes  {path}")
    if not difference < 1e-5:
        sys.exit("the results differ")


if __name__ == "__main__":
    main()
