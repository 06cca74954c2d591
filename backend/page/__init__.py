"""Renders the report as one HTML file that works from disk, from decisions, tensors and dumped stages as plain data.

`render.py` puts the page together. `saved.py` and `stages.py` read the folder of a dump; `pattern.py`, `assembly.py`,
`advice.py` and `families.py` compute what the page shows.
"""
