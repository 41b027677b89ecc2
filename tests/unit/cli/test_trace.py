"""Traces: what is read, and how a bad line is named."""

import json

import pytest

from kvservice.cli.trace import TraceError, read_trace


@pytest.fixture
def trace(tmp_path):
    """Return a way to write a trace of lines."""

    def write(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def ids_of(path, limit_count=None):
    """Read a whole trace."""
    return [request.hash_ids for request in read_trace(path, limit_count=limit_count)]


def test_requests_come_in_order(trace):
    """One line is one request; other fields are passed over."""
    path = trace(
        '{"timestamp": 0, "input_length": 9, "hash_ids": [1, 2, 3]}', '{"hash_ids": []}', '{"hash_ids": [5]}'
    )
    assert ids_of(path) == [(1, 2, 3), (), (5,)]


def test_a_limit_stops_early(trace):
    """What lies behind the limit is not even looked at."""
    path = trace('{"hash_ids": [1]}', '{"hash_ids": [2]}', "garbage")
    assert ids_of(path, 2) == [(1,), (2,)]


def test_an_id_counts_once_in_a_request(trace):
    """A chain never comes back to a block: repetitions are dropped, order kept."""
    assert ids_of(trace('{"hash_ids": [3, 1, 3, 2, 1]}')) == [(3, 1, 2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", ["not a JSON object"]),
        ("[1, 2]", ["hash_ids"]),
        ("{}", ["field hash_ids is missing"]),
        ('{"hash_ids": 5}', ["hash_ids"]),
        ('{"hash_ids": [1, -1]}', ["hash_ids holds -1"]),
        ('{"hash_ids": [1.5]}', ["hash_ids holds 1.5"]),
        ('{"hash_ids": [true]}', ["hash_ids holds True"]),
        ('{"hash_ids": ["7"]}', ["hash_ids holds '7'"]),
        ('{"hash_ids": [null]}', ["hash_ids holds None"]),
        (json.dumps({"hash_ids": [2**63]}), ["hash_ids holds 9223372036854775808"]),
        ('{"hash_ids": ' + "[" * 100_000, ["not a JSON object"]),
        ('{"hash_ids": [' + "9" * 5000 + "]}", ["not a JSON object"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_line_is_named_with_file_line_and_field(trace, line, words):
    """`file:line: what is wrong`, so that an editor finds it."""
    path = trace('{"hash_ids": [1]}', line)
    with pytest.raises(TraceError) as caught:
        ids_of(path)
    for word in (f"{path}:2", *words):
        assert word in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path):
    """No traceback for a wrong path."""
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(TraceError, match=r"missing\.jsonl"):
        ids_of(missing)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b'{"hash_ids": [1]}\n\xff\xfe\x00')
    with pytest.raises(TraceError, match=r"binary\.jsonl"):
        ids_of(binary)
