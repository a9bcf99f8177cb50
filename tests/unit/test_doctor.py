# SPDX-License-Identifier: Apache-2.0
"""The doctor: works with everything broken, creates nothing, and says of a stood-in driver what it should."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nvcomm.__main__
from nvcomm import doctor, doctor_gpu, doctor_packages, doctor_rows, doctor_system
from nvcomm.doctor_cuda import ATTRIBUTES
from nvcomm.doctor_rows import Row

ROOT = Path(__file__).parents[2]

# A driver and an NVML of two GPUs; the environment says how they misbehave.
LIBCUDA = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int knob(const char *name, int usual) { const char *v = getenv(name); return v ? atoi(v) : usual; }
int cuInit(unsigned flags) {
    if (knob("FAKE_HANG", 0)) sleep(60);
    if (knob("FAKE_CRASH", 0)) abort();
    return knob("FAKE_INIT", 0);
}
int cuDriverGetVersion(int *v) { *v = knob("FAKE_CUDA", 13000); return 0; }
int cuDeviceGetCount(int *n) { *n = knob("FAKE_GPUS", 2); return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "GPU of a test", n); return 0; }
int cuDeviceGetUuid(unsigned char *u, int d) { memset(u, d + 1, 16); return 0; }
int cuDeviceTotalMem_v2(size_t *b, int d) { *b = 1ull << 37; return 0; }
int cuDeviceCanAccessPeer(int *can, int d, int p) { *can = knob("FAKE_P2P", 1); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    switch (a) {
    case 75: *v = knob("FAKE_MAJOR", 9); return 0;
    case 76: *v = 0; return 0;
    case 16: *v = 132; return 0;
    case 20: *v = knob("FAKE_MODE", 0); return 0;
    case 132: *v = knob("FAKE_MULTICAST", 1); return 0;
    case 38: *v = 1 << 20; return 0;
    case 102: case 103: *v = knob("FAKE_VMM", 1); return 0;
    case 128: *v = 0; return 0;
    }
    return 1;
}
"""
LIBNVML = r"""
#include <stdlib.h>
#include <string.h>
static int knob(const char *name, int usual) { const char *v = getenv(name); return v ? atoi(v) : usual; }
typedef struct { unsigned char uuid[16]; int status; unsigned clique; unsigned char state; } fabric_t;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.0.1", n); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **h) {
    *h = (void *)(strcmp(uuid, "GPU-01010101-0101-0101-0101-010101010101") == 0 ? 1l : 2l);
    return 0;
}
int nvmlDeviceGetNvLinkState(void *h, unsigned link, int *up) { *up = link < knob("FAKE_LINKS", 18); return 0; }
int nvmlDeviceGetGpuFabricInfo(void *h, fabric_t *f) { f->state = knob("FAKE_FABRIC", 3); f->status = 0; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) { *now = knob("FAKE_MIG", 0); return 0; }
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a stand-in for the driver needs a C compiler")
    folder = tmp_path_factory.mktemp("lib")
    for name, source in {"libcuda.so.1": LIBCUDA, "libnvidia-ml.so.1": LIBNVML}.items():
        command = [compiler, "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(folder / name)]
        subprocess.run(command, input=source, text=True, check=True)
    return folder


@pytest.fixture
def gpu_rows(libraries, monkeypatch):
    """A function: the rows of area "gpu" by name, with the driver's knobs set."""

    def rows(**knobs):
        monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
        for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in knobs.items():
            monkeypatch.setenv(f"FAKE_{name}" if name.isupper() and "_" not in name else name, str(value))
        return {row["name"]: row for row in doctor.report(quick=True)["rows"] if row["area"] == "gpu"}

    return rows


