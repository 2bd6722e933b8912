"""What identifies a processor, a driver, a loaded file; the threads that run."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from llm42.fingerprint import device, libraries
from llm42.host import threads
from llm42.host.linked import file_identity, file_of, find, mapped_file, mapped_files
from llm42.host.threads import ThreadsChanged, hold_threads, parallel_region_size, set_threads, torch_threads

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) Processor @ 2.50GHz
stepping\t: 7
cache size\t: 36608 KB
cpu MHz\t\t: 2500.000
flags\t\t: fpu vme sse sse2 ssse3 sse4_1 sse4_2 avx avx2 avx512f avx512_vnni fma f16c bmi1 bmi2 abm movbe
bugs\t\t: spectre_v1

processor\t: 1
"""


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("vme", "vme hypervisor rdpid md_clear flush_l1d", False),
        ("2500.000", "3100.123", False),
        ("spectre_v1", "spectre_v1 mds", False),
        ("avx512_vnni", "", True),
        ("bmi2 abm", "abm bmi2", False),
        (" fma", "", True),
        (": 7", ": 6", True),
        ("GenuineIntel", "AuthenticAMD", True),
        ("36608", "1024", True),
    ],
)
def test_a_processor_is_what_libraries_choose_by(old: str, new: str, counts: bool) -> None:
    assert CPUINFO.count(old) == 1
    changed = device.cpu_identity(CPUINFO.replace(old, new))
    assert (changed != device.cpu_identity(CPUINFO)) == counts


def test_an_arm_processor() -> None:
    arm = (
        "processor\t: 0\nFeatures\t: fp asimd sve bf16 evtstrm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    )
    assert device.cpu_identity(arm) == device.cpu_identity(arm.replace("evtstrm", "cpuid"))
    assert (
        len({device.cpu_identity(arm.replace(*x)) for x in (("a", "a"), (" sve", ""), ("d40", "d4f"))}) == 3
    )


MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (b@h)\nGCC"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"


class Libraries:
    """Stands for ctypes: NVML and the driver as far as they are asked, each there or not."""

    def __init__(self, nvml: bytes | None = None, api: int | None = None) -> None:
        self.nvml, self.api = nvml, api

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes, name)

    def CDLL(self, name: str) -> Any:
        if ("nvidia-ml" in name and self.nvml is None) or ("cuda" in name and self.api is None):
            raise OSError(name)
        return self

    nvmlInit_v2 = nvmlShutdown = staticmethod(lambda: 0)

    def nvmlSystemGetDriverVersion(self, text: Any, _: Any) -> int:
        text.value = self.nvml
        return 0

    def cuDriverGetVersion(self, value: Any) -> int:
        value._obj.value = self.api
        return 0


