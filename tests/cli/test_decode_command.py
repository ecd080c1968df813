import json

import jax
import jax.numpy as jnp
import pytest

from dots_jax.cli import main
from dots_jax.decode import swa_latent_decode, write_latent
from dots_jax.pages import PageTable
from dots_jax.workload import job, loop
from dots_jax.workload.checks import Checks

# A model small enough for many runs; the window of 65 tokens makes 3 pages a request with 4 drafts.
SMALL = {
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "swa_num_attention_heads": 2,
    "swa_kv_lora_rank": 24,
    "swa_qk_nope_head_dim": 8,
    "swa_qk_rope_head_dim": 8,
    "sliding_window_size": 65,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    return ["decode", "--config", str(file), "--layers", "2", "--batch", "3", "--dtype", "float32"]


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def run_json(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def test_small_run_passes_its_checks(capsys, small):
    code, result = run_json(capsys, *small, "--steps", 20, "--context", 400)
    assert code == 0
    assert result["ok"] is True
    assert result["failures"] == []
    assert (result["steps"], result["retraces"]) == (20, 0)
    assert 20 * 3 <= result["tokens"] <= 20 * 3 * 4
    assert result["longest"] > 400
    assert result["pages_peak"] <= 9
    assert result["pages_end"] <= result["pages_peak"]
    assert result["samples"] >= 3 * 2 + 3
    assert result["bytes_per_request"] == 3 * 64 * 32 * 4 * 2
    assert 0 < result["worst"]["absolute"] < 1e-5
    assert result["tokens_per_s"] > 0
    assert result["ms_per_step"] > 0


def test_the_seed_decides_everything_but_the_times(capsys, small):
    def counts(seed):
        _, result = run_json(capsys, *small, "--steps", 20, "--context", 400, "--seed", seed)
        return {name: result[name] for name in ("tokens", "pages_peak", "pages_end", "longest", "worst")}

    assert counts(1) == counts(1)
    assert counts(1) != counts(2)


def test_the_report_shows_what_was_asked_for(capsys, small):
    code, out, _ = run(capsys, *small, "--steps", 20, "--context", 400)
    assert code == 0
    for part in (
        "20 steps of 3 rows x 4 drafts in 2 layers, float32 on cpu",
        "accepted tokens/s",
        "ms a step",
        "at most,",
        "3 pages of 64 tokens in 2 layers",
        "worst error",
        "all passed",
    ):
        assert part in out


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_trace_is_served_to_its_end_by_a_pool_smaller_than_the_batch(capsys, small, tmp_path, kind):
    lengths = [(700, 9), (40, 3), (90, 20), (1, 1), (1500, 6), (64, 12)]
    file = tmp_path / "trace"
    if kind == "csv":
        file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"0,{a},{b}\n" for a, b in lengths))
    else:
        rows = [{"timestamp": 0, "input_length": a, "output_length": b, "hash_ids": []} for a, b in lengths]
        file.write_text("\n".join(map(json.dumps, rows)))
    code, result = run_json(capsys, *small, "--trace", file, "--pages", 5, "--steps", 500)
    assert code == 0
    assert (result["requests_finished"], result["requests_waiting"]) == (6, 0)
    assert result["tokens"] == sum(output for _, output in lengths)
    assert result["pages_peak"] <= 5
    assert result["steps"] < 60
    assert result["longest"] == 1506


def window_short_by_one(q, kv, table, *, window, **options):
    return swa_latent_decode(q, kv, table, window=window - 1, **options)


def last_draft_not_written(cache, table, latent, *, counts):
    return write_latent(cache, table, latent.at[:, -1].set(0), counts=counts)


def nothing_released(pool, table, window, next_query):
    return pool, table


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("swa_latent_decode", window_short_by_one, "cosine difference"),
        ("write_latent", last_draft_not_written, "cosine difference"),
        ("release_outside_window", nothing_released, "pages held: expected"),
    ],
)
def test_mistakes_planted_in_the_step_fail_the_run(capsys, small, monkeypatch, name, wrong, message):
    monkeypatch.setattr(loop, name, wrong)
    forget = loop.decode_step.clear_cache  # pyright: ignore[reportAttributeAccessIssue]
    forget()
    try:
        code, out, _ = run(capsys, *small, "--steps", 20, "--context", 400)
    finally:
        forget()
    assert code == 1
    assert "FAILED" in out
    assert message in out


def values_shifted_by_a_column(state, outputs):
    return state, outputs._replace(outs=tuple(jnp.roll(out, 1, axis=-1) for out in outputs.outs))


def doubled(state, outputs):
    return state, outputs._replace(outs=tuple(out * 2 for out in outputs.outs))


