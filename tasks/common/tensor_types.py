"""Types of tensors, under the names that a safetensors header, torch and numpy have for them."""

# safetensors' name: torch's name, and numpy's type of the same width, in which the bits can be looked at.
TYPES = {
    "F64": ("float64", "<u8"),
    "F32": ("float32", "<u4"),
    "F16": ("float16", "<u2"),
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3fn", "<u1"),
    "F8_E5M2": ("float8_e5m2", "<u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "<i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "<u1"),
    "BOOL": ("bool", "|b1"),
}
# safetensors' name by torch's, and by that of dump.storage_dtype where it is another.
SAFETENSORS = {torch_name: name for name, (torch_name, _) in TYPES.items()} | {"float8": "F8_E4M3"}
# Bytes of a value, by safetensors' name.
WIDTHS = {name: int(bits[-1]) for name, (_, bits) in TYPES.items()}
