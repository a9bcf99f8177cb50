# SPDX-License-Identifier: Apache-2.0
"""The compiler front: what is in the key, what comes from the disk, what is refused. Compiles without a GPU."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import pytest

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_fake_stream  # noqa: E402

from nvcomm import cubin, jit, kernel_key, topology  # noqa: E402
from nvcomm.errors import UnsupportedError, UsageError  # noqa: E402


class StoreKernel:
    """Stores `word + addend` at `addr`."""

    def __init__(self, addend: int = 0) -> None:
        self.addend = addend

    @cute.jit
    def __call__(self, addr: Int64, word: Int32, ctas: Int32, stream):
        self.kernel(addr, word).launch(grid=(ctas, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, addr: Int64, word: Int32):
        cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, word + self.addend])


class Pair(NamedTuple):
    """Two parameters that travel as one."""

    addrs: list[Int64]
    count: Int32


class NothingKernel:
    """Takes parameters as mailbox kernels do, and launches nothing: runs without a GPU."""

    @cute.jit
    def __call__(self, work: Any, handle: Pair, stream):
        pass


def fake_args():
    return Int64(0), Int32(0), Int32(1), make_fake_stream()


def compile_store(addend=0, key=None):
    return jit.compile_kernel(StoreKernel(addend), *fake_args(), key=(addend,) if key is None else key)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A fresh cache folder, a fresh process cache, one architecture."""
    monkeypatch.setenv("NVCOMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setattr(jit, "_COMPILED", {})
    return tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch):
    """Counts runs of the compiler."""
    count = []
    real = cute.compile

    def counting(*args, **kwargs):
        count.append(kwargs["options"])
        return real(*args, **kwargs)

    monkeypatch.setattr(cute, "compile", counting)
    return count


def test_a_kernel_is_compiled_once_and_then_found_in_process_and_on_disk(cache, compiles, monkeypatch):
    first = compile_store()
    assert compile_store() is first
    assert len(compiles) == 1
    monkeypatch.setattr(jit, "_COMPILED", {})
    again = compile_store()
    assert again is not first
    assert again.name == first.name
    assert len(compiles) == 1
    assert [entry.name for entry in cache.iterdir()] == [f"{first.name}.o"]


@pytest.mark.parametrize("shielded", [True, False])
def test_the_programs_own_arguments_are_not_the_compilers(shielded):
    """The DSL looks for `-diagnostic` on the command line, of which `-d` is an abbreviation; ours have a `-d`."""
    exposed = "" if shielded else "kernel_compiler.no_arguments = contextlib.nullcontext;"
    program = f"import contextlib; from nvcomm import kernel_compiler; {exposed}"
    program += "import tests.unit.test_jit as t; t.compile_store()"
    done = subprocess.run(
        [sys.executable, "-c", program, "-d", "bfloat16"], capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if shielded else 2), done.stderr
    assert ("invalid choice: 'bfloat16'" in done.stderr) is not shielded


def test_folder_and_entry_are_for_the_user_alone(cache):
    os.umask(os.umask(0))
    name = compile_store().name
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache / f"{name}.o").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setenv("CUTE_DSL_ARCH", "sm_103a"),
        lambda m: m.setenv("NVCOMM_DEVICE_CHECKS", "1"),
        lambda m: m.setattr(kernel_key, "source_digest", lambda name: "edited"),
        lambda m: m.setattr(cutlass, "__version__", "0.0"),
        lambda m: m.setattr("tvm_ffi.__version__", "0.0"),
        lambda m: m.setattr(topology, "driver_version", lambda: 13010),
    ],
    ids=["arch", "device checks", "source", "dsl version", "tvm-ffi version", "driver version"],
)
def test_everything_that_decides_is_in_the_name(change, monkeypatch):
    def names():
        return jit.cache_names(StoreKernel(), *fake_args(), key=(), arch=jit.target_arch())

    before = names()
    assert before == names()
    change(monkeypatch)
    assert names()[0] != before[0]


def test_key_and_argument_types_are_in_the_name():
    def names(*args, key=()):
        return jit.cache_names(StoreKernel(), *args, key=key, arch="sm_90a")

    base = names(*fake_args())
    assert names(*fake_args(), key=(1,)) != base
    assert names(Int64(0), Int64(0), Int32(1), make_fake_stream()) != base
    assert names([Int64(0)] * 2, Int32(0), Int32(1), make_fake_stream()) != names(
        [Int64(0)] * 3, Int32(0), Int32(1), make_fake_stream()
    )
    assert names(Int64(7), Int32(7), Int32(7), make_fake_stream()) == base, "a placeholder's value decides nothing"


def test_an_entry_made_without_a_driver_serves_every_driver(compiles, monkeypatch):
    ahead_of_time = compile_store()
    monkeypatch.setattr(jit, "_COMPILED", {})
    monkeypatch.setattr(topology, "driver_version", lambda: 13010)
    assert compile_store().name == ahead_of_time.name
    assert len(compiles) == 1


