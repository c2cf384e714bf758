"""What compression does to training: loss against steps, with and without error feedback.

    python docs/examples/compression_study.py --plot study.png

Trains the network of train_digits.py on four ranks, threads of this process, with every format,
with and without feedback, from several seeds; prints the final losses and draws the curves. Needs
``pip install scikit-learn``, and matplotlib for the plot.
"""

import argparse
import sys

import numpy as np
from train_digits import train

import pycomm
from pycomm.algorithms.compression import Cast, ErrorFeedback

RANKS = 4
STEPS = 14  # an epoch
#: Name in the table, and the codec; formats of 8 bits also without their scales.
CODECS = {
    "fp32": None,
    "fp16": Cast("fp16"),
    "bf16": Cast("bf16"),
    "fp8_e4m3": Cast("fp8_e4m3"),
    "fp8_e5m2": Cast("fp8_e5m2"),
    "fp8_e4m3, no scales": Cast("fp8_e4m3", block=0),
}


def losses(codec, feedback, seed, epochs):
    """Return the loss after each epoch."""

    def run(comm):
        found = []
        compression = ErrorFeedback(codec) if feedback else codec
        train(
            comm, epochs=epochs, seed=seed, compression=compression,
            report=lambda _, loss: found.append(loss),
        )  # fmt: skip
        return found

    return pycomm.run_local(RANKS, run)[0]


def study(seeds, epochs):
    """Return losses by name and feedback, an array of seeds by epochs each."""
    found = {}
    for name, codec in CODECS.items():
        for feedback in (False, True) if codec is not None else (False,):
            rows = [losses(codec, feedback, seed, epochs) for seed in range(seeds)]
            found[name, feedback] = np.array(rows)
    return found


def table(found):
    """Return lines with the final loss of each, and how far it is from that of float32."""
    plain = found["fp32", False][:, -1]
    lines = [f"{'format':<20} {'feedback':<9} {'final loss':>10} {'against fp32, worst seed':>26}"]
    for (name, feedback), rows in found.items():
        ratio = rows[:, -1] / plain - 1
        worst = ratio[np.abs(ratio).argmax()]
        said, loss = "yes" if feedback else "no", rows[:, -1].mean()
        lines.append(f"{name:<20} {said:<9} {loss:>10.5f} {worst:>+26.2%}")
    return lines


def draw(found, path):
    """Draw mean losses over the seeds, and how far they are from those of float32."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    plain = found["fp32", False]
    steps = STEPS * np.arange(1, plain.shape[1] + 1)
    for index, name in enumerate(CODECS):
        left.semilogy(steps, found[name, False].mean(axis=0), color=f"C{index}", label=name)
        for feedback, style in ((False, "--"), (True, "-")):
            if name != "fp32":
                away = np.abs(found[name, feedback] / plain - 1).max(axis=0)
                right.semilogy(steps, 100 * away, style, color=f"C{index}")
    left.set_title("without error feedback")
    left.set_ylabel("training loss")
    left.legend()
    right.set_title("dashed without, solid with error feedback")
    right.set_ylabel("away from float32's loss, worst seed (%)")
    for side in (left, right):
        side.set_xlabel("steps")
        side.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)


def main():
    """Read the command line, train, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    found = study(options.seeds, options.epochs)
    print(*table(found), sep="\n")
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    sys.exit(main())
