"""Translates MLIR's LLVM dialect to the text of LLVM IR.

torch-mlir's binding for this copies a C string and never frees it, which leaks ten megabytes for the layers of one model. So
this file calls the same C function and frees the string.
"""

import ctypes
from functools import cache
from typing import Any

from torch_mlir import ir
from torch_mlir._mlir_libs import _mlirDialectsLLVM

_OPERATION = b"torch_mlir.ir.Operation._CAPIPtr"


def translate_to_llvm_ir(operation: ir.Operation) -> str:
    """Returns the LLVM IR of a module or a GPU module, which must have only operations of LLVM's dialects."""
    translate, dispose = _functions()
    text = translate(_pointer(operation._CAPIPtr, _OPERATION))
    try:
        return ctypes.string_at(text).decode()
    finally:
        dispose(text)


@cache
def _functions() -> tuple[Any, Any]:
    library = ctypes.CDLL(_mlirDialectsLLVM.__file__)  # also has the symbols of the libraries that it is linked with
    translate, dispose = library.mlirTranslateModuleToLLVMIRToString, library.LLVMDisposeMessage
    # An MlirOperation is a struct of one pointer, which is passed as that pointer.
    translate.argtypes, translate.restype = [ctypes.c_void_p], ctypes.c_void_p
    dispose.argtypes, dispose.restype = [ctypes.c_void_p], None
    return translate, dispose


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
