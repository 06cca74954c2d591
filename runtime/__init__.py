"""From LLVM IR to running code."""

# Before any file here: at the end of its own import, torch calls gossamer.registration, which imports some of them.
import torch  # noqa: F401
