"""Recorded files with other content, under a name with the checksum of that content."""

import zlib

import pyarrow as pa
import pyarrow.parquet as pq


def rewrite(table, file):
    """Put ``table`` in the place of ``file``; returns the new file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return replace_content(file, sink.getvalue())


def replace_content(file, content):
    """Put a file with ``content`` in the place of ``file``; returns the new file."""
    file.unlink()
    target = file.with_name(f"rewritten-crc{zlib.crc32(content):08x}.parquet")
    target.write_bytes(content)
    return target
