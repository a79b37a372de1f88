"""The machine that figures belong to, and what PyTorch's matmuls make of its processor."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

# Settings of the environment that change speed: they are reported, never made.
SETTINGS = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "ONEDNN_", "GOMP_", "XLA_", "JAX_", "MALLOC_", "LD_PRELOAD")

# Intel's MKL, which PyTorch brings, takes a slower path where this function says that the processor is not Intel's.
VENDOR_HOOK = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def peak_mb() -> float | None:
    """The largest resident memory of this process so far; None where the system does not say."""
    if importlib.util.find_spec("resource") is None:  # Windows
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def processor() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or platform.machine()
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gb() -> float | None:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


def system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]  # Linux
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def describe() -> dict:
    """Processor, cores, memory, system, how busy it is, and what the environment sets."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    settings.pop("JAX_COMPILATION_CACHE_DIR", None)  # not handed on: every contender has a place of its own
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_gb": memory_gb(),
        "system": system(),
        "load": load,
        "python": platform.python_version(),
        "environment": settings,
    }


def build_vendor_hook(folder: Path) -> tuple[Path | None, str]:
    """A library that answers MKL's question for the vendor with Intel, for AMD processors on Linux; or why not."""
    if _cpuinfo("vendor_id") != "AuthenticAMD":
        return None, "no rows with the vendor hook: it is for AMD processors under Linux"
    if shutil.which("cc") is None:
        return None, "no rows with the vendor hook: it needs a C compiler (cc)"
    source, library = folder / "vendor.c", folder / "vendor.so"
    source.write_text(VENDOR_HOOK, encoding="ascii")
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        return None, f"no rows with the vendor hook: cc failed: {' '.join(built.stderr.split())[:200]}"
    return library, ""