def test_the_report_of_this_machine(capsys, tmp_path):
    before = {path: sorted(path.iterdir()) for path in (tmp_path, Path.cwd())}
    assert nvcomm.__main__.main(["doctor", "--quick", "--json", "-"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "nvcomm.doctor/1"
    assert {row["area"] for row in told["rows"]} == {"system", "packages", "gpu"}
    assert all(set(row) == {"area", "name", "status", "found", "fix"} for row in told["rows"])
    assert all(row["fix"] for row in told["rows"] if row["status"] != "OK")
    assert not [row for row in told["rows"] if "could not be looked at" in row["found"]]
    assert {path: sorted(path.iterdir()) for path in before} == before


def test_text_and_a_file(capsys, tmp_path):
    assert doctor.main(["--quick", "--json", str(tmp_path / "report.json")]) in (0, 1)
    assert "FAIL" in capsys.readouterr().out.splitlines()[-1]
    assert json.loads((tmp_path / "report.json").read_text())["rows"]
    assert doctor.main(["--quick", "--json", str(tmp_path / "no" / "such")]) == 2


def test_it_works_where_nothing_can_be_imported(tmp_path):
    """No site packages, no home, nothing installed: Python alone."""
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-S", "-m", "nvcomm", "doctor", "--json", "-"],
        cwd=ROOT,
        env={"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert (rows["torch"]["status"], rows["torch"]["found"]) == ("FAIL", "not installed")
    assert rows["memfd, AF_UNIX"]["status"] == "OK"
    assert "could not be looked at" not in done.stdout
    assert list(home.iterdir()) == []


def test_only_the_standard_library_at_module_level():
    code = "import sys, nvcomm.doctor; print(sorted({'torch', 'numpy', 'cutlass', 'cuda'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_probe_that_fails_costs_one_row(monkeypatch, capsys):
    def broken():
        yield Row("system", "first half", "OK", "seen")
        raise OSError("no\nsuch device")

    monkeypatch.setitem(doctor_system.PROBES, "CPU cores", broken)
    rows = {row["name"]: row for row in doctor.report(quick=True)["rows"]}
    assert rows["first half"]["found"] == "seen"
    assert rows["CPU cores"]["found"] == "could not be looked at: OSError: no such device"
    assert "TMPDIR" in rows


def test_exit_code_follows_the_worst_row(monkeypatch):
    for status, code in (("OK", 0), ("WARN", 0), ("FAIL", 1)):
        monkeypatch.setattr(doctor, "_rows", lambda quick, status=status: iter([Row("system", "x", status, "y", "z")]))
        assert doctor.main([]) == code


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "signal 6"),
        ("raise ValueError('broken wheel')", "broken wheel (exit code 1)"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
        ("print('hello')", "not JSON"),
        ("import sys; sys.exit(0)", "no message (exit code 0)"),
    ],
)
def test_a_child_that_fails_says_how(code, reason):
    answer, why = doctor_rows.ask_child(code, 0.5 if "sleep" in code else 60.0)
    assert answer is None
    assert reason in why


def test_a_sound_machine_of_two_gpus(gpu_rows):
    rows = gpu_rows()
    assert {row["status"] for row in rows.values()} == {"OK"}, rows
    assert rows["driver"]["found"] == "580.0.1, CUDA 13.0"
    assert rows["GPU 1"]["found"].startswith("GPU of a test, sm_90a, 132 SMs, 128 GiB")
    assert rows["NVLink"]["found"] == "active links: GPU 0: 18, GPU 1: 18"
    assert rows["P2P"]["found"] == "all 2 GPUs map each other's memory"
    assert "no variable switches it off" in rows["multicast"]["found"]
    assert rows["fabric"]["found"].startswith("state completed")


@pytest.mark.parametrize(
    ("knobs", "name", "status", "said"),
    [
        ({"CUDA": 12090}, "driver", "FAIL", "CUDA 12.9"),
        ({"INIT": 999}, "driver", "FAIL", "cuInit"),
        ({"CRASH": 1}, "driver", "FAIL", "signal 6"),
        ({"GPUS": 0, "CUDA_VISIBLE_DEVICES": "none"}, "GPUs", "WARN", "CUDA_VISIBLE_DEVICES=none"),
        ({"MAJOR": 8}, "GPU 0", "FAIL", "sm_80"),
        ({"MAJOR": 12}, "GPU 0", "WARN", "sm_120a"),
        ({"MODE": 2}, "GPU 0", "FAIL", "prohibited"),
        ({"MODE": 3}, "GPU 0", "WARN", "exclusive process"),
        ({"VMM": 0}, "GPU 0", "WARN", "no shareable virtual memory"),
        ({"MIG": 1}, "GPU 0", "WARN", "MIG"),
        ({"LINKS": 0}, "NVLink", "WARN", "GPU 0: 0"),
        ({"P2P": 0}, "P2P", "WARN", "no access: 0->1, 1->0"),
        ({"GPUS": 1}, "P2P", "OK", "share it"),
        ({"MULTICAST": 0}, "multicast", "WARN", "not offered by the driver on GPU 0, 1"),
        ({"NCCL_NVLS_ENABLE": "0"}, "multicast", "WARN", "switched off by NCCL_NVLS_ENABLE=0"),
        ({"NVCOMM_DISABLE_MULTICAST": "1"}, "multicast", "WARN", "switched off by NVCOMM_DISABLE_MULTICAST=1"),
        ({"FABRIC": 2}, "fabric", "WARN", "in progress"),
        ({"FABRIC": 0}, "fabric", "OK", "not supported"),
    ],
)
def test_what_is_wrong_with_a_gpu(gpu_rows, monkeypatch, knobs, name, status, said):
    # As on a machine with GPUs: without these a driver that fails is a machine that has none.
    monkeypatch.setattr(doctor_gpu.Path, "exists", lambda path: True)
    row = gpu_rows(**knobs)[name]
    assert (row["status"], said in row["found"]) == (status, True), row


def test_a_driver_that_hangs(gpu_rows, monkeypatch):
    monkeypatch.setattr(doctor_gpu, "DRIVER_TIMEOUT_S", 1.0)
    row = gpu_rows(HANG=1)["driver"]
    assert (row["status"], "no answer within 1 s" in row["found"]) == ("FAIL", True)


def test_mps(gpu_rows, monkeypatch, tmp_path):
    assert "not running" in gpu_rows(CUDA_MPS_PIPE_DIRECTORY=tmp_path)["MPS"]["found"]
    (tmp_path / "control").touch()
    assert gpu_rows()["MPS"]["status"] == "WARN"
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    assert gpu_rows()["MPS"]["found"] == f"its daemon runs, at {tmp_path}"


def test_the_numbers_of_cuda_h():
    enum = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError).CUdevice_attribute
    assert {name: int(getattr(enum, name)) for name in ATTRIBUTES} == ATTRIBUTES


