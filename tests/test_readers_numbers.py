"""Numbers in every spelling: each is read whole, or not at all and that is told."""

import math

import numpy as np
import pytest

from tests.reading import reads, same, told

NAN = math.nan
__all__ = ["reads"]  # a fixture


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("1.2e+2", 120.0),
        ("1.2E+02", 120.0),
        ("12.5K", 12500.0),
        ("1.5M", 1.5e6),
        ("12_345", 12345.0),
        ("+0.5", 0.5),
        (".5", 0.5),
        ("1,234,567.5", 1234567.5),
        ("1.234.567,5", 1234567.5),
        ("12'345.5", 12345.5),
        ("inf", math.inf),
        ("-NaN", NAN),
    ],
)
@pytest.mark.parametrize(
    "line", ["step {} | loss 3.1 | norm {} | lr 0.1\n", "step={}, grad_norm={}, lr=0.1\n"]
)
def test_a_number_is_read_whole(written, number, line, reads):
    content = "".join(line.format(i, written) for i in range(1, 4))
    same(reads("spelling", content), [number] * 3, [1, 2, 3])


@pytest.mark.parametrize(
    "written", ["0.5x", "12%", "1.2.3", "1e5e", "0,5,1", "3ab", "1.5e+", "10^5", "0.5±0.1"]
)
def test_or_not_at_all(written, reads):
    content = (
        f"step 1 | loss 3.1 | norm 0.5\nstep 2 | loss 3.1 | norm {written} |\nstep 3 | loss 3.1 | norm 0.25\n"
    )
    recording = reads("spelling", content)
    same(recording, [0.5, 0.25], [1, 3])
    told(recording, "1 row has no number for a norm", written)


WRAPPED = ["np.float64({})", "tensor({}, device='cuda:0')", "Array({}, dtype=float32)", "jnp.float32({})"]
WRAPPED += [
    "Array({}, dtype=float32, weak_type=True)",
    "[{}]",
    "torch.tensor([{}])",
    "Decimal('{}')",
    "float({})",
]
WRAPPED += [
    "<tf.Tensor: shape=(), dtype=float32, numpy={}>",
    "DTensor(local_tensor={}, device_mesh=DeviceMesh([0]))",
]


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize(
    "line", ["step={}, grad_norm={}, lr=0.1", "step: {} grad_norm: {} lr: 0.1", "step {} grad_norm {}"]
)
def test_wrapped_numbers(wrapper, line, reads):
    content = "".join(line.format(i, wrapper.format(i / 8)) + "\n" for i in range(4))
    same(reads("wrapper", content), np.arange(4) / 8, range(4))
    same(reads("wrapper", content, column="grad_norm"), np.arange(4) / 8, range(4))


@pytest.mark.parametrize(
    "numbers", ["0.5 0.25", "0.5, 0.25, 0.75", "[0.5, 0.25]", "(0.5, 0.25)", "0.5/1.0", "0.5 -> 0.25"]
)
@pytest.mark.parametrize("line", ["step {} | grad_norm: {} | lr 0.1\n", "step {} grad_norm {} lr 0.1\n"])
def test_several_numbers(numbers, line, reads):
    recording = reads("several", "".join(line.format(i, numbers) for i in range(3)))
    same(recording, [0.5] * 3, range(3))
    told(recording, "3 lines have several numbers after grad_norm", "the first is read")


@pytest.mark.parametrize(
    "behind", ["3613 ms", "12.3 tok/s", "(+0.10z)", "| 3.5 |", "at 12:30:45", "lr 0.1", "(0.4)"]
)
def test_other_numbers_behind(behind, reads):
    content = "".join(f"step {i} | norm {i}.5 {behind}\n" for i in range(3))
    same(reads("several", content), [0.5, 1.5, 2.5], range(3), notes=())


@pytest.mark.parametrize("wrapper", ["[{}]", "({})", "tensor({})", "np.float64({})"])
@pytest.mark.parametrize(("written", "number"), [("nan", NAN), ("inf", math.inf), ("-inf", -math.inf)])
def test_wrapped_numbers_that_are_not_finite(wrapper, written, number, reads):
    content = "".join(
        f"step {i} | norm {wrapper.format(x)} (+nanz)\n" for i, x in enumerate([0.5, written, 0.25])
    )
    same(reads("wrapper", content), [0.5, number, 0.25], [0, 1, 2])
