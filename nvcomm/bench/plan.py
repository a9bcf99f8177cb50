# SPDX-License-Identifier: Apache-2.0
"""What to measure: the command line of `nvcomm bench`, with the names and letters of nccl-tests where it has them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nvcomm.mailbox import MAX_WORLD_SIZE

Op = Literal["all_gather", "all_reduce", "reduce_scatter", "all_reduce_mhc"]
World = Literal["host", "virtual", "peer"]

OPS: tuple[Op, ...] = ("all_gather", "all_reduce", "reduce_scatter", "all_reduce_mhc")
# nccl-tests' names -> torch's.
DATATYPES = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
}
DEFAULT_RANKS = 4
CONTENDERS = ("installed", "torch", "nccl", "symm_mem", "ll", "two_shot")
REDUCED = ("half", "bfloat16", "float")

EPILOG = """\
size is what nccl-tests calls so: for all_gather what a rank ends up with, for the others what it contributes.
exit codes: 0 ok; 1 wrong data, or slower than --floor; 2 usage; 77 this machine cannot do it; 124 a rank did not come.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments.

    Attributes:
        op: the collective.
        world: where the ranks live.
        ranks: number of them; None: what the launcher started, else 4.
        sizes: bytes, ascending, in the sense of nccl-tests.
        datatype: one of `DATATYPES`.
        iters: host: timed calls, one sample each. GPU: calls of a graph.
        warmup_iters: calls, or replays, that are not counted.
        cudagraph: replays of the graph, one sample each; 0 in the host world, which has none.
        check: whether data is checked before and after the timing.
        timeout_s: seconds until a run that hangs is ended.
        against: what else to measure in the same run, of `CONTENDERS`.
        vllm_library: vLLM's all-reduce, to be measured too; see `nvcomm.bench.vllm_kernels`.
        floor_us: most that the median may be, at every size; None: no bound.
        protocol: "late-copy" is a known-bad gather; whether its check meets a stale word is a matter of timing.
        pdl, device_share: see `nvcomm.Communicator`.
        json, csv, markdown, plot: where to write; "-": stdout, for JSON and CSV.
        raw: whether the JSON holds every sample.
    """

    op: Op
    world: World
    ranks: int | None
    sizes: tuple[int, ...]
    datatype: str
    iters: int
    warmup_iters: int
    cudagraph: int
    check: bool
    timeout_s: float
    against: tuple[str, ...]
    vllm_library: str | None
    floor_us: float | None
    protocol: Literal["mailbox", "late-copy"]
    pdl: Literal["safe", "off", "early"]
    device_share: float
    json: str | None
    csv: str | None
    markdown: str | None
    plot: str | None
    raw: bool

    @property
    def reduce_op(self) -> Literal["all_reduce", "reduce_scatter"] | None:
        """The sum that has to be prepared."""
        if self.op == "all_gather":
            return None
        return "reduce_scatter" if self.op == "reduce_scatter" else "all_reduce"

    @property
    def quiet(self) -> bool:
        """Whether stdout belongs to a program that reads it."""
        return "-" in (self.json, self.csv)


def parse(argv: Sequence[str] | None = None) -> Plan:
    """Parses; ends the process with 2 on a usage error, as argparse does."""
    parser = _parser()
    given = parser.parse_args(argv)
    host = given.world == "host"
    iters = given.iters if given.iters is not None else (1000 if host else 200)
    cudagraph = given.cudagraph if given.cudagraph is not None else (0 if host else 200)
    if host and cudagraph:
        parser.error("--cudagraph: the host world has no graphs; leave it out, or take --world virtual or peer")
    if not host and cudagraph < 1:
        parser.error("--cudagraph: GPU worlds are measured inside graphs; wanted 1 or more")
    datatype = given.datatype or ("bfloat16" if given.op == "all_reduce_mhc" else "float")
    if given.op != "all_gather" and datatype not in REDUCED:
        parser.error(f"--datatype {datatype}: {given.op} adds {', '.join(REDUCED)}")
    if given.op != "all_gather" and given.protocol != "mailbox":
        parser.error(f"--protocol {given.protocol} is an all_gather")
    if (given.json, given.csv, given.markdown).count("-") > 1:
        parser.error("of --json -, --csv - and --markdown - one can have stdout; give the others a path")
    if given.world == "virtual" and given.against:
        parser.error("--against: torch.distributed wants a process a rank; take --world host or peer")
    if host and {"nccl", "symm_mem"} & set(given.against):
        parser.error("--against nccl or symm_mem moves GPU memory; in the host world take --against torch (gloo)")
    if not given.op.startswith("all_reduce") and {"ll", "two_shot"} & set(given.against):
        parser.error("--against ll or two_shot: they are protocols of all_reduce")
    if given.vllm_library and (given.world != "peer" or datatype != "bfloat16" or "all_reduce" not in given.op):
        parser.error("--vllm-library wants an all-reduce of bfloat16 in --world peer")
    if given.op == "all_reduce_mhc" and given.world == "virtual":
        parser.error(
            "all_reduce_mhc is measured in --world host or peer; `python -m benchmarks.all_reduce` has virtual"
        )
    if given.op == "all_reduce_mhc" and datatype != "bfloat16":
        parser.error(f"--datatype {datatype}: all_reduce_mhc takes bfloat16")
    if given.minbytes > given.maxbytes:
        parser.error(f"--minbytes {given.minbytes} is more than --maxbytes {given.maxbytes}")
    return Plan(
        op=given.op,
        world=given.world,
        ranks=given.ranks,
        sizes=sweep(given.minbytes, given.maxbytes, given.stepfactor, given.stepbytes),
        datatype=datatype,
        iters=iters,
        warmup_iters=given.warmup_iters,
        cudagraph=cudagraph,
        check=bool(given.check),
        timeout_s=given.timeout,
        against=given.against,
        vllm_library=given.vllm_library,
        floor_us=given.floor,
        protocol=given.protocol,
        pdl=given.pdl,
        device_share=given.device_share,
        json=given.json,
        csv=given.csv,
        markdown=given.markdown,
        plot=given.plot,
        raw=given.raw,
    )


def sweep(least: int, most: int, factor: float, step: int | None) -> tuple[int, ...]:
    """The sizes from `least` to `most`: times `factor`, or plus `step` where given; no size twice."""
    sizes, size = [], least
    while size <= most:
        sizes.append(size)
        size = size + step if step is not None else max(size + 1, int(size * factor))
    return tuple(sizes)


def size_of(text: str) -> int:
    """Bytes of "64", "4K", "1M" or "1G"; raises argparse's error for anything else."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; wanted a number above 0, with K, M or G or without")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def _at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            wanted = f"{least} or more" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text}")
        return value

    return number


