"""python -m tests.opinfo [part of a name]: how PyTorch's own samples of its operators go with SparseTensors, and what is wrong.

torch.testing._internal needs the package expecttest. Methods in place with numbers are listed as wrong: they are documented to
change stored values only.
"""

import sys
from collections import Counter

from tests.opinfo.samples import FORMATS, samples


def main() -> int:
    """The number of wrong results, at most 100."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    how: Counter[str] = Counter()
    told: set[tuple[str, str]] = set()
    for sample in samples(lambda name: wanted in name):
        for name, format in FORMATS.items():
            word, problem = sample.outcome(format)
            how[word] += 1
            if word in ("wrong", "raises", "refused") and (sample.name, word) not in told:
                told.add((sample.name, word))
                print(f"{word:8} {sample.name} {name}{' both' if sample.both else ''}: {problem}", flush=True)
    asked = sum(count for word, count in how.items() if word != "torch refuses")
    print(
        f"{asked} calls: {', '.join(f'{count} {word}' for word, count in how.most_common())}; {how['right'] / asked:.2%} right"
    )
    return min(how["wrong"], 100)


if __name__ == "__main__":
    sys.exit(main())
