"""Readers of text: what trainers print, and what is odd in it, on small made-up logs."""

import math

import pytest

from tests.reading import NO_STEPS, check, read_text

NAN, INF = math.nan, math.inf
__all__ = ["read_text"]  # a fixture


# Text, norms, steps and notes; the last column is the name of the norm.
TEXT = {
    "llm.c, compact": (
        "s:0 tel:11.0\ns:0 trl:10.5 lr:0.001 norm:14.5\ns:1 trl:10.4 lr:0.002 norm:0.27\ns:2 tel:3.0\ns:2 eval:0.3\n",
        [14.5, 0.27],
        [0, 1],
        [],
        "norm",
    ),
    "llm.c, z-scores in parentheses": (
        "| train data pattern | fineweb_*.bin |\n"
        "step    1/100 | loss 11.01 (+nanz)| norm 15.07 (+nanz)| lr 8.6e-07 | 3613.42 ms\n"
        "Once upon the norm 3 came\n"
        "step    2/100 | loss 10.95 (-1.5z)| norm 0.2241 (-0.23z)| lr 1.7e-06 | 3620.10 ms\n",
        [15.07, 0.2241],
        [1, 2],
        ["1 line has norm but no step; left out"],
        "norm",
    ),
    "nanoGPT": (
        "validation loss: 10.9\n"
        "step     0 | loss: 10.955010 | lr 6.0000e-04 | norm: 15.3420 | dt: 19152.47ms | tok/sec: 27374.43\n"
        "rank 1 sample 2: Hello, I'm a language model, and the norm 5 of it\n"
        "step     1 | loss: 10.014891 | lr 6.0000e-04 | norm: 3.8393 | dt: 394.95ms | tok/sec: 1327465.30\n",
        [15.342, 3.8393],
        [0, 1],
        ["1 line has norm but no step; left out"],
        "norm",
    ),
    "Megatron-LM": (
        " [2024-05-01 10:00:01] iteration       10/     100 | consumed samples:   640 | elapsed time per iteration"
        " (ms): 1234.5 | lm loss: 1.2E+00 | loss scale: 1.0 | grad norm: 1.234 | params norm: 812.5 | number of"
        " skipped iterations:   0 |\n"
        " [2024-05-01 10:00:09] iteration       20/     100 | consumed samples:  1280 | elapsed time per iteration"
        " (ms): 1234.5 | lm loss: 1.1E+00 | loss scale: 1.0 | grad norm: 0.9E+01 | params norm: 813.5 | number of"
        " skipped iterations:   0 |\n",
        [1.234, 9.0],
        [10, 20],
        ["every 10th step is logged"],
        "grad norm",
    ),
    "torchtitan, coloured": (
        "[rank0]:2024-05-01 10:00:01 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1  \x1b[33mgrad_norm:  1.2  "
        "\x1b[36mtps: 2,345\x1b[39m\n"
        "[rank0]:2024-05-01 10:00:02 - root - INFO - \x1b[31mstep:  2  \x1b[32mloss:  8.0  \x1b[33mgrad_norm:  1.1  "
        "\x1b[36mtps: 2,346\x1b[39m\n",
        [1.2, 1.1],
        [1, 2],
        [],
        "grad_norm",
    ),
    "Hugging Face, dicts between redrawn bars": (
        "  1%|#         | 1/100 [00:01<01:39, 1.0s/it]\r{'loss': 1.2, 'grad_norm': 0.5, 'learning_rate': 1e-05}\n"
        "  2%|#         | 2/100 [00:02<01:38, 1.0s/it]\r{'loss': '1.1', 'grad_norm': 'nan', 'learning_rate': 1e-05}\n"
        "{'eval_loss': 1.0, 'epoch': 1.0}\n",
        [0.5, NAN],
        [0, 1],
        [NO_STEPS, "1 norm is not finite, first at step 1"],
        "grad_norm",
    ),
    "tqdm, redrawn": (
        "\r  0%|          | 0/3 [00:00<?, ?it/s]"
        "\r 33%|###       | 1/3 [00:01<00:02,  1.0it/s, loss=3, grad_norm=9]"
        "\r 33%|###       | 1/3 [00:01<00:02,  1.0it/s, loss=3, grad_norm=0.5]"
        "\r 67%|######    | 2/3 [00:02<00:01,  1.0it/s, loss=3, grad_norm=0.5]"
        "\r 67%|######    | 2/3 [00:02<00:01,  1.0it/s, loss=2, grad_norm=0.25]\n",
        [0.5, 0.25],
        [1, 2],
        ["a progress bar drew 2 rows anew; of each step the last is read"],
        "grad_norm",
    ),
    "Windows line ends are no redrawing": (
        "step=1 grad_norm=0.5\r\nstep=1 grad_norm=0.25\r\nstep=2 grad_norm=0.125\r\n",
        [0.5, 0.25, 0.125],
        [1, 1, 2],
        ["1 row repeats an earlier step, first 1; kept in file order"],
        "grad_norm",
    ),
    "ranks interleaved": (
        "[rank1]: step 1 loss 3.0 grad_norm 0.5\n[rank0]: step 1 loss 3.1 grad_norm 0.4\n"
        "[rank1]: step 2 loss 2.0 grad_norm 0.3\n[rank0]: step 2 loss 2.1 grad_norm 0.2\n",
        [0.5, 0.3],
        [1, 2],
        ["2 ranks log their rows; those of rank 1 are read"],
        "grad_norm",
    ),
    "loguru, and other norms first": (
        "10:00:00.123 | INFO     | train:main:12 - step=7, param_norm=80.5, weight norm: 9.5, grad_norm=0.5\n"
        "10:00:00.456 | INFO     | train:main:12 - step=8, param_norm=80.6, weight norm: 9.4, grad_norm=-inf\n",
        [0.5, -INF],
        [7, 8],
        ["1 norm is not finite, first at step 8", "1 norm is negative, first at step 8"],
        "grad_norm",
    ),
    "a bare norm beside that of the weights": (
        "step 1 weight norm: 9.5 norm: 0.5\nstep 2 weight norm: 9.5 norm: 0.4\n",
        [0.5, 0.4],
        [1, 2],
        [],
        "norm",
    ),
    "losses of both kinds": (
        "iter 5 val loss 9.0 train loss 3.0 norm nan\niter 6 val loss 9.0 train loss nan norm 0.5\n",
        [NAN, 0.5],
        [5, 6],
        ["1 norm is not finite, first at step 5"],
        "norm",
    ),
    "a global step beside one that restarts": (
        "".join(
            f"epoch {e} step {s} global_step {2 * e + s} gnorm {e + s + 1}.5\n"
            for e in (0, 1)
            for s in (0, 1)
        ),
        [1.5, 2.5, 2.5, 3.5],
        [0, 1, 2, 3],
        ["step goes backwards 1 time and repeats in 2 rows; global_step is read in its place"],
        "gnorm",
    ),
    "tensors": (
        "step: 1 total grad norm: tensor(0.5, device='cuda')\nstep: 2 total grad norm: tensor(0.25, device='cuda')\n",
        [0.5, 0.25],
        [1, 2],
        [],
        "grad norm",
    ),
    "JSON within prefixes": (
        'INFO {"step": 1, "grad/norm/total": 0.5, "params/norm/total": 80.0}\n'
        'INFO {"step": 2, "grad/norm/total": NaN, "params/norm/total": 81.0}\n',
        [0.5, NAN],
        [1, 2],
        ["1 norm is not finite, first at step 2"],
        "grad/norm/total",
    ),
    "a norm cut at the end of the file": (
        "step 1 norm 0.5\nstep 2 norm 0.25\nstep 3 norm 0.1",
        [0.5, 0.25],
        [1, 2],
        ["the last line has no line end, so its norm 0.1 may be cut off and is left out"],
        "norm",
    ),
    "a line cut behind its norm": (
        "step 1 | norm 0.5 | 3.1 ms\nstep 2 | norm 0.25 | 3.",
        [0.5, 0.25],
        [1, 2],
        ["the last line is cut off or runs into other text: 'step 2 | norm 0.25 | 3.'"],
        "norm",
    ),
    "a line cut ahead of its norm": (
        "step 1 | loss 3.5 | norm 0.5\nstep 2 | loss 3.5 | norm 0.25\nstep 3 | lo",
        [0.5, 0.25],
        [1, 2],
        ["the last line is cut off or runs into other text: 'step 3 | lo'"],
        "norm",
    ),
    "another message glued behind": (
        "step 1 | norm 0.5 | 3.1 ms\nstep 2 | norm 0.25 | 3.error: job CANCELLED\n",
        [0.5, 0.25],
        [1, 2],
        ["the last line is cut off or runs into other text: 'step 2 | norm 0.25 | 3.error: job CANCELLED'"],
        "norm",
    ),
    "another message glued onto the number": (
        "step 1 | norm 0.5\nstep 2 | norm 0.2error: job CANCELLED\nstep 3 | norm 0.125\n",
        [0.5, 0.125],
        [1, 3],
        ["1 row has no number for a norm, first '0.2error'; left out", "every 2nd step is logged"],
        "norm",
    ),
    "a norm in a line without a step": (
        "step 1 grad_norm 0.5\nfinal grad_norm 0.4\nstep 2 grad_norm 0.25\n",
        [0.5, 0.25],
        [1, 2],
        ["1 line has grad_norm but no step; left out"],
        "grad_norm",
    ),
    "bytes that are no text": (
        b"step 1 norm 0.5 \xff\xfe\nstep 2 norm 0.25 \x00\n",
        [0.5, 0.25],
        [1, 2],
        [],
        "norm",
    ),
}


