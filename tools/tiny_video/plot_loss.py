"""Draws the loss curve of a training log: python plot_loss.py runs/main/log.csv loss.png (needs matplotlib)."""

import csv
import sys

import matplotlib.pyplot as plt

NAMES = {2080: "13x10x16", 8320: "13x20x32", 23040: "16x30x48", 75600: "21x45x80"}
curves = {}
for row in csv.DictReader(open(sys.argv[1])):
    curves.setdefault(int(row["tokens"]), []).append((float(row["seconds"]) / 60, float(row["loss"])))
figure, axes = plt.subplots(figsize=(8, 4.5))
for tokens, points in sorted(curves.items()):
    smooth, value = [], points[0][1]
    for _, loss in points:
        value += 0.3 * (loss - value)
        smooth.append(value)
    axes.plot([t for t, _ in points], smooth, label=NAMES.get(tokens, f"{tokens} tokens"))
axes.set(yscale="log", xlabel="minutes trained", ylabel="flow-matching loss (smoothed)")
axes.grid(alpha=0.3, which="both")
axes.legend()
figure.tight_layout()
figure.savefig(sys.argv[2], dpi=110)
