"""Files of text as other programs write them: UTF-8, with or without a mark, lines that end as on any system."""

from __future__ import annotations

import codecs
from pathlib import Path

MARK = "\ufeff"  # at the beginning of a text: written by some programs, and no part of it
_OTHERS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_text(file: Path) -> str:
    """The text of a UTF-8 file without its mark, with "\\n" between lines. OSError; ValueError says what else it is."""
    data = file.read_bytes()
    for mark, name in _OTHERS.items():
        if data.startswith(mark):
            raise ValueError(f"it is {name}, save it as UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    return text.removeprefix(MARK).replace("\r\n", "\n").replace("\r", "\n")
