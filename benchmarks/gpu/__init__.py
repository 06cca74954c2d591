"""Checks and timings of our GPU kernels, packed into a folder that runs where there is a GPU but no compiler of ours.

    make gpu-bundle                     # here: compiles the kernels to PTX, writes build/gpu-bundle
    python build/gpu-bundle/run.py      # there: needs Python, numpy, torch and a GPU; writes results.json

All but `bundle` is part of the folder.
"""
