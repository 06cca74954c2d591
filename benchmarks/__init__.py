"""The measured claims: contenders and workloads as plug-ins, one file each; JSON out, tables from the JSON.

    python -m benchmarks --list
    python -m benchmarks --workload linear --contender dense,inductor,sparse --threads 1,2 --out linear.json
    python -m benchmarks.tables linear.json

How it measures: `measure.py`. A new contender is a file in `contenders/` that defines `CONTENDER`, a new
workload a file in `workloads/` that defines `WORKLOAD`; both types are in `registry.py`.
"""
