"""python -m tests.fuzz --seconds 60 --seed 0: random programs with SparseTensors, against dense torch.

A case that fails is printed as a program. Before a case runs, its program is in the file `--note`, if one is named, so that one
that ends the process is known, too.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.fuzz import gradient_trial, model_trial, trial
from tests.fuzz.builder import ModelProgram
from tests.fuzz.models import make_model
from tests.fuzz.steps import make


def main() -> int:
    """The number of cases that failed, at most 100."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--count", type=int, default=1 << 60, help="cases at most")
    options.add_argument("--seed", type=int, default=0, help="of the first case, the next one's is one more")
    options.add_argument("--compiled", action="store_true", help="in one graph, by torch.compile(backend='sparse')")
    options.add_argument("--note", type=Path)
    options.add_argument("--summary", action="store_true", help="say what was refused")
    options.add_argument("--gradients", action="store_true", help="of stored values and dense operands, too")
    options.add_argument("--models", action="store_true", help="compiled models instead of operations")
    given = options.parse_args()
    torch.set_num_threads(1)
    how: Counter[str] = Counter()
    begin, case = time.monotonic(), given.seed
    while time.monotonic() < begin + given.seconds and case < given.seed + given.count and how["wrong"] < 100:
        program = make_model(case) if given.models else make(case, given.gradients)
        if given.note:
            given.note.write_text(f"# seed {case}\n{program}\n")
        if isinstance(program, ModelProgram):
            word, problem = model_trial.difference(program)
        elif given.gradients:
            word, problem = gradient_trial.difference(program, given.compiled)
        else:
            word, problem = trial.difference(program, given.compiled)
        how[word] += 1
        if problem:
            print(f"# seed {case}: {problem}".replace("\n", "\n# "), f"{program}\n", sep="\n", flush=True)
        case += 1
    right = sum(count for word, count in how.items() if word.startswith("right"))
    refused = sum(count for word, count in how.items() if word.startswith("refused"))
    print(f"{case - given.seed} cases from {given.seed} on: {how['wrong']} wrong, {right} right, {refused} refused")
    if given.summary:
        print(*(f"{count:6} {word}" for word, count in how.most_common()), sep="\n")
    return how["wrong"]


if __name__ == "__main__":
    sys.exit(min(main(), 100))
