"""From LLVM IR to running code: JIT, PTX, packing, workspace, and caches on disk."""

# Import torch before any file of this package. At the end of its own import, torch calls gossamer.registration,
# which imports some of these files.
import torch

OLDEST_TORCH = "2.11"

if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, OLDEST_TORCH.split("."))):
    raise ImportError(
        f"gossamer needs torch {OLDEST_TORCH} or newer, but torch {torch.__version__} is installed in {torch.__path__[0]}. "
        f"Install a newer one: pip install 'torch>={OLDEST_TORCH}'"
    )
