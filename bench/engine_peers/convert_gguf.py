"""`convert_gguf.py FROM.gguf TO.gguf f16|q8_0`: the same weights in another format, for the peers that read GGUF.

Needs the package `gguf`; imports nothing of Baton.
"""

import sys

import gguf
import numpy as np

KINDS = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
# The writer sets the first one; the second is the type of the tensors.
OWN_FIELDS = ("general.architecture", "general.file_type")


def convert(source: str, target: str, kind: str) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(FILE_TYPES[kind])
    for field in reader.fields.values():
        if field.name in OWN_FIELDS or field.name.startswith("GGUF."):
            continue
        nested = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=nested)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # Norms have one dimension and keep their precision.
        wanted = KINDS[kind] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(*sys.argv[1:4])
