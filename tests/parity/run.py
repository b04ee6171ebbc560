"""`python -m tests.parity.run "tp2 pp2 vpp2" "moe ep2 dp2" ...`: the worst differences of some cases against Hugging
Face.

Words: tp2 pp2 vpp2 cp2 dp2 ep2 etp2 first1 last1, sp, do (distributed optimizer), packed, tied, allgather,
recompute=full|selective, te, overlap, comm=p2p|a2a|all_gather|a2a+p2p, attn=fused|unfused (with --te RELEASE), and a
model variant of tests/parity/models.py (or --model for all). `--all` and `--cover` take the listed layouts of dense,
moe, qwen3_5 or qwen3_5_moe.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.parity.cases import Case, parse
from tests.parity.check import against_hugging_face
from tests.parity.compare import table
from tests.parity.measure import Task
from tests.parity.picture import draw, worst_gradient
from tests.parity.pool import Pool, RankError, te_pool
from tests.parity.references import References


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.parity.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="cases, one in quotes each")
    parser.add_argument("--model", default="dense", help="variant of the cases that name none")
    parser.add_argument("--cover", default="", help="the default run's cases of a model")
    parser.add_argument("--all", default="", help="every layout of a model")
    parser.add_argument("--te", default="", help="release of Transformer Engine; its layouts for --cover and --all")
    parser.add_argument("--part", default="1/1", help="k/n: only every n-th case, from the k-th")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a case")
    parser.add_argument("--rows", type=int, default=8, help="tensors shown of a failing case")
    parser.add_argument("--picture", type=Path, help="a PNG of the worst gradient of each case")
    parser.add_argument("--no-aux", action="store_true", help="auxiliary losses off")
    return parser


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases that the command line names."""
    from tests.parity import cover, cover_te

    listed = cover_te if args.te else cover
    cases = [
        parse(text, **({} if any(w in text.split() for w in ("dense", "moe")) else {"model": args.model}))
        for text in args.cases
    ]
    if args.cover:
        cases += listed.default(args.cover)
    if args.all:
        cases += listed.every(args.all)
    k, n = map(int, args.part.split("/"))
    return cases[k - 1 :: n]


def main() -> int:
    """Runs the cases; the number that failed."""
    args = options().parse_args()
    failed = 0
    errors: dict[str, float] = {}
    parameters = 0
    pool_of_ranks = te_pool(args.te) if args.te else Pool()
    with tempfile.TemporaryDirectory() as scratch, pool_of_ranks as pool:
        references = References(Path(scratch), aux=not args.no_aux)
        for case in chosen(args):
            folder, recipe, want = references.of(case)
            start = time.monotonic()
            try:
                got = pool.run("tests.parity.measure:train", Task(case, folder, recipe), case.world, args.timeout)[0]
            except RankError as error:
                failed += 1
                print(f"FAIL {case}\n{error}", flush=True)
                continue
            differences = against_hugging_face(case, got, references)
            bad = any(d.bad for d in differences)
            errors[" ".join(str(case).split()[1:])] = worst_gradient(differences)
            parameters = len(want.gradients)
            failed += bad
            took = f"{time.monotonic() - start:.1f} s"
            if bad or len(args.cases) == 1:
                print(table(f"{'FAIL' if bad else 'ok'} {case} ({took})", differences, args.rows), flush=True)
            else:
                worst = max(differences, key=lambda d: d.error / d.limit)
                print(f"ok   {case} ({took}); nearest its limit: {worst}", flush=True)
    if args.picture:
        draw(errors, args.picture, parameters)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 99))
