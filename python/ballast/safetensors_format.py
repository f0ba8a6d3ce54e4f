"""Names of safetensors files and their formats. C++ reads and writes the files."""

from __future__ import annotations

SUFFIX = ".safetensors"
SINGLE = "model.safetensors"  # the only file of the only model in a folder, which goes before an index
INDEX = "model.safetensors.index.json"  # the index of the only model in a folder
DTYPES = {  # values: torch's names
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
