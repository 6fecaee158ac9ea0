"""libhybridopt through cffi, from offload.h as it is shipped.

    ffi, lib = hybridopt_cffi.load("/usr/lib/libhybridopt.so", "/usr/include/offload.h")  # ABI mode
    hybridopt_cffi.builder("_mine", "/usr/include/offload.h").compile()                   # API mode
"""

import pathlib

import cffi


def declarations(header):
    """The part of the header that is plain C99. cffi can read it after the export macro is removed."""
    text = pathlib.Path(header).read_text(encoding="utf-8")
    plain = text.partition("/* begin-plain-c99 */")[2].partition("/* end-plain-c99 */")[0]
    if not plain:
        raise ValueError(f"{header} has no plain-C99 part; expected the offload.h of hybridopt")
    return plain.replace("OFFLOAD_API ", "")


def load(library, header):
    """ABI mode, without a compiler: (ffi, lib)."""
    ffi = cffi.FFI()
    ffi.cdef(declarations(header))
    return ffi, ffi.dlopen(str(library))


def builder(name, header, **arguments):
    """API mode: an ffibuilder for the extension module `name`, which has `ffi` and `lib`. The
    arguments go to set_source (library_dirs, runtime_library_dirs ...)."""
    ffi = cffi.FFI()
    ffi.cdef(declarations(header))
    include = str(pathlib.Path(header).resolve().parent)
    ffi.set_source(
        name,
        "#include <offload.h>",
        include_dirs=[include],
        libraries=["hybridopt"],
        **arguments,
    )
    return ffi


def check(ffi, lib, status):
    """Raises an exception for a status that is not OK."""
    if status != lib.OFFLOAD_OK:
        name = ffi.string(lib.offload_status_name(status)).decode()
        text = ffi.string(lib.offload_last_error()).decode()
        raise RuntimeError(f"{name}: {text}")


def struct(ffi, name, /, **fields):
    """A struct of the library, ready to be filled in: struct_size is set, everything else is zero."""
    made = ffi.new(f"{name}*", fields)
    made.struct_size = ffi.sizeof(name)
    return made
