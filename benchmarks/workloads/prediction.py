"""How well the compiler chooses: every schedule it has, and dense, beside what it takes by itself.

All are Gossamer's compiled graphs without Dynamo's guards, which cost all alike. A schedule that cannot compute a case does not
count in it. Where the compiler leaves a layer dense, dense is what it chose.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.arguments import add_dtype, add_list, shapes, shares, sizes
from benchmarks.contenders.sparse import missing
from benchmarks.contenders.sparse_graph import prepared
from benchmarks.measure import causes
from benchmarks.models import PrunedModel
from benchmarks.pruning import density, patterns
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Workload
from benchmarks.workloads.linear import case

AUTO, DENSE = "auto", "dense"
NEVER = 1e9  # a gain that no layer is predicted to have
CLOSE = 1.1


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--shapes", shapes, "768x3072,1536x384,1000x1333", "in x out")
    add_list(parser, "--sparsity", shares, ".5,.7,.8,.9,.95", "shares of zeros, unstructured")
    add_list(parser, "--tokens", sizes, "1,8,32,128", "rows of the input, unstructured")
    add_list(parser, "--patterns", patterns, "skewed,16x1,1x16,4x4,32x32,2:4,1:4", "further patterns, of the first shape")
    add_list(parser, "--pattern-sparsity", shares, ".9", "shares of zeros, further patterns")
    add_list(parser, "--pattern-tokens", sizes, "1,8,128", "rows of the input, further patterns")
    add_dtype(parser)


def cases(args: argparse.Namespace) -> list[Case]:
    plain = [
        case(features, "unstructured", sparsity, tokens, args.dtype)
        for features in args.shapes
        for sparsity in args.sparsity
        for tokens in args.tokens
    ]
    structured = {
        found.name: found
        for pattern in args.patterns
        for sparsity in args.pattern_sparsity
        for tokens in args.pattern_tokens
        for found in [case(args.shapes[0], pattern, 1 - density(pattern, sparsity), tokens, args.dtype)]
    }
    return plain + list(structured.values())


def scheduled(options: Mapping[str, Any], problem: PrunedModel) -> Prepared:
    """The graph compiled with these options; Unsupported where the schedule refuses the weight."""
    from gossamer import CompileError

    try:
        return prepared(problem, {"strict": True, **options})
    except Exception as error:
        refusal = next((cause for cause in causes(error) if isinstance(cause, CompileError)), None)
        if refusal is None:
            raise
        known = f"no {options.get('schedule')} schedule" in str(refusal)
        raise Unsupported("it has no way to compute this" if known else str(refusal)[:300]) from error


def contenders() -> dict[str, Contender]:
    found = {
        DENSE: Contender("dense", partial(scheduled, {"min_gain": NEVER}), missing=missing),
        AUTO: Contender("auto", partial(scheduled, {}), missing=missing),
    }
    if missing() is None:
        from gossamer.passes.pipelines import SCHEDULES

        for name in SCHEDULES:
            if name != "reference":
                options = {"schedule": name, "min_gain": 0}
                found[name] = Contender(name, partial(scheduled, options), missing=missing)
    return found


def choice(results: Mapping[str, Any]) -> tuple[str, float] | None:
    """What was chosen, and how many times as long as the fastest it takes; None where nothing was measured."""
    times = {name: result["median_ms"] for name, result in results.items() if "median_ms" in result}
    if AUTO not in times or len(times) == 1:
        return None
    schedules = results[AUTO]["notes"]["schedules"]
    return schedules[0] if schedules else DENSE, times[AUTO] / min(times.values())


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [(case["name"], *made) for case in cases if (made := choice(case["results"]))]
    if not found:
        return []
    ratios = [ratio for _, _, ratio in found]
    close = sum(ratio <= CLOSE for ratio in ratios)
    lines = [
        f"The chosen schedule is within 10 % of the best in {close} of {len(found)} cases ({close / len(found):.0%}); "
        f"over all cases it takes {statistics.geometric_mean(ratios):.3f} times as long as the best (geometric mean)."
    ]
    if worst := [f"- {name}: {chosen}, {ratio:.2f}" for name, chosen, ratio in found if ratio > CLOSE]:
        lines += ["", "Further off (chosen schedule, times as long as the best):", "", *worst]
    return lines


WORKLOAD = Workload(
    "what the compiler chooses beside all that it could", add_arguments, cases, contenders, conclude=conclude, preparing=0.25
)
