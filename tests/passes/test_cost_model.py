"""What the cost model must say, whatever its constants are."""

import itertools
from dataclasses import replace

import pytest

from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules import cost_model
from gossamer.passes.schedules.cost_model import UNKNOWN_TOKENS, Prediction
from gossamer.passes.schedules.machine_speed import Machine

LAYERS = [(m, k) for m in (64, 768, 3072) for k in (64, 768, 3072)]
TOKENS = [1, 2, 3, 8, 17, 64, 65, 128, 1000]
DTYPES = ["f32", "f64", "bf16", "f16"]
DENSITIES = [0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0]


def predict(m: int, k: int, tokens: int | None, density: float, dtype: str, bits: int, threads: int = 1) -> Prediction:
    return cost_model.predict(Matrix(m, k, 1, dtype, bits, density), tokens, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_times_are_positive_and_gain_is_their_ratio(dtype: str) -> None:
    for (m, k), t, density, bits in itertools.product(LAYERS, TOKENS, DENSITIES, (128, 256, 512)):
        prediction = predict(m, k, t, density, dtype, bits)
        assert prediction.dense_us > 0
        assert prediction.sparse_us > 0
        assert prediction.gain == prediction.dense_us / prediction.sparse_us


@pytest.mark.parametrize("dtype", DTYPES)
def test_fewer_nonzeros_never_cost_more(dtype: str) -> None:
    for (m, k), t in itertools.product(LAYERS, TOKENS):
        costs = [predict(m, k, t, density, dtype, 512).sparse_us for density in DENSITIES]
        assert costs == sorted(costs)


def test_the_dense_cost_is_that_of_the_shape() -> None:
    assert len({predict(768, 768, 64, density, "f32", 512).dense_us for density in DENSITIES}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 1000])
def test_a_dense_weight_stays_dense(dtype: str, tokens: int) -> None:
    """But for those numbers of tokens for which dense products are less efficient than kernels that multiply by all."""
    assert all(predict(m, k, tokens, 1.0, dtype, 512).gain < 1 for m, k in LAYERS)


def test_a_pruned_layer_of_a_transformer_pays() -> None:
    """3072 x 768 at one tenth of the weights, 128 tokens: three times faster when measured."""
    assert 2 < predict(3072, 768, 128, 0.1, "f32", 512).gain < 6


def test_blocks_make_a_layer_faster_and_have_schedules_of_their_own() -> None:
    anywhere = Matrix(3072, 768, 1, "f32", 512, 0.1)
    for block in ((16, 1), (4, 4), (2, 2)):
        found = cost_model.predict(replace(anywhere, block=block), 128)
        assert found.schedule in ("block", "blockvec")
        assert found.gain > 1.1 * cost_model.predict(anywhere, 128).gain
    for block in ((16, 1), (4, 4), (1, 16)):
        assert cost_model.predict(replace(anywhere, block=block), 1).schedule == "blockvec"


def test_a_call_costs_more_than_a_small_layer() -> None:
    assert predict(16, 16, 16, 0.01, "f32", 512).gain < 1


def test_narrow_types_gain_less() -> None:
    """Dense layers of bf16 have instructions of their own."""
    for (m, k), t in itertools.product(LAYERS, TOKENS):
        assert predict(m, k, t, 0.1, "bf16", 512).gain <= predict(m, k, t, 0.1, "f32", 512).gain


def test_narrower_vectors_are_slower() -> None:
    for dtype in DTYPES:
        slow, fast = (predict(3072, 768, 128, 0.1, dtype, bits) for bits in (256, 512))
        assert slow.dense_us > fast.dense_us
        assert slow.sparse_us > fast.sparse_us


def test_more_threads_divide_all_but_the_call() -> None:
    one, two = (predict(3072, 768, 128, 0.1, "f32", 512, threads) for threads in (1, 2))
    assert two.dense_us == pytest.approx(one.dense_us / 2)
    assert one.sparse_us / 2 < two.sparse_us < one.sparse_us


def test_threads_that_gain_less_than_it_takes_to_meet_do_not() -> None:
    one, two = (predict(64, 64, 1, 0.1, "f32", 512, threads) for threads in (1, 2))
    assert two.by_schedule == one.by_schedule


def test_loads_that_are_shared_by_fewer_tokens_cost_more_where_there_is_one_a_cycle() -> None:
    """Zen 4: filled up rows, whose values are loaded four at a time, beat others at 90 %; at 50 % pairs of rows share loads."""
    zen = Machine.usual(512, fmas=1)
    for tokens in (32, 128):
        assert cost_model.predict(Matrix(3072, 768, 1, "f32", 512, 0.1), tokens, 1, zen).schedule == "broadcast"
    assert cost_model.predict(Matrix(3072, 768, 1, "f32", 512, 0.5), 128, 1, zen).schedule == "rowpairs"


def test_rows_of_different_length_cost_what_works_on_several_of_them() -> None:
    even, skewed = (
        dict(cost_model.predict(Matrix(3072, 768, 1, "f32", 512, 0.1, skew=s), 8).by_schedule) for s in (1.25, 16.0)
    )
    assert skewed["broadcast"] == even["broadcast"]
    assert skewed["rowpairs"] == even["rowpairs"]  # rows of equal length are paired
    assert skewed["lookup"] > 1.5 * even["lookup"]


def test_rows_of_equal_length_need_no_evening_out() -> None:
    anywhere = Matrix(3072, 768, 1, "f32", 512, 0.25)
    for even in (replace(anywhere, nm=(1, 4)), replace(anywhere, block=(16, 1))):
        assert even.evenly(16, 16) and not even.evenly(32, 2)
        us = [dict(cost_model.predict(matrix, 8).by_schedule)["lookup"] for matrix in (even, anywhere)]
        assert us[0] < 0.9 * us[1]


def test_the_longest_row_beyond_chance() -> None:
    """16 of 3072 lognormal rows reach e^1.77 spreads where all reach e^3.5 spreads."""
    random, skewed = (Matrix(3072, 768, 1, "f32", 512, 0.1, skew=skew) for skew in (1.25, 12.0))
    assert [random.longest_of(n) for n in (1, 2, 16)] == [1.0, 1.0, 1.0]
    assert skewed.longest_of(1) == 1.0
    assert skewed.longest_of(3072) == pytest.approx(12 / 1.38, rel=0.05)
    assert skewed.longest_of(16) == pytest.approx((12 / 1.38) ** (1.77 / 3.5), rel=0.1)


def test_an_unknown_number_of_tokens_counts_as_some() -> None:
    assert predict(768, 768, None, 0.1, "f32", 512) == predict(768, 768, UNKNOWN_TOKENS, 0.1, "f32", 512)


def test_no_tokens_count_as_one() -> None:
    assert predict(768, 768, 0, 0.1, "f32", 512) == predict(768, 768, 1, 0.1, "f32", 512)


def test_an_unknown_type_has_no_cost() -> None:
    with pytest.raises(KeyError):
        predict(768, 768, 32, 0.1, "i4", 512)
