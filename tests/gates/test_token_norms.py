from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tasks.gates.token_norms import TokenNorms


def test_median_and_deviation_are_those_of_all_tokens_within_a_percent():
    norms = np.exp(np.random.default_rng(0).normal([0.0, 5.0], [0.2, 1.0], (20_001, 2))).astype(np.float32)
    counted = TokenNorms(2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(counted.add, np.array_split(norms, 50)))
    for slot in range(2):
        logs = np.log(norms[:, slot])
        assert counted.median(slot) == pytest.approx(np.exp(np.median(logs)), rel=0.01)
        assert counted.deviation(slot) == pytest.approx(1.4826 * np.median(np.abs(logs - np.median(logs))), abs=0.01)


def test_what_is_not_finite_does_not_count():
    counted = TokenNorms(1)
    counted.add(np.array([[2.0], [np.nan], [-np.nan], [np.inf], [3e38]], np.float32))
    assert counted.median(0) == pytest.approx(2.0, rel=0.01)


def test_a_slot_without_a_finite_norm_has_no_median():
    assert np.isnan(TokenNorms(1).median(0))


def test_zeros_count():
    counted = TokenNorms(1)
    counted.add(np.zeros((3, 1), np.float32))
    assert counted.median(0) < 1e-38
