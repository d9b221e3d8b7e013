"""Coverage-guided fuzzing of the header and index parsers; run by hand, not by pytest.

    pip install atheris; python tests/fuzz/fuzz_header.py -max_total_time=300 CORPUS

Any bytes must end in findings or in a header that covers its file without gap or overlap; anything
else that escapes is a crash.
"""

import sys

import atheris

with atheris.instrument_imports(include=["k3quant"]):
    from k3quant.checkpoint.header import scan_header
    from k3quant.checkpoint.index import parse_index
    from k3quant.errors import StructureError


def check_header(raw: bytes) -> None:
    scan = scan_header(
        lambda offset, length: raw[offset : offset + length], file="f", file_bytes=len(raw)
    )
    if scan.header is None:
        assert scan.findings
        return
    if scan.findings:
        return
    end = 0
    for entry in sorted(scan.header.tensors.values(), key=lambda e: (e.begin, e.end)):
        assert entry.begin == end
        end = entry.end
    assert scan.header.data_start + end == len(raw)


def one_input(data: bytes) -> None:
    if data[:1] == b"i":
        try:
            parse_index(data[1:])
        except StructureError:
            return
    text = data[1:]
    text += b" " * (-len(text) % 8)
    check_header(data)
    check_header(len(text).to_bytes(8, "little") + text)
    check_header(len(text).to_bytes(8, "little") + text + bytes(data[:1]) * (len(data) % 64))


atheris.Setup(sys.argv, one_input)
atheris.Fuzz()
