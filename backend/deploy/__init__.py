"""Exports sparse regions for use without Python: kernels, packed weights and C code, for AOTInductor's packages and for
libraries.

`packages` links them into a package of AOTInductor, `backend/build.py` into a library with a C header.
"""
