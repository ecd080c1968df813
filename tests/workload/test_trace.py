import json
from pathlib import Path

import pytest

from dots_jax.workload.request import Request
from dots_jax.workload.trace import TraceError, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.97,4808,10\r\n2023-11-16 18:17:04.03,3180,8\r\n"
MOONCAKE = [
    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
    {"timestamp": 27, "input_length": 891, "output_length": 1, "hash_ids": [0]},
]


@pytest.fixture
def trace(tmp_path):
    def write(text, name="trace.txt"):
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


def read(file):
    return read_trace(file, longest=524288)


def test_reads_csv(trace):
    assert read(trace(AZURE)) == (Request(4808, 10), Request(3180, 8))


def test_reads_json_lines_and_skips_blank_ones(trace):
    text = "\n".join([json.dumps(MOONCAKE[0]), "", json.dumps(MOONCAKE[1]), ""])
    assert read(trace(text)) == (Request(6758, 500), Request(891, 1))


def test_columns_are_found_by_name(trace):
    assert read(trace("GeneratedTokens, ContextTokens\n3,70\n")) == (Request(70, 3),)


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("azure_llm_2023_code.csv", 3000, Request(4808, 10)),
        ("mooncake_conversation.jsonl", 1500, Request(6758, 500)),
    ],
)
def test_real_traces_are_read_whole_where_they_are_at_hand(name, count, first):
    file = Path(__file__).parents[3] / "shared/data" / name
    if file.exists():  # AZURE and MOONCAKE above have their first lines, so nothing goes untested without them
        requests = read(file)
        assert len(requests) == count
        assert requests[0] == first


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "no 'ContextTokens'; found nothing"),
        ("TIMESTAMP,ContextTokens\nx,3\n", 1, "no 'GeneratedTokens'; found TIMESTAMP, ContextTokens"),
        ("ContextTokens,GeneratedTokens\n5,6\n7\n", 3, "no 'GeneratedTokens'; found ContextTokens"),
        ("ContextTokens,GeneratedTokens\n", 2, "expected a request, got the end of the file"),
        ("ContextTokens,GeneratedTokens\n5,6\n-4,6\n", 3, "ContextTokens: expected 1 to 524288 tokens, got -4"),
        ("ContextTokens,GeneratedTokens\n5,0\n", 2, "GeneratedTokens: expected 1 to 524288 tokens, got 0"),
        ("ContextTokens,GeneratedTokens\n5,1e3\n", 2, "GeneratedTokens: expected a whole number of tokens, got '1e3'"),
        (
            "ContextTokens,GeneratedTokens\n999999999,1\n",
            2,
            "ContextTokens: expected 1 to 524288 tokens, got 999999999",
        ),
        (
            "ContextTokens,GeneratedTokens\n524288,1\n",
            2,
            "ContextTokens + GeneratedTokens = 524289 tokens, at most 524288 are possible",
        ),
        ('{"input_length": 3}\n', 1, "no 'output_length'; found input_length"),
        ('{"input_length": 3, "output_length": 4}\n{"input', 2, "not a JSON object (Unterminated string"),
        ('{"input_length": 3, "output_length": 4}\n[3, 4]\n', 2, "expected a JSON object, got list"),
        ('{"input_length": 3.5, "output_length": 4}\n', 1, "input_length: expected a whole number of tokens, got 3.5"),
        (
            '{"input_length": true, "output_length": 4}\n',
            1,
            "input_length: expected a whole number of tokens, got True",
        ),
        ('{"input_length": 3, "output_length": -1}\n', 1, "output_length: expected 1 to 524288 tokens, got -1"),
        (b"\xff\xfe\x00", 1, "not a text file"),
        ('{"input_length": 3, "output_length": ' + 5000 * "9" + "}\n", 1, "cannot be read as JSON (Exceeds the limit"),
        ('{"input_length": 3, "a": ' + 100000 * "[", 1, "cannot be read as JSON (maximum recursion"),
        ("ContextTokens,GeneratedTokens\n5,6\n" + 200000 * "7", 3, "cannot be read as CSV (field larger"),
    ],
)
def test_errors_name_file_line_and_column(trace, text, line, message):
    file = trace(text)
    with pytest.raises(TraceError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}:{line}: {message}")


@pytest.mark.parametrize(
    "text", ["ContextTokens,GeneratedTokens\r\n5,6\r\n", '{"input_length": 5, "output_length": 6}\n']
)
def test_a_byte_order_mark_is_skipped(trace, text):
    assert read(trace(b"\xef\xbb\xbf" + text.encode())) == (Request(5, 6),)
