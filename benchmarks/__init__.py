"""The measured claims: contenders and workloads as plug-ins, one file each; JSON out, tables and plots from the JSON.

    python -m benchmarks --list
    python -m benchmarks --workload linear --list                       its cases, and about how long they take
    python -m benchmarks --workload linear --contender dense,inductor,sparse --threads 1,2 --out linear.json
    python -m benchmarks.tables linear.json                             see its docstring for other tables
    python -m benchmarks.plots linear.json                              SVG files beside the JSON

`--resume` goes on with a run that was broken off. How it measures: `measure.py`; the machine's peaks, measured in the same
run: `roofline.py`. A new contender is a file in `contenders/` that defines `CONTENDER`, a new workload a file in
`workloads/` that defines `WORKLOAD`; both types are in `registry.py`. Peers come with `pip install -e .[benchmarks]`;
one that is not installed is left out, with the reason.
"""
