"""Data files are read strictly: what is wrong is named with file, line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.validation.tables import DataError, number, one_of, optional, read_json_lines, read_table, size, word

COLUMNS = {"name": word, "gpus": size, "ms": optional(number), "status": one_of("ok", "lost")}
HEADER = "# a source\nname,gpus,more,ms,status\n"


def table(folder: Path, content: str) -> Path:
    """A data file."""
    path = folder / "data.csv"
    path.write_text(content, encoding="utf-8")
    return path


def test_rows_are_read_with_their_lines(tmp_path: Path) -> None:
    """Comments and blank lines count as lines, other columns are left alone, blanks of optional cells are None."""
    read = read_table(table(tmp_path, f'{HEADER}"a, b",8.0,x,1.5,ok\n\nc,2,,,lost\n'), COLUMNS)

    assert [3, 5] == [row.line for row in read.rows]
    assert {"name": "a, b", "gpus": 8, "ms": 1.5, "status": "ok"} == read.rows[0].values
    assert {"name": "c", "gpus": 2, "ms": None, "status": "lost"} == read.rows[1].values


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (",8,,1,ok", "line 3, column name: '' is not a text that is not blank"),
        ("a,0,,1,ok", "line 3, column gpus: '0' is not a whole number of at least 1"),
        ("a,2.5,,1,ok", "line 3, column gpus: '2.5' is not a whole number"),
        ("a,8,,-1,ok", "line 3, column ms: '-1' is not a number of at least 0"),
        ("a,8,,nan,ok", "line 3, column ms: 'nan' is not a number of at least 0"),
        ("a,8,,1e999,ok", "line 3, column ms: '1e999' is not a number of at least 0"),
        ("a,8,,1,OK", "line 3, column status: 'OK' is not one of ok, lost"),
        ("a,8,,1", "line 3: 4 cells under a header of 5"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, line: str, message: str) -> None:
    """File, line and column, what stands there and what should."""
    path = table(tmp_path, HEADER + line + "\n")

    with pytest.raises(DataError) as caught:
        read_table(path, COLUMNS)

    assert str(caught.value).startswith(f"{path}, {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# only a comment\n", "no header; expected the columns name, gpus, ms, status"),
        ("name,ms,status\n", "line 1: the header lacks the column gpus"),
        ("name,gpus,ms,status,name\n", "line 1: the header has the column name more than once"),
    ],
)
def test_a_bad_header_is_named(tmp_path: Path, content: str, message: str) -> None:
    """A missing or doubled column is an error before any row is read."""
    with pytest.raises(DataError, match=message):
        read_table(table(tmp_path, content), COLUMNS)


def test_a_missing_file_and_a_binary_file_are_named(tmp_path: Path) -> None:
    """Neither ends in a traceback of ours."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(DataError, match="nowhere: cannot be read"):
        read_table(tmp_path / "nowhere", COLUMNS)
    with pytest.raises(DataError, match="not a UTF-8 text"):
        read_table(tmp_path / "binary", COLUMNS)


@pytest.mark.parametrize(("content", "message"), [("{}\n{", "line 2: not JSON"), ("[1]", "line 1: a JSON list")])
def test_bad_json_lines_are_named(tmp_path: Path, content: str, message: str) -> None:
    """Each line holds one object."""
    path = tmp_path / "args.jsonl"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(DataError, match=message):
        list(read_json_lines(path))