def not_finite(state, outputs):
    return state, outputs._replace(outs=tuple(out.at[0, 0, 0, 0].set(jnp.nan) for out in outputs.outs))


def lse_off(state, outputs):
    return state, outputs._replace(lses=tuple(lse + 1e-4 for lse in outputs.lses))


def page_lost(state, outputs):
    pages = jnp.where(state.table.pages == jnp.max(state.table.pages), -1, state.table.pages)
    return state._replace(table=PageTable(pages, state.table.lengths)), outputs


def token_lost(state, outputs):
    lengths = state.table.lengths - (state.table.lengths > 200)
    return state._replace(table=PageTable(state.table.pages, lengths)), outputs


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (values_shifted_by_a_column, "cosine difference"),
        (doubled, "the output's norm is 2.0000 of the reference's"),
        (not_finite, "the output is not finite"),
        (lse_off, "log-sum-exp differs from the reference by 0.0001"),
        (page_lost, "is held by nobody"),
        (token_lost, "length: expected"),
    ],
)
def test_mistakes_planted_in_the_results_fail_the_run(capsys, small, monkeypatch, spoil, message):
    monkeypatch.setattr(job, "decode_step", lambda *arguments: spoil(*loop.decode_step(*arguments)))
    code, out, _ = run(capsys, *small, "--steps", 20, "--context", 400)
    assert code == 1
    assert "FAILED" in out
    assert message in out


def test_tracing_again_fails_the_run(capsys, small, monkeypatch):
    def trace_once_more(self):
        loop.TRACES["decode_step"] += 1
        job_result(self)

    job_result = Checks.traces
    monkeypatch.setattr(Checks, "traces", trace_once_more)
    code, result = run_json(capsys, *small, "--steps", 20, "--context", 400)
    assert code == 1
    assert result["failures"] == ["traced again after the warm-up: decode_step x1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "argument --layers: expected a whole number of at least 1, got '0'"),
        (["--batch", "-3"], "argument --batch: expected a whole number of at least 1, got '-3'"),
        (["--steps", "many"], "argument --steps: expected a whole number of at least 1, got 'many'"),
        (["--seed", "-1"], "argument --seed: expected a whole number of at least 0, got '-1'"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--implementation", "cuda"], "argument --implementation: invalid choice: 'cuda'"),
        (["--context", "4090"], "--context 4090 and 256 decoded tokens make 4346, the model has at most 4096"),
        (["--pages", "2"], "--pages 2: too few for request"),
        (["--pages", "2000000000"], "GiB are available"),
        (["--batch", "2000000000"], "GiB are available"),
        (["--batch", "2000000000", "--pages", "3"], "a step of 2000000000 rows x 4 drafts"),
        (["--draft-tokens", "2000000000", "--pages", "3"], "a step of 3 rows x 2000000000 drafts"),
        (["--batch", "99999999999"], "at most 2**31 - 1, got '99999999999'"),
        (["--trace", "absent.csv"], "--trace: No such file or directory: absent.csv"),
        (["--trace", "x", "--context", "5"], "--context is for synthetic requests and does not go with --trace"),
        (["--config", "absent.json"], "--config: No such file or directory: absent.json"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(capsys, small, arguments, message):
    code, out, err = run(capsys, *small, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_trace_errors_reach_the_user_with_file_and_line(capsys, small, tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("ContextTokens,GeneratedTokens\n10,5\n10,-5\n")
    code, _, err = run(capsys, *small, "--trace", file)
    assert code == 2
    assert f"error: {file}:3: GeneratedTokens: expected 1 to 4096 tokens, got -5" in err


def test_configuration_errors_name_the_field(capsys, small, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({**SMALL, "swa_kv_lora_rank": 0}))
    code, _, err = run(capsys, *small, "--config", file)
    assert code == 2
    assert "--config: swa_kv_lora_rank: expected a whole number of at least 1, got 0" in err


def test_released_geometry(capsys):
    code, result = run_json(capsys, "decode", "--layers", 1, "--batch", 2, "--steps", 3, "--context", 900)
    assert code == 0
    assert result["settings"]["dtype"] == "bfloat16"
    assert result["settings"]["window"] == 513
    assert result["settings"]["implementation"] in ("xla", "mosaic_gpu")
    assert result["bytes_per_request"] == 10 * 64 * 2176
    assert 1e-7 < result["worst"]["cosine"] < 1e-5


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says why the GPU kernel cannot run on a CPU")
def test_an_implementation_that_cannot_run_says_why(capsys, small):
    code, _, err = run(capsys, *small, "--implementation", "mosaic_gpu")
    assert code == 2
    assert "--implementation mosaic_gpu: implementation 'mosaic_gpu' cannot run" in err
    assert err.count("\n") == 1