def system_rows():
    probes = doctor_system.PROBES.items()
    return {row.name: row for name, probe in probes for row in doctor_rows.guarded("system", name, probe)}


def test_the_cache_folder(monkeypatch, tmp_path):
    def row(path):
        monkeypatch.setenv("NVCOMM_CACHE_DIR", str(path))
        return system_rows()["kernel cache"]

    assert "not there yet" in row(tmp_path / "new" / "deep").found
    assert not (tmp_path / "new").exists()
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (folder / "kernel").write_bytes(b"x" * (3 << 20))
    assert "1 entries, 3 MiB" in row(folder).found
    folder.chmod(0o755)
    assert (row(folder).status, row(folder).fix) == (
        "FAIL",
        f"if nobody else wrote there: chmod 700 {folder}; else remove it",
    )
    (tmp_path / "file").touch()
    assert row(tmp_path / "file").status == "FAIL"
    # Somebody else's home is refused in the same way, but not to root.
    beyond = row(tmp_path / "file" / "beyond")
    assert (beyond.status, beyond.fix) == ("FAIL", "set NVCOMM_CACHE_DIR to a folder of yours")
    assert "cannot be reached: Not a directory" in beyond.found
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert (row(link).status, "link to nothing" in row(link).found) == ("FAIL", True)


def test_variables(monkeypatch):
    monkeypatch.setenv("NVCOMM_TIMEOUT_S", "soon")
    for name in ("NVCOMM_* variables", "kernel cache"):
        assert (row := system_rows()[name]).status == "FAIL"
        assert "NVCOMM_TIMEOUT_S='soon'" in row.found
    monkeypatch.delenv("NVCOMM_TIMEOUT_S")
    for _ in range(2):  # however often it is asked
        monkeypatch.setenv("NVCOMM_TIMEOUT", "5")
        assert system_rows()["NVCOMM_* variables"].found == "unknown: NVCOMM_TIMEOUT"


def test_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, -1))
    rows = system_rows()
    assert [rows[f"ulimit -{x}"].status for x in ("n (files)", "f (file size)", "v (addresses)")] == [
        "WARN",
        "FAIL",
        "WARN",
    ]
    assert rows["ulimit -n (files)"].found == "100 (hard unlimited)"
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    assert system_rows()["TMPDIR"].status == "WARN"


def test_packages(monkeypatch):
    versions = {"torch": "2.10.1+cpu", "numpy": "2.4.6", "nvidia-cutlass-dsl": "4.9.0", "cuda-bindings": "13.5.0"}
    monkeypatch.setattr(doctor_packages, "_version", versions.get)

    def statuses(has_gpu):
        return {row.name: row.status for row in doctor_packages.rows(has_gpu, quick=True)}

    assert statuses(False) == {
        **{"nvcomm": "OK", "torch": "FAIL", "numpy": "OK", "nvidia-cutlass-dsl": "WARN"},
        **{"apache-tvm-ffi": "WARN", "cuda-bindings": "OK", "optional": "OK"},
    }
    assert statuses(True)["apache-tvm-ffi"] == "FAIL"


@pytest.mark.parametrize(
    ("answer", "has_gpu", "status"),
    [
        ({"cuda": None, "sees_gpus": 0, "distributed": True}, False, "OK"),
        ({"cuda": None, "sees_gpus": 0, "distributed": True}, True, "FAIL"),
        ({"cuda": "13.0", "sees_gpus": 2, "distributed": True}, True, "OK"),
        ({"cuda": None, "sees_gpus": 0, "distributed": False}, False, "FAIL"),
        (None, False, "FAIL"),
    ],
)
def test_import_of_torch(monkeypatch, answer, has_gpu, status):
    monkeypatch.setattr(doctor_packages, "ask_child", lambda code, timeout_s: (answer, "it crashed"))
    (row,) = doctor_packages._torch(has_gpu)
    assert row.status == status


def test_the_compiler_is_asked_and_leaves_nothing_behind(monkeypatch, tmp_path):
    pytest.importorskip("cutlass", exc_type=ImportError)
    monkeypatch.delenv("CUTE_DSL_CACHE_DIR", raising=False)
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    (row,) = doctor_packages._dsl(False)
    assert (row.status, "CuTe DSL" in row.found) == ("OK", True)
    assert list(tmp_path.iterdir()) == []
