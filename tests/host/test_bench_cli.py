# SPDX-License-Identifier: Apache-2.0
"""`nvcomm bench`: its arguments, its arithmetic, that it sees wrong data, and whole runs in the host world."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvcomm.bench import against, report
from nvcomm.bench import rank as one_rank
from nvcomm.bench.case import Case
from nvcomm.bench.cli import main
from nvcomm.bench.plan import DATATYPES, OPS, REDUCED, parse, size_of, sweep
from nvcomm.bench.rank import cases_of
from nvcomm.bench.result import Result
from nvcomm.bench.vllm_kernels import vllm_contender
from nvcomm.errors import UnsupportedError

ROOT = Path(__file__).parents[2]


# All but the boundary, which has tests of its own.
PLAIN = OPS[:-1]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run(*arguments, launcher=(sys.executable,)):
    command = [*launcher, "-m", "nvcomm", "bench", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


def plan(*arguments):
    return parse(["all_gather", "--world", "host", *arguments])


def test_names_and_letters_of_nccl_tests():
    short = "all_reduce --world host -b 8 -e 1K -f 2 -n 30 -w 3 -c 0 -T 60 -d half -J out.json"
    long = (
        "all_reduce --world host --minbytes 8 --maxbytes 1K --stepfactor 2 --iters 30 --warmup_iters 3 --check 0 "
        "--timeout 60 --datatype half --json out.json"
    )
    short, long = parse(short.split()), parse(long.split())
    assert short == long
    assert short.sizes == (8, 16, 32, 64, 128, 256, 512, 1024)
    assert (short.iters, short.warmup_iters, short.check, short.timeout_s) == (30, 3, False, 60.0)
    assert parse(["all_gather", "--world", "virtual", "-G", "7"]).cudagraph == 7
    assert plan("--no-check").check is False
    assert plan().check is True


def test_sizes():
    assert [size_of(text) for text in ("64", "4K", "1m", "2GB")] == [64, 4096, 1 << 20, 2 << 30]
    assert sweep(100, 400, 2, None) == (100, 200, 400)
    assert sweep(100, 400, 2, 100) == (100, 200, 300, 400)
    assert sweep(1, 5, 1.1, None) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "arguments",
    [
        "all_gather",
        "broadcast --world host",
        "all_gather --world moon",
        "all_gather --world host -b 0",
        "all_gather --world host -b 1X",
        "all_gather --world host -b 2K -e 1K",
        "all_gather --world host --ranks 0",
        "all_gather --world host --ranks 9",
        "all_gather --world host --cudagraph 5",
        "all_gather --world virtual --cudagraph 0",
        "all_gather --world virtual --against torch",
        "all_gather --world host --against nccl",
        "all_gather --world host --against torch,ncll",
        "all_gather --world host --against ll",
        "all_gather --world host --device-share 0",
        "all_gather --world host --json - --csv -",
        "all_gather --world host --json - --markdown -",
        "all_gather --world host --floor -1",
        "all_gather --world host -f 1",
        "all_reduce --world host --datatype int32",
        "all_reduce --world host --protocol late-copy",
        "all_reduce_mhc --world virtual",
        "all_reduce --world host --vllm-library x.so",
        "all_reduce --world peer --vllm-library x.so",
        "all_gather --world peer -d bfloat16 --vllm-library x.so",
        "all_reduce_mhc --world host --datatype half",
    ],
)
def test_wrong_use_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        parse(arguments.split())
    assert raised.value.code == 2
    assert "usage: nvcomm bench" in capsys.readouterr().err


def test_size_and_count_are_those_of_nccl_tests():
    assert Case.of_size("all_gather", "float", 4, 1024) == Case("all_gather", "float", 4, 64)
    assert Case.of_size("all_reduce", "half", 4, 1024).count == 512
    case = Case.of_size("reduce_scatter", "float", 4, 1024)
    assert (case.count, case.input_count, case.size_bytes) == (64, 256, 1024)
    assert Case.of_size("all_gather", "double", 4, 1).size_bytes == 32
    assert [Case.of_size(op, "float", 4, 64).bus_factor for op in OPS] == [0.75, 1.5, 0.75, 1.5]
    assert len(cases_of(plan("-b", "1", "-e", "64", "-f", "2"), 4)) == 3  # of seven sizes, most are one element a rank


def test_the_small_calls_of_a_check_are_whole_chunks_where_the_large_ones_are():
    thirds = [Case("all_reduce", "bfloat16", 2, count).third().count for count in (1, 2, 8, 64, 7, 4096)]
    assert thirds == [1, 1, 8, 16, 2, 1360]


def test_percentiles_are_samples():
    result = Result(Case("all_gather", "float", 4, 1000), "nvcomm", [float(n) for n in range(1000, 0, -1)], 0)
    fields = result.fields()
    assert [fields[f"{name}_us"] for name in ("p50", "p95", "p99", "p99.9", "max")] == [500, 950, 990, 999, 1000]
    assert math.isclose(fields["algbw_gbps"], 16000 / 500 / 1e3)
    assert math.isclose(fields["busbw_gbps"], fields["algbw_gbps"] * 0.75)
    assert Result(result.case, "nvcomm", [7.0], 0).fields()["p99.9_us"] == 7.0
    assert {Result(result.case, "nvcomm", [], 3).fields()[f"{name}_us"] for name in ("p50", "max")} == {None}


def right(case, rank, turn):
    """By plain torch, as a rank would get it."""
    inputs = [case.input(each, turn) for each in range(case.world_size)]
    if case.op == "all_gather":
        return torch.stack(inputs)
    total = sum(x.double() for x in inputs).to(case.dtype)
    return total if case.op == "all_reduce" else total.tensor_split(case.world_size)[rank]


@pytest.mark.parametrize("op", PLAIN)
def test_one_wrong_element_is_seen(op):
    for datatype in DATATYPES if op == "all_gather" else REDUCED:
        for count in (1, 3, 37):
            case = Case(op, datatype, 3, count)
            for rank in range(3):
                out = right(case, rank, turn=5)
                assert case.count_wrong(out, rank, 5) == 0
                assert case.count_wrong(case.output(torch.device("cpu")), rank, 5) > 0
                flat = out.view(-1).view(torch.uint8)
                flat[-1] ^= 0x40
                assert case.count_wrong(out, rank, 5) == 1
            stale = right(case, 0, turn=4)
            assert count < 37 or case.count_wrong(stale, 0, 5) > count // 2


def test_a_boundary_rounds_to_whole_rows_and_a_wrong_element_is_seen():
    case = Case.of_size("all_reduce_mhc", "bfloat16", 2, 3 * 10_240 + 9)
    assert (case.count, case.size_bytes, case.third().count) == (3 * 5120, 30_720, 5120)
    assert Case.of_size("all_reduce_mhc", "bfloat16", 2, 16).count == 5120
    right_result = case.expected(1, turn=3)
    assert right_result.numel() == case.output(torch.device("cpu")).numel()
    assert case.count_wrong(right_result, 1, 3) == 0
    for place in (0, right_result.numel() // 2, -1):  # of a residual stream, and of h
        wrong = right_result.clone()
        wrong[place] += 0.1 * wrong.abs().max()
        assert case.count_wrong(wrong, 1, 3) == 1
    assert case.count_wrong(case.expected(1, turn=2), 1, 3) > right_result.numel() // 2


def test_the_boundary_beside_all_reduces_with_the_rest_behind_them():
    done = run(
        *("all_reduce_mhc", "--world", "host", "--ranks", 2, "-b", "10K", "-e", "20K", "-f", 2, "-n", 3, "-w", 0),
        *("--against", "torch,two_shot", "--json", "-"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    impls = ("nvcomm", "torch/gloo+post", "nvcomm/two_shot+post")
    assert [(row["size_bytes"], row["impl"], row["wrong"]) for row in rows] == [
        (size, impl, 0) for size in (10_240, 20_480) for impl in impls
    ]


def test_a_run_that_a_program_reads(tmp_path):
    """Two ranks against gloo: JSON on stdout, CSV in a file, every sample."""
    done = run(
        *("all_gather", "--world", "host", "--ranks", 2, "-b", 64, "-e", "1K", "-n", 40, "-w", 2, "-d", "bfloat16"),
        *("--against", "installed", "--json", "-", "--csv", tmp_path / "out.csv", "--raw", "--floor", 1e8),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["schema"], told["op"], told["world"], told["ranks"]) == ("nvcomm.bench/1", "all_gather", "host", 2)
    assert (told["checked"], told["exit_code"], told["slower_than_floor"]) == (True, 0, [])
    assert told["command"][:3] == ["nvcomm", "bench", "all_gather"]
    assert told["doctor"]["schema"] == "nvcomm.doctor/1"
    assert [(row["size_bytes"], row["impl"]) for row in told["results"]] == [
        (size, impl) for size in (64, 256, 1024) for impl in ("nvcomm", "torch/gloo")
    ]
    for row in told["results"]:
        assert (row["samples"], len(row["raw_us"]), row["wrong"], row["datatype"]) == (40, 40, 0, "bfloat16")
        assert 0 < row["p50_us"] <= row["p95_us"] <= row["p99_us"] <= row["p99.9_us"] <= row["max_us"]
        assert row["max_us"] == max(row["raw_us"])
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [float(row["p50_us"]) for row in rows] == [row["p50_us"] for row in told["results"]]


def test_a_run_under_torchrun():
    done = run(
        # So large that the bandwidth's three decimals are not all 0 however busy the machine.
        *("all_gather", "--world", "host", "-b", "1M", "-e", "1M", "-n", 20),
        launcher=(*TORCHRUN, "2"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# nvcomm")
    assert "2 ranks" in lines[0]
    (row,) = [line.split() for line in lines if not line.startswith("#")]
    assert row[:5] == ["1048576", "131072", "float", "none", "nvcomm"]
    assert all(float(cell) > 0 for cell in row[5:12]), row
    assert row[12] == "0"


def test_each_protocol_beside_the_choice_of_them(tmp_path):
    """As a Markdown table: a row for each size, a column for each."""
    table = tmp_path / "table.md"
    done = run(
        *("all_reduce", "--world", "host", "--ranks", 2, "-b", "1K", "-e", "4K", "-n", 20, "-w", 2, "-d", "bfloat16"),
        *("--against", "torch,ll,two_shot", "--markdown", table),
    )
    assert done.returncode == 0, done.stderr
    lines = table.read_text().splitlines()
    assert lines[0] == "| bytes | nvcomm | torch/gloo | nvcomm/ll | nvcomm/two_shot |"
    assert [line.split(" ")[1] for line in lines[2:]] == ["1024", "4096"]
    assert all(float(cell) > 0 for line in lines[2:] for cell in line.split("|")[2:-1])


def test_what_a_contender_refuses_is_said(capsys):
    made = report.Report(plan(), ["all_gather"], 2, "a test")
    made.add(Result(Case("all_gather", "float", 2, 1), "nvcomm", [2.0], 0))
    made.add(Result(Case("all_gather", "float", 2, 1), "symm_mem/copies", [], None, refused="too small"))
    assert made.finish() == 0
    assert "# NOT MEASURED: symm_mem/copies: too small" in capsys.readouterr().out


def test_a_contender_that_raises_is_refused_and_ours_is_not():
    def raises(x, out):
        raise RuntimeError("not this size\nand more")

    case, group = Case("all_gather", "float", 1, 4), SimpleNamespace()
    comm = SimpleNamespace(rank=0, device=torch.device("cpu"))
    row = one_rank._row_or_refusal(plan(), group, comm, case, one_rank.Contender("theirs", raises, raises))
    assert (row.samples_us, row.wrong, row.refused) == ([], None, "not this size")
    with pytest.raises(RuntimeError, match="not this size"):
        one_rank._row_or_refusal(plan(), group, comm, case, one_rank.Contender("nvcomm", raises, raises))


@pytest.mark.parametrize(
    ("op", "gpus", "names"),
    [
        ("all_gather", 4, ("nccl", "symm_mem", "ll")),
        ("all_reduce", 2, ("symm_mem", "ll")),
        ("reduce_scatter", 4, ("nccl", "ll")),
        ("reduce_scatter", 1, ("ll",)),
    ],
)
def test_what_is_installed_depends_on_the_machine(monkeypatch, op, gpus, names):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    chosen = SimpleNamespace(op=op, against=("installed", "ll"))
    assert against.named(chosen, 4, torch.device("cuda:0")) == names
    assert against.named(chosen, 4, torch.device("cpu")) == ("torch", "ll")
    assert against.named(SimpleNamespace(op=op, against=("torch",)), 4, torch.device("cpu")) == ("torch",)


def test_a_library_that_is_not_there(tmp_path):
    chosen = parse(["all_reduce", "--world", "peer", "-d", "bfloat16", "--vllm-library", str(tmp_path / "none.so")])
    with pytest.raises(UnsupportedError, match="none.so"):
        vllm_contender(chosen, SimpleNamespace(), torch.device("cuda:0"), 64)


def test_a_run_under_mpi():
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py and mpiexec (the extra `mpi`, and an MPI)")
    done = run(
        *("reduce_scatter", "--world", "host", "-b", 256, "-e", 256, "-n", 10, "--csv", "-"),
        launcher=(mpiexec, "-n", "2", sys.executable),
    )
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert (row["count"], row["redop"], row["wrong"], row["samples"]) == ("32", "sum", "0", "10")


def test_a_run_that_is_not_done_in_time_exits_124():
    done = run("all_gather", "--world", "host", "--ranks", 2, "-n", 10**9, "--timeout", 1)
    assert done.returncode == 124, done.stderr
    assert "not done after 1 s" in done.stderr


def test_a_table_that_nobody_reads_any_more_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "nvcomm", "bench", "all_gather", "--world", "host", "--ranks", "2", "-n", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=240, check=False
    )
    os.close(write)
    assert done.returncode == 141, done.stderr
    assert done.stderr == ""


def test_ranks_that_contradict_the_launcher(monkeypatch, capsys):
    @contextlib.contextmanager
    def launched(timeout_s):
        yield SimpleNamespace(rank=0, world_size=1), torch.device("cpu")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("nvcomm.launch.launched", launched)
    with pytest.raises(SystemExit) as raised:
        main(["all_gather", "--world", "host", "--ranks", "3"])
    assert raised.value.code == 2
    assert "--ranks 3: the launcher started 1" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_that_cannot(capsys):
    assert main(["all_gather", "--world", "virtual", "--timeout", "5"]) == 77
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("op", PLAIN)
def test_the_virtual_world(op, capsys):
    assert main([op, "--world", "virtual", "--ranks", "2", "-e", "1K", "-n", "10", "-G", "5", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["wrong"] for row in told["results"]] == [0] * 3
    assert all(row["samples"] == 5 and 0 < row["p50_us"] < 1000 for row in told["results"])


@pytest.mark.gpu
def test_the_peer_world():
    done = run("all_reduce", "--world", "peer", "--ranks", 2, "-e", "1K", "-n", 10, "-G", 5, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert [row["wrong"] for row in json.loads(done.stdout)["results"]] == [0] * 3