def _above(least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least < value < 1e9:
            raise argparse.ArgumentTypeError(f"wanted more than {least:g}, got {text}")
        return value

    return number


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in CONTENDERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CONTENDERS)}")
    return names


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"wanted above 0 and at most 1, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nvcomm bench",
        description="Latency of a collective, size by size, with the data checked before and after.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("op", choices=OPS)
    add(
        "--world",
        choices=("host", "virtual", "peer"),
        required=True,
        help="host: CPU processes. virtual: all ranks on this GPU. peer: a process a rank, each with a GPU or a share",
    )
    add(
        "--ranks",
        type=_at_least(1, MAX_WORLD_SIZE),
        help="default: what torchrun or mpiexec started, else 4, started by this command",
    )
    add("-b", "--minbytes", type=size_of, default=64, help="default 64")
    add("-e", "--maxbytes", type=size_of, default=1 << 20, help="default 1M")
    add("-f", "--stepfactor", type=_above(1), default=4.0, help="from size to size; default 4")
    add("-i", "--stepbytes", type=_at_least(1), help="add instead of multiply")
    add("-d", "--datatype", choices=DATATYPES, help="default float; all_reduce_mhc: bfloat16")
    add("-n", "--iters", type=_at_least(1), help="host: timed calls; GPU: calls of a graph. Default 1000; 200")
    add("-w", "--warmup_iters", type=_at_least(0), default=20, help="not counted; default 20")
    add("-G", "--cudagraph", type=_at_least(0), help="replays of the graph, a sample each; default 200 on GPUs")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="check the data; default 1")
    add("--no-check", dest="check", action="store_const", const=0, help="the same as --check 0")
    add(
        "-T", "--timeout", type=_above(0), default=300.0, help="end a run that hangs after so many seconds; default 300"
    )
    add(
        "--against",
        type=_names,
        default=(),
        metavar="NAME,...",
        help="measure these too: installed (what this machine has), torch (gloo or NCCL), nccl, symm_mem (PyTorch's), "
        "ll, two_shot (our protocols)",
    )
    add(
        "--vllm-library",
        metavar="SO",
        help="measure vLLM's custom all-reduce too: benchmarks/vllm_all_reduce.cu, built",
    )
    add("--pdl", choices=("safe", "off", "early"), default="safe", help="how our kernels follow each other")
    add("--device-share", type=_share, default=0.5, metavar="PART", help="of a GPU for our kernels; default 0.5")
    add("--floor", type=_above(0), metavar="US", help="exit 1 if the median of any size is above so many microseconds")
    add(
        "--protocol",
        choices=("mailbox", "late-copy"),
        default="mailbox",
        help="late-copy is wrong, which the check may see",
    )
    add("-J", "--json", metavar="PATH", help="everything, as JSON; -: to stdout, and only that")
    add("--csv", metavar="PATH", help="the table, as CSV; -: to stdout, and only that")
    add("--markdown", metavar="PATH", help="the medians, as a Markdown table with a column for each")
    add("--plot", metavar="PATH", help="latency against size, in the format of the suffix; needs matplotlib")
    add("--raw", action="store_true", help="every sample into the JSON")
    return parser