def test_an_entry_of_another_driver_is_not_used(compiles, monkeypatch):
    monkeypatch.setattr(topology, "driver_version", lambda: 13000)
    first = compile_store()
    monkeypatch.setattr(jit, "_COMPILED", {})
    monkeypatch.setattr(topology, "driver_version", lambda: 13010)
    assert compile_store().name != first.name
    assert len(compiles) == 2


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:2000] + b"\xff" + b[2001:]])
def test_a_damaged_entry_is_compiled_again(damage, cache, compiles, monkeypatch, caplog):
    name = compile_store().name
    entry = cache / f"{name}.o"
    good = entry.read_bytes()
    entry.write_bytes(damage(good))
    monkeypatch.setattr(jit, "_COMPILED", {})
    compile_store()
    assert len(compiles) == 2
    assert entry.read_bytes()[:16] == good[:16]
    assert "damaged" in caplog.text
    monkeypatch.setattr(jit, "_COMPILED", {})
    compile_store()
    assert len(compiles) == 2, "the new entry is not damaged"


def test_arguments_are_checked_before_anything_is_launched():
    store = compile_store()
    with pytest.raises(ValueError, match="int32 range"):
        store(0, 2**31, 1, 0)
    with pytest.raises(TypeError):
        store(0, 1.5, 1, 0)
    with pytest.raises(TypeError):
        store(0, 1, 1)


def test_preload_arguments_are_the_placeholders_values():
    assert compile_store().fake_launch_args == (0, 0, 1)


@pytest.mark.parametrize("key", [(object(),), (lambda: 0,)], ids=["object", "function"])
def test_a_key_that_prints_an_address_is_refused(key):
    with pytest.raises(UsageError, match="address"):
        compile_store(key=key)


def test_without_gpu_and_without_arch_the_error_says_what_to_set(monkeypatch):
    monkeypatch.delenv("CUTE_DSL_ARCH")
    monkeypatch.setattr(topology, "current_arch", lambda: topology.Unknown("no driver"))
    with pytest.raises(UnsupportedError, match=r"no driver.*CUTE_DSL_ARCH"):
        jit.target_arch()


def test_dump_writes_text_beside_the_entry_even_when_it_is_cached(cache, compiles, monkeypatch):
    name = compile_store().name
    monkeypatch.setattr(jit, "_COMPILED", {})
    monkeypatch.setenv("NVCOMM_DUMP", "ptx")
    compile_store()
    assert ".target sm_90a" in (cache / f"{name}.ptx").read_text()
    assert len(compiles) == 2
    monkeypatch.setattr(jit, "_COMPILED", {})
    compile_store()
    assert len(compiles) == 2


def test_dump_of_sass_needs_nvdisasm_and_says_so(cache, monkeypatch):
    monkeypatch.setenv("NVCOMM_DUMP", "sass,ptx")
    if cubin.find_nvdisasm() is not None:
        name = compile_store().name
        assert "EXIT" in (cache / f"{name}.sass").read_text()
        assert (cache / f"{name}.ptx").exists()
    monkeypatch.setattr(cubin, "find_nvdisasm", lambda: None)
    with pytest.raises(UnsupportedError, match="nvidia-cuda-nvdisasm"):
        compile_store(1)


def test_compiling_leaves_nothing_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jit.artifacts(StoreKernel(), *fake_args())
    compile_store()
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_artifacts_are_for_the_architecture_asked_for(arch):
    made = jit.artifacts(StoreKernel(), *fake_args(), arch=arch)
    assert f".target {arch}" in made.ptx
    assert made.cubin[:4] == b"\x7fELF"
    ((name, usage),) = made.usage.items()
    assert "StoreKernel" in name
    assert 0 < usage.registers <= 32
    assert usage.frame_bytes == 0


def test_two_processes_make_the_same_name(cache):
    code = textwrap.dedent(
        f"""
        import sys; sys.path[:0] = {sys.path!r}
        import importlib.util
        spec = importlib.util.spec_from_file_location({__name__!r}, {__file__!r})
        module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        print(module.compile_store(5).name)
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == compile_store(5).name
    assert len(list(cache.iterdir())) == 1


def test_tuples_of_parameters_are_checked_like_single_ones():
    fake = Pair([Int64(0)] * 2, Int32(0))
    kernel = jit.compile_kernel(NothingKernel(), fake, fake, make_fake_stream(), key=())
    assert kernel.fake_launch_args == (((0, 0), 0),) * 2
    fits = ([1 << 40, -1], 2**31 - 1)
    for handle in (fits, Pair(*fits), jit.pack(fits), jit.pack(Pair(*fits))):
        kernel(fits, handle, 0)
    for wrong in (([1, 2], 2**31), ([1 << 64, 2], 3), ([1], 2), ([1, 2, 3], 4), ([1, 2],), (1, 2)):
        for work, handle in ((wrong, fits), (fits, wrong)):
            with pytest.raises((TypeError, ValueError, OverflowError)):
                kernel(work, handle, 0)