@pytest.mark.parametrize(
    ("library", "module", "file", "want"),
    [
        (Libraries(nvml=b"570.124.06"), MODULE, None, "570.124.06"),
        (Libraries(nvml=b"560.94"), None, None, "560.94"),  # WSL2
        (Libraries(), MODULE, None, "570.124.06"),
        (Libraries(), PROPRIETARY, None, "550.54.15"),
        (Libraries(), None, "/usr/lib/libcuda.so.570.124.06", "570.124.06"),  # gVisor
        (Libraries(api=12080), None, "/usr/lib/wsl/lib/libcuda.so.1", "CUDA 12.8"),
        (Libraries(), None, None, None),
    ],
)
def test_the_driver_also_without_proc(
    library: Libraries,
    module: str | None,
    file: str | None,
    want: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if module:
        (tmp_path / "version").write_text(module)
    monkeypatch.setattr(device, "ctypes", library)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(device, "mapped_file", lambda _: file)
    assert device.driver_version() == want


def test_the_rotary_table_is_an_input() -> None:
    table = torch.randn(8, 4)
    other = table.clone()
    other[7, 3] = torch.nextafter(other[7, 3], torch.tensor(9.0))
    assert device.table_digest(table) == device.table_digest(table.clone())
    assert device.table_digest(table) != device.table_digest(other)


def _elf(build_id: bytes | None) -> bytes:
    note = struct.pack("<III", 4, len(build_id or b""), 3) + b"GNU\0" + (build_id or b"")
    other = struct.pack("<III", 4, 4, 1) + b"GNU\0" + b"abcd"
    notes = other + (note if build_id else b"")
    header = b"\x7fELF\x02\x01" + bytes(26) + struct.pack("<Q", 64) + bytes(14) + struct.pack("<HH", 56, 2)
    header = header.ljust(64, b"\0")
    loads = struct.pack("<IIQQQQQQ", 1, 0, 0, 0, 0, 0, 0, 0)
    return header + loads + struct.pack("<IIQQQQQQ", 4, 0, 176, 0, 0, len(notes), 0, 4) + notes


def test_a_files_identity(tmp_path: Path) -> None:
    def identity(data: bytes) -> str:
        file = tmp_path / "lib.so"
        file.write_bytes(data)
        os.utime(file, ns=(1, hash(data) % 10**9))
        return file_identity(str(file))

    assert identity(_elf(bytes(range(20)))) == bytes(range(8)).hex()
    assert identity(_elf(bytes(range(20))) + b"stripped or not") == bytes(range(8)).hex()
    without = [identity(_elf(None) + tail) for tail in (b"", b"x")] + [identity(b"no library"), identity(b"")]
    assert len(set(without)) == 4, "without a build id the content is hashed"
    assert file_identity("/nonexistent") == "unreadable"


def test_mapped_files() -> None:
    maps = (
        "7f00-7f01 r--p 00000000 fe:00 42    /usr/lib/libcublasLt.so.13\n"
        "7f01-7f02 r-xp 00001000 fe:00 42    /usr/lib/libcublasLt.so.13\n"
        "7f02-7f03 rw-p 00000000 00:00 0\n7f03-7f04 rw-p 00000000 00:00 0    [stack]\n"
        "7f04-7f05 r-xp 00000000 fe:00 43    /opt/a folder/libgomp.so.1\n"
    )
    assert mapped_files(maps) == ["/usr/lib/libcublasLt.so.13", "/opt/a folder/libgomp.so.1"]
    assert mapped_file("libnothing.so") is None


def test_a_function_leads_to_its_file() -> None:
    library = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    function = find(["no_such_function", "expf"], library)
    assert "libm" in os.path.basename(file_of(function) or "")
    assert find(["no_such_function"], library) is None
    found = libraries.loaded_libraries("cpu")
    assert {"torch", "libm"} <= set(found)
    assert found == libraries.loaded_libraries("cpu")


def test_what_cublas_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_property(which: Any, value: Any) -> int:
        value._obj.value = (13, 2, 1)[which.value]
        return 0

    def runtime(value: Any) -> int:
        value._obj.value = 13020
        return 0

    class Version:
        restype: Any = None

        def __call__(self) -> int:
            return 130201

    known = {
        "cublasLtGetVersion": Version(),
        "cublasGetProperty": get_property,
        "cudaRuntimeGetVersion": runtime,
    }
    monkeypatch.setattr(libraries, "find", lambda names, _: known.get(names[0]))
    said = {part: libraries.own_version(part, "lib") for part in ("cublas", "cublasLt", "cudart", "openmp")}
    assert said == {"cublas": "13.2.1", "cublasLt": "130201", "cudart": "13020", "openmp": ""}


def test_triton_has_one_compiler_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    found = libraries.triton_tools()
    assert set(found) == {"ptxas", "libdevice"}
    (tmp_path / "libdevice.bc").write_bytes(b"another")
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", str(tmp_path / "libdevice.bc"))
    other = libraries.triton_tools()
    assert other["ptxas"] == found["ptxas"]
    assert other["libdevice"] != found["libdevice"]


def test_versions_by_device() -> None:
    assert "triton" not in libraries.library_versions("cpu")
    assert "triton" in libraries.library_versions("cuda")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_parallel_region_has_the_threads_that_were_set(count: int) -> None:
    with torch_threads(count):
        assert parallel_region_size() == count


def test_the_load_does_not_change_the_number_of_threads() -> None:
    library = threads._torch_library()
    get, adjust = find(["omp_get_dynamic"], library), find(["omp_set_dynamic"], library)
    if get is None or adjust is None:
        pytest.skip("torch has no OpenMP here")
    seen = []

    def other_thread() -> None:
        adjust(1)
        seen.append(get())
        set_threads(2)
        seen.append(get())

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == [1, 0]


def test_a_thread_whose_regions_are_of_another_size_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch_threads(1):
        hold_threads(1)
        monkeypatch.setattr(threads, "parallel_region_size", lambda: 2)
        with pytest.raises(ThreadsChanged, match="2 threads instead of 1"):
            hold_threads(1)


def test_a_visible_gpu_is_nothing_to_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for GPUs says more of itself where it sees one; a command sees one that an actor does not."""
    own = torch.__config__.show()
    hidden = {kind: libraries.torch_build(kind) for kind in ("cpu", "cuda")}
    more = (
        "  - CUDA Runtime 13.0\n  - NVCC architecture flags: x\n  - CuDNN 91.9\n    - Built with CuDNN 90.1\n"
    )
    head, build, rest = own.partition("  - Build settings")
    monkeypatch.setattr(torch.__config__, "show", lambda: f"{head}{more}  - Magma 2.6.1\n{build}{rest}")
    assert libraries.torch_build("cpu") == hidden["cpu"]
    assert "Build settings" in hidden["cpu"]
    assert libraries.torch_build("cuda") != hidden["cuda"], "the control"
