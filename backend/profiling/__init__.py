"""Measures where the time of a model's calls goes, for `gossamer.profile`.

`clock` times the calls, `moved` finds out what each moves and computes, `measured` has the results, `trace` the trace.
"""
