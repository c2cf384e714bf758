"""Data-parallel training: a network of two layers learns to read digits, in NumPy alone.

    python docs/examples/train_digits.py                       # alone
    pycomm run -n 4 docs/examples/train_digits.py --epochs 20  # the same on four ranks
    pycomm run -n 4 docs/examples/train_digits.py --compression bf16 --error-feedback

Every rank holds all weights and works on its share of each batch; the gradients are averaged over
the ranks, so that all of them take the same step. The result is that of one process, up to the
rounding of float32, for any number of ranks, also one that does not divide the batch. Compression
rounds gradients for the wire; with error feedback what is lost in one step is added in the next.

The data (1,797 pictures of 8 x 8) comes with scikit-learn: ``pip install scikit-learn``.
"""

import argparse
import sys

import numpy as np
from sklearn.datasets import load_digits

import pycomm
from pycomm.algorithms.compression import ErrorFeedback

PIXELS, HIDDEN, DIGITS = 64, 48, 10
TRAINING = 1400  # pictures to learn from; the others are for the test


class Network:
    """Two layers whose weights are views of one flat array: one call moves them all."""

    def __init__(self, flat):
        self.flat = flat
        first, second = PIXELS * HIDDEN, HIDDEN * DIGITS
        ends = np.cumsum([first, HIDDEN, second])
        w1, self.b1, w2, self.b2 = np.split(flat, ends)
        self.w1, self.w2 = w1.reshape(PIXELS, HIDDEN), w2.reshape(HIDDEN, DIGITS)

    @classmethod
    def random(cls, rng):
        """Return a network with random weights and no bias."""
        network = cls(np.zeros((PIXELS + 1) * HIDDEN + (HIDDEN + 1) * DIGITS, np.float32))
        network.w1[:] = rng.normal(0, PIXELS**-0.5, network.w1.shape)
        network.w2[:] = rng.normal(0, HIDDEN**-0.5, network.w2.shape)
        return network

    def forward(self, images):
        """Return the hidden layer and the logarithms of the probabilities of each digit."""
        hidden = np.tanh(images @ self.w1 + self.b1)
        scores = hidden @ self.w2 + self.b2
        scores -= scores.max(axis=1, keepdims=True)
        return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    def loss_and_gradient(self, images, labels):
        """Return the loss summed over `images` and its gradient, as flat as the weights."""
        hidden, logs = self.forward(images)
        rows = np.arange(len(labels))
        error = np.exp(logs)  # d loss / d scores = probabilities - one at the right digit
        error[rows, labels] -= 1
        back = (error @ self.w2.T) * (1 - hidden**2)
        parts = [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        return -logs[rows, labels].sum(), np.concatenate([part.ravel() for part in parts])


def train(
    comm, epochs=30, batch=100, rate=0.2, momentum=0.9, seed=0, report=None, compression=None
):
    """Train on the ranks of `comm`; return the flat weights and the accuracy on the test pictures.

    `report(epoch, loss)` is called after each epoch on rank 0. `compression` is that of the
    gradient: a name, or a codec of this rank.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rng = np.random.default_rng(seed)  # the same on every rank: all shuffle alike
    order = rng.permutation(len(images))
    training, test = order[:TRAINING], order[TRAINING:]

    # Equal seeds would do here; a broadcast also holds for weights that come from a file.
    network = Network.random(rng)
    comm.broadcast(network.flat, root=0)
    velocity = np.zeros_like(network.flat)

    for epoch in range(epochs):
        order = rng.permutation(training)
        epoch_loss = np.zeros(1, np.float32)
        for start in range(0, len(order), batch):
            whole = order[start : start + batch]
            mine = whole[comm.rank :: comm.size]
            loss, gradient = network.loss_and_gradient(images[mine], labels[mine])
            # The mean over the batch is wanted. Shares differ when the ranks do not divide it, so
            # a mean over each share would weigh pictures differently. Each rank divides its *sum*
            # by the same number, the fair share, and the average over ranks is exactly
            # sum / len(whole).
            gradient /= np.float32(len(whole) / comm.size)
            comm.all_reduce(gradient, op="avg", compression=compression, key="gradient")
            velocity = momentum * velocity - rate * gradient
            network.flat += velocity
            epoch_loss += loss
        comm.all_reduce(epoch_loss, op="sum")
        if report is not None and comm.rank == 0:
            report(epoch, float(epoch_loss[0]) / len(order))

    mine = test[comm.rank :: comm.size]
    right = np.array([(network.forward(images[mine])[1].argmax(axis=1) == labels[mine]).sum()])
    comm.all_reduce(right, op="sum")
    return network.flat, float(right[0]) / len(test)


def main():
    """Read the command line, train, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=100, help="pictures a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    formats = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
    parser.add_argument("--compression", choices=formats, help="what gradients are sent as")
    parser.add_argument("--error-feedback", action="store_true")
    options = parser.parse_args()
    compression = options.compression
    if options.error_feedback:
        if compression is None:
            parser.error("--error-feedback is for --compression")
        compression = ErrorFeedback(compression)

    def report(epoch, loss):
        print(f"epoch {epoch + 1:3}  loss {loss:.4f}", flush=True)

    with pycomm.init() as comm:
        _, accuracy = train(
            comm, epochs=options.epochs, batch=options.batch, seed=options.seed, report=report,
            compression=compression,
        )  # fmt: skip
        if comm.rank == 0:
            print(f"accuracy on {comm.size} ranks: {accuracy:.3f}")


if __name__ == "__main__":
    sys.exit(main())
