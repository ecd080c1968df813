"""How a page table is shown: as text for `repr` and as a drawing in a notebook."""

import numpy as np

_MAX_ROWS = 16


def table_text(pages: np.ndarray, lengths: np.ndarray, page_size: int) -> str:
    """Returns one line a row: tokens, then the pages in order; runs of absent pages are shortened."""
    rows, columns = pages.shape
    lines = [f"PageTable({rows} rows x {columns} columns, page_size={page_size})"]
    for row in range(min(rows, _MAX_ROWS)):
        lines.append(f"  row {row}: {int(lengths[row])} tokens  {_row_text(pages[row], int(lengths[row]), page_size)}")
    if rows > _MAX_ROWS:
        lines.append(f"  ... {rows - _MAX_ROWS} more rows")
    return "\n".join(lines)


def _row_text(entries: np.ndarray, length: int, page_size: int) -> str:
    """`[-- x3, 17, 4, 9 (24/64)]`: three absent pages, two full ones, and the last with 24 of 64 tokens."""
    used = min(len(entries), -(-max(length, 0) // page_size))
    parts: list[str] = []
    absent = 0
    for column in range(used):
        if entries[column] < 0:
            absent += 1
            continue
        parts += _absent_text(absent)
        absent = 0
        fill = min(page_size, length - column * page_size)
        parts.append(f"{entries[column]}" if fill == page_size else f"{entries[column]} ({fill}/{page_size})")
    parts += _absent_text(absent)
    return f"[{', '.join(parts)}]"


def _absent_text(count: int) -> list[str]:
    if not count:
        return []
    return ["--"] if count == 1 else [f"-- x{count}"]


def table_html(pages: np.ndarray, lengths: np.ndarray, page_size: int) -> str:
    """Returns the table as a block of preformatted text."""
    return f"<pre>{table_text(pages, lengths, page_size)}</pre>"
