"""Kernels compiled as a launch does, through CuPy's own compiler and disk cache, on a machine without a GPU.

    python -m tests.support.compile_alone FILE.cu:FUNCTION [NAME=VALUE ...]

prints one line before and one after. CUPY_CACHE_DIR says where the cache is. Only what needs a driver is replaced: the
loading of the finished module.
"""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace

from cupy.cuda import compiler

from dsv4cp import _kernels


class Module:
    """Stands for a module on a GPU: takes what is an ELF file."""

    mapping = None

    def load(self, cubin: bytes) -> None:
        if not cubin.startswith(b"\x7fELF"):
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        self.cubin = cubin

    def _set_mapping(self, mapping) -> None:
        self.mapping = mapping


class RawModule:
    """CuPy's RawModule without a device: compiles when a function is asked for."""

    def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
        self.code, self.options = code, options

    def get_function(self, name: str) -> SimpleNamespace:
        options = tuple(o for o in self.options if not o.startswith("-arch"))
        module = compiler._compile_module_with_cache(self.code, options, arch="90", backend="nvrtc")
        return SimpleNamespace(kernel=module)


def without_a_gpu(patch) -> None:
    """patch(object, name, value): monkeypatch.setattr or setattr."""
    patch(compiler, "function", SimpleNamespace(Module=Module))
    patch(compiler, "_get_arch_for_options_for_nvrtc", lambda arch: (f"-arch=sm_{arch}", "cubin"))  # asks for a device
    patch(_kernels, "_raw_module", lambda: RawModule)


def main(arguments: list[str]) -> int:
    without_a_gpu(setattr)
    file, _, function = arguments[0].partition(":")
    kernel = _kernels.kernel(file, function, defines=dict(a.split("=") for a in arguments[1:]))
    print("compiling", flush=True)
    _kernels._load(kernel, 0)
    print("compiled", flush=True)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the parent shell ignores it
    sys.exit(main(sys.argv[1:]))
