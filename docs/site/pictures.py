"""Regenerates the pictures of the pages and the outputs of the notebook, for `make pictures`."""

import io
from pathlib import Path

import diagrams
import matplotlib.pyplot as plt
import nbclient
import nbformat

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs/tour.ipynb"


def zigzag(devices: int = 4) -> str:
    """An SVG of causal attention in a ring: who computes which chunks of the scores, in which turn,
    in both orders.
    """
    # the same file each time, with text as text
    plt.rcParams |= {"svg.hashsalt": "zigzag", "svg.fonttype": "none"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    colors, chunks = plt.get_cmap("Set2").colors, 2 * devices
    orders = {
        "L/c: neighbouring chunks": lambda chunk: chunk // 2,
        "Z/c: one chunk from either end": lambda chunk: min(chunk, chunks - 1 - chunk),
    }
    for ax, (title, device_of) in zip(axes, orders.items(), strict=True):
        work = [0.0] * devices
        for q in range(chunks):
            for k in range(q + 1):
                device, turn = device_of(q), (device_of(q) - device_of(k)) % devices
                work[device] += 0.5 if q == k else 1
                ax.add_patch(
                    plt.Rectangle((k, q), 1, 1, facecolor=colors[device], edgecolor="white")
                )
                ax.text(k + 0.5, q + 0.5, str(turn), ha="center", va="center")
        labels = [f"{chunk} · device {device_of(chunk)}" for chunk in range(chunks)]
        ax.set(
            xlim=(0, chunks), ylim=(chunks, 0), aspect="equal", xlabel="chunk of keys", title=title
        )
        ax.set_xticks([i + 0.5 for i in range(chunks)], range(chunks))
        ax.set_yticks([i + 0.5 for i in range(chunks)], labels)
        share = ", ".join(f"{x:g}" for x in work)
        ax.text(chunks - 0.1, 0.5, f"chunks of work on\neach device: {share}", ha="right", va="top")
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("chunk of queries")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()


def main() -> None:
    """Writes them."""
    diagrams.main()
    (ROOT / "docs/pictures/zigzag.svg").write_text(zigzag())
    notebook = nbformat.read(TOUR, as_version=4)
    nbclient.execute(
        notebook, cwd=str(TOUR.parent), timeout=300, kernel_name="python3", record_timing=False
    )
    nbformat.write(notebook, TOUR)


if __name__ == "__main__":
    main()
