from dots_jax.workload.synthetic import synthetic_requests


def test_lengths_are_mixed_repeatable_and_bounded():
    requests = synthetic_requests(8, context=8192, output=100, seed=3)
    contexts = sorted(request.context for request in requests)
    assert requests == synthetic_requests(8, context=8192, output=100, seed=3)
    assert requests != synthetic_requests(8, context=8192, output=100, seed=4)
    assert contexts[0] < 64
    assert contexts[-1] == 8192
    assert len(set(contexts)) == 8
    assert {request.output for request in requests} == {100}


def test_one_request_has_the_asked_context():
    assert [r.context for r in synthetic_requests(1, context=700, output=1, seed=0)] == [700]


def test_tiny_contexts_stay_positive():
    assert min(r.context for r in synthetic_requests(5, context=1, output=1, seed=0)) == 1
