"""A growing file of JSON lines, read from where reading stopped."""

from __future__ import annotations

from pathlib import Path

from strop.board.curves import MAX_LINE_BYTES, FileTail


def test_only_what_was_added_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = FileTail(path)
    assert list(tail.new()) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(tail.new()) == [{"a": 1}, {"a": 2}]
    with path.open("a") as file:
        file.write(": 3}\n")
    assert list(tail.new()) == [{"a": 3}]
    assert tail.damaged == 0 and tail.offset == path.stat().st_size


def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\xfe{\n[1, 2]\n' + b"[" * 100_000 + b'\n\n{"a": 2}\n')
    tail = FileTail(path)
    assert list(tail.new()) == [{"a": 1}, {"a": 2}]
    assert tail.damaged == 3


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"x" * (MAX_LINE_BYTES + (8 << 20)) + b'\n{"a": 2}\n')
    tail = FileTail(path)
    assert list(tail.new()) == [{"a": 2}]
    assert tail.damaged == 1


def test_a_replaced_file_is_read_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = FileTail(path)
    assert not tail.replaced() and len(list(tail.new())) == 2
    assert not tail.replaced()
    other = tmp_path / "other"
    other.write_text('{"b": 1}\n{"b": 2}\n{"b": 3}\n')
    other.replace(path)
    assert tail.replaced() and tail.generation == 1
    assert [*tail.new()] == [{"b": 1}, {"b": 2}, {"b": 3}]
    path.write_text('{"c": 1}\n' * 4)  # written again in place, and longer
    assert tail.replaced() and [*tail.new()] == [{"c": 1}] * 4
    assert not tail.replaced() and not [*tail.new()]
    path.write_text("")  # cut in place
    assert tail.replaced() and [*tail.new()] == []