@pytest.mark.parametrize("name", TEXT)
def test_text(name, read_text):
    content, norms, steps, notes, column = TEXT[name]
    check(read_text(content), norms, steps, notes, format="text log", column=column)


def test_losses_of_text_are_those_of_training(read_text):
    assert read_text(TEXT["losses of both kinds"][0]).loss.tolist() == pytest.approx([3.0, NAN], nan_ok=True)
    assert read_text(TEXT["llm.c, compact"][0]).loss.tolist() == [10.5, 10.4]
    assert read_text(TEXT["Megatron-LM"][0]).loss.tolist() == [1.2, 1.1]
    assert read_text(TEXT["loguru, and other norms first"][0]).loss is None


def test_names_are_learned_however_late_the_rows_begin(read_text):
    header = "(ln_1): LayerNorm((768,), eps=1e-05)\nmax_grad_norm: 1.0\n" * 5000
    check(read_text(header + "step 4 grad_norm 0.5\nstep 5 grad_norm 0.25\n"), [0.5, 0.25], [4, 5])


@pytest.mark.parametrize("behind", ["", "\n", "Killed\n", "slurmstepd: error: *** STEP CANCELLED ***\n"])
def test_a_dict_of_norms_that_is_cut_off_is_told(read_text, behind):
    row = (
        "x.py:36 in record -- step={i}, loss=0.1{i}, grad_norm={{'0_default': 1.{i}5, '1_fp32': 0.0}}, n=4\n"
    )
    rows = [row.format(i=i) for i in range(4)]
    begun, closed = rows[3].index("{") + 1, rows[3].index("}")
    for end in range(begun, closed + 1):
        recording = read_text("".join(rows[:3]) + rows[3][:end] + behind)
        assert recording.norms.tolist() == [1.05, 1.15, 1.25]
        assert any("cut off" in note for note in recording.notes), end


def test_two_runs_whose_last_row_is_cut_off_before_its_epoch(read_text):
    row = "{{'loss': 0.1{i}, 'grad_norm': 1.{i}5, 'epoch': 0.{i}}}\n"
    rows = [row.format(i=i) for i in (2, 4, 6)]
    last = rows[2][: rows[2].index(" 'epoch'")]
    recording = read_text("".join(rows) + "".join(rows[:2]) + last)
    assert recording.norms.tolist() == [1.25, 1.45, 1.65, 1.25, 1.45, 1.65]
    assert recording.starts == (0, 3)


def test_a_row_without_a_step_that_runs_into_other_text_is_told(read_text):
    row = "{i}/400000 ━━━━ 1:05 103ms/step - grad_norm: 1.{i} - loss: 0.{i}\n"
    rows = [row.format(i=i) for i in range(3)]
    last = rows[2][: rows[2].index("- loss")]
    recording = read_text("".join(rows[:2]) + last + "srun: error: node-7: task 0: CANCELLED\n")
    assert recording.norms.tolist() == [1.0, 1.1, 1.2]
    assert any("runs into other text" in note for note in recording.notes)
