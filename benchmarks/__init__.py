"""The measured claims: contenders and workloads as plug-ins, one file each; JSON out, tables and plots from the JSON.

    python -m benchmarks --list
    python -m benchmarks --workload linear --list                       its cases, and about how long they take
    python -m benchmarks --workload linear --contender dense,inductor,sparse --threads 1,2 --out linear.json
    python -m benchmarks.tables linear.json                             see its docstring for other tables
    python -m benchmarks.plots linear.json                              SVG files beside the JSON
    python -m benchmarks --workload spmm --matrices wordnet --columns 16,64 --out spmm.json

`--resume` goes on with a run that was broken off. How it measures: `measure.py`; the machine's peaks, measured in the same
run: `roofline.py`. A new contender is a file in `contenders/` that defines `CONTENDER` and runs pruned models (`models.py`), a
new library a file in `libraries/` that says which operations with sparse matrices it has (`operations.py`), a new workload a
file in `workloads/` that defines `WORKLOAD`; their types are in `registry.py`. Peers come with `pip install -e .[benchmarks]`;
one that is not installed is left out, with the reason.
"""
