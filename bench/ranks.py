#!/usr/bin/env python3
"""How uneven heads are over the ranks of Ulysses at one rho, by simulation from real generations.

    for rho in 0.8 0.9; do for clip in 0 1 2 3; do scope generate -o runs/$rho-$clip --example $clip --seed $clip --set rho=$rho; done; done
    bench/ranks.py runs/*/run.json --json bench/results/ranks_tiny_wan.json

A step's heads, of all sparse layers and all runs with the same settings, stand for the heads of one call of a larger model. A rank takes
as long as its heads' densities add up to: attention alone. The slowest rank over the mean says how long the others wait.
"""
import argparse
import json
import random
import statistics
import subprocess

RANKS = 2, 4, 8
ORDERS = 200


def in_order(heads, ranks):
    """As Ulysses splits them: equal parts, one after the other."""
    share = len(heads) // ranks
    return [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]


def by_counts(heads, ranks, most):
    """The largest first, each to the rank that has least, of those with fewer than `most` heads."""
    parts = [[] for _ in range(ranks)]
    for head in sorted(range(len(heads)), key=lambda head: -heads[head]):
        room = [part for part in parts if len(part) < most]
        min(room, key=lambda part: sum(heads[i] for i in part)).append(head)
    return parts


def wait(heads, parts):
    """The slowest rank / the mean."""
    loads = [sum(heads[i] for i in part) for part in parts]
    return max(loads) / statistics.mean(loads)


def steps_of(runs):
    """By step, of those with sparse layers: the densities of these layers' heads."""
    steps = [[density for layers in zip(*(run["layers"][step] for run in runs)) for layer in layers if not layer["dense"]
              for density in layer["head_density"]] for step in range(runs[0]["steps"])]
    return [heads for heads in steps if heads]


def simulate(steps, ranks, shuffle):
    """Means over steps; heads in order: over ORDERS orders, since those of a trained model stand in none, and the worst of 20."""
    count = len(steps[0])
    share = count // ranks
    orders = [shuffle.sample(range(count), count) for _ in range(ORDERS)]
    by_order = [statistics.mean(wait([heads[i] for i in order], in_order(heads, ranks)) for heads in steps) for order in orders]
    return dict(ranks=ranks, heads_of_a_rank=share,
                in_order=statistics.mean(by_order), in_order_worst_of_20=sorted(by_order)[len(by_order) * 19 // 20],
                by_counts=statistics.mean(wait(heads, by_counts(heads, ranks, share)) for heads in steps),
                by_counts_of_the_step_before=statistics.mean(wait(heads, by_counts(before, ranks, share))
                                                             for before, heads in zip(steps, steps[1:])),
                by_counts_unequal_parts=statistics.mean(wait(heads, by_counts(heads, ranks, count)) for heads in steps))


def case_of(runs):
    """What runs with the same settings say."""
    steps = steps_of(runs)
    counts = [len(heads) for heads in steps]
    if not counts or len(set(counts)) > 1 or counts[0] % RANKS[-1]:
        parser.error(f"got {counts} heads of sparse layers by step, expected the same in all and a multiple of {RANKS[-1]}")
    every = sorted(density for heads in steps for density in heads)
    calls = [layer["head_density"] for run in runs for layers in run["layers"] for layer in layers if not layer["dense"]]
    return dict(settings=runs[0]["settings"], clips=[dict(example=run["example"], seed=run["seed"]) for run in runs],
                simulated=f"{counts[0]} heads: the sparse layers' of {len(runs)} clips, at each of {len(steps)} steps",
                density=statistics.mean(every), head_density=dict(least=every[0], median=statistics.median(every), most=every[-1]),
                own_calls=dict(calls=len(calls), ranks=len(calls[0]),
                               in_order=statistics.mean(max(heads) / statistics.mean(heads) for heads in calls)),
                rows=[simulate(steps, ranks, random.Random(ranks)) for ranks in RANKS])


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("runs", nargs="+", metavar="run.json", help="of `scope generate`, by one model and machine")
parser.add_argument("--json", help="write the figures here")
options = parser.parse_args()

runs, cases = [json.load(open(path, encoding="utf-8")) for path in options.runs], {}
same = "version", "model", "method", "grid", "steps", "compute", "machine"
for path, run in zip(options.runs, runs):
    for name in same:
        if run[name] != runs[0][name]:
            parser.error(f"{path}: its {name} is not that of {options.runs[0]}")
    if run["settings"]["rule"] == "target" or run["settings"]["target_density"] != "none" or run["settings"]["density_steps"] != "none":
        parser.error(f"{path}: each call solved for a rho of its own, expected runs at a given one (--set rho=0.8)")
    cases.setdefault(json.dumps(run["settings"], sort_keys=True), []).append(run)
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
result = dict(commit=commit, **{name: runs[0][name] for name in same}, orders=ORDERS, cases=[case_of(some) for some in cases.values()])
for case in result["cases"]:
    own = case["own_calls"]
    print(f"rho {case['settings']['rho']}, {case['simulated']}, density {case['density']:.3f}; the slowest rank / the mean:")
    print("ranks  in order  worst of 20 orders  by counts  by those of the step before  in unequal parts")
    for row in case["rows"]:
        print(f"{row['ranks']:5} {row['in_order']:9.3f} {row['in_order_worst_of_20']:19.3f} {row['by_counts']:10.3f} "
              f"{row['by_counts_of_the_step_before']:28.3f} {row['by_counts_unequal_parts']:17.3f}")
    print(f"the model's own calls, a rank for each of the {own['ranks']} heads: {own['in_order']:.3f}")
if options.json:
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
