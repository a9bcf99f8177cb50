# SPDX-License-Identifier: Apache-2.0
"""Where the time of a top-k goes: the device clock of one thread a row between the steps, in the last call of a graph.

    python -m benchmarks.topk_stamps

The kernel is the one that `decode_topk` launches for the buffer's size, compiled with clock readings, which then
replace the first selected indices. The first column is the wait for the kernel before.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import torch

from decode.arguments import num_sms
from decode.topk import launch
from decode.topk_config import choose_config
from decode.topk_select import NUM_STAMPS

STEPS = ("start", "length", "stream", "threshold", "bracket", "harvest", "counts sent", "k-th key", "output")
CELLS = "1x65536,6x262144,1x1048576,24x65536,24x1048576,48x65536,48x524288,64x1048576"
CALLS = 10


def readings(rows: int, columns: int, k: int) -> torch.Tensor:
    """(rows, NUM_STAMPS) clock readings of the last of ten calls in a graph."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = dataclasses.replace(choose_config(rows, columns, k, num_sms=num_sms(device)), stamps=True)
    logits = torch.randn(rows, columns, device="cuda").to(torch.bfloat16)
    lengths = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    launch(config, logits, lengths, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for _ in range(CALLS):
            launch(config, logits, lengths, out)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
    return out[:, :NUM_STAMPS].cpu().to(torch.int64) & 0xFFFFFFFF


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--k", type=int, default=512)
    made.add_argument("--cells", default=CELLS, help="rows x columns, comma-separated")
    made.add_argument("--clock-mhz", type=float, default=1980.0, help="to turn cycles into ns")
    return made


def main() -> None:
    """Prints the table."""
    args = parser().parse_args()
    sys.stdout.write(f"# {torch.cuda.get_device_name()}, k={args.k}, ns, median over rows\n")
    sys.stdout.write("# rows x columns | " + " | ".join(STEPS) + "\n")
    for cell in args.cells.split(","):
        rows, columns = (int(part) for part in cell.split("x"))
        stamps = readings(rows, columns, args.k)
        cycles = (stamps[:, 1:] - stamps[:, :-1]) & 0xFFFFFFFF
        medians = (cycles.double().median(dim=0).values * 1e3 / args.clock_mhz).tolist()
        sys.stdout.write(f"{cell} | " + " | ".join(f"{ns:.0f}" for ns in medians) + "\n")


if __name__ == "__main__":
    main()
