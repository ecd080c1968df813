"""How a page table is shown: as text for `repr` and as a drawing in a notebook."""

import html

import numpy as np

_MAX_ROWS = 16
_MAX_COLUMNS = 32


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
    parts: list[str] = []
    absent = 0
    for column in range(_used(entries, length, page_size)):
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


def _used(entries: np.ndarray, length: int, page_size: int) -> int:
    """Columns that the row's tokens reach into."""
    return min(len(entries), -(-max(length, 0) // page_size))


def table_html(pages: np.ndarray, lengths: np.ndarray, page_size: int) -> str:
    """Returns the table as an HTML table: one cell a logical page, filled as far as the page holds tokens.

    Absent pages of a row that reaches past them are dashed, pages that appear more than once have a heavy border, and
    each cell's tooltip says which tokens it holds. A long row shows its last columns: those that decode reads.
    """
    rows, columns = pages.shape
    ids, counts = np.unique(pages[pages >= 0], return_counts=True)
    shared = set(ids[counts > 1].tolist())
    used = [_used(pages[row], int(lengths[row]), page_size) for row in range(min(rows, _MAX_ROWS))]
    first = max(0, max(used, default=0) - _MAX_COLUMNS)
    last = min(columns, max(max(used, default=0), first + 1))
    head = "".join(f"<th style='font-weight:normal'>{column}</th>" for column in range(first, last))
    body = "".join(
        f"<tr><th>row {row}</th><td style='text-align:right'>{int(lengths[row])} tokens</td>"
        + "".join(_cell(pages[row], column, int(lengths[row]), page_size, shared) for column in range(first, last))
        + "</tr>"
        for row in range(len(used))
    )
    title = f"{rows} rows x {columns} columns, page_size={page_size}"
    if rows > _MAX_ROWS:
        title += f"; the first {_MAX_ROWS} rows"
    if first or last < columns:
        title += f"; columns {first} to {last - 1}"
    if shared:
        title += f"; {len(shared)} shared pages"
    return (
        f"<table style='border-collapse:separate;border-spacing:2px;font-size:85%'>"
        f"<caption>PageTable: {html.escape(title)}</caption>"
        f"<thead><tr><th></th><th>page</th>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cell(entries: np.ndarray, column: int, length: int, page_size: int, shared: set[int]) -> str:
    fill = min(page_size, length - column * page_size)
    if fill <= 0:
        return "<td></td>"
    page = int(entries[column])
    tokens = f"tokens {column * page_size} to {column * page_size + fill - 1}"
    if page < 0:
        return f"<td title='{tokens}: absent' style='border:1px dashed #999;color:#999;text-align:center'>-</td>"
    percent = 100 * fill // page_size
    border = "3px double #b45309" if page in shared else "1px solid #64748b"
    background = f"linear-gradient(to right,#93c5fd {percent}%,transparent {percent}%)"
    note = f"page {page}: {tokens}, {fill} of {page_size}" + (", shared" if page in shared else "")
    style = f"border:{border};background:{background};text-align:center;min-width:2.2em"
    return f"<td title='{note}' style='{style}'>{page}</td>"
