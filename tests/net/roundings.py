"""Breaks of roundings, of the loss scale, and of values that a step computes."""

from __future__ import annotations

from tests.net.runner import Break

ROUNDINGS = (
    Break(
        name="rounding_to_nearest",
        says=(
            "bfloat16 main parameters are rounded to the nearest value: updates below their spacing are lost."
        ),
        file="zeroshard/stepping/rounding.py",
        find="carried = bits.bitwise_and_(lower).add_(words)",
        replace="carried = bits.fill_(0x8000).bitwise_and_(lower).add_(words)",
        tests=(
            "tests/sharding/test_rounding.py::test_values_round_to_their_neighbours_and_are_right_on_average",
        ),
    ),
    Break(
        name="compiled_rounding_cuts_off",
        says="The compiled pass rounds bfloat16 toward zero; torch operations still round stochastically.",
        file="zeroshard/optim/eightbit/kernels.py",
        find="carried = np.uint32(values[i] + np.uint32(bits[i])) if magnitude < _INFINITY else values[i]",
        replace="carried = values[i]",
        tests=("tests/optim/eightbit/test_bfloat16.py",),
    ),
    Break(
        name="a_seed_of_rounding_for_each_rank",
        says="Ranks round with seeds of their own, so bits depend on the number of ranks.",
        file="zeroshard/stepping/rounding.py",
        find='"seed of stochastic rounding")[0], 0)',
        replace='"seed of stochastic rounding")[axis.rank], 0)',
        tests=(
            "tests/distributed/test_bfloat16_main.py::"
            "test_every_optimizer_at_every_stage_has_the_bits_of_float32_steps_rounded_by_hand",
        ),
    ),
    Break(
        name="the_same_random_bits_in_each_step",
        says="The random bits of rounding do not depend on the number of the step.",
        file="zeroshard/stepping/rounding.py",
        find='f"{self.seed}:{self.step}:{name}"',
        replace='f"{self.seed}:0:{name}"',
        tests=(
            "tests/sharding/test_rounding.py::"
            "test_a_key_is_a_hash_of_seed_step_and_name_and_differs_with_each",
        ),
    ),
    Break(
        name="random_bits_are_counted_from_the_slice",
        says=(
            "A slice is rounded with the random bits of the beginning of the parameter, not of its own place."
        ),
        file="zeroshard/stepping/rounding.py",
        find="round_into(main, p.detach(), *self._bits(p))",
        replace="round_into(main, p.detach(), *self._bits(p)._replace(start=0))",
        tests=(
            "tests/distributed/test_bfloat16_main.py::"
            "test_every_optimizer_at_every_stage_has_the_bits_of_float32_steps_rounded_by_hand",
        ),
    ),
    Break(
        name="codes_are_off_by_one_at_midpoints",
        says="A value between two codes of 8 bits takes the upper one where it lies on their midpoint.",
        file="zeroshard/optim/eightbit/blocks.py",
        find="room = torch.where(starts < _SIGN, mask - at_midpoint, at_midpoint)",
        replace="room = torch.where(starts < _SIGN, mask - at_midpoint + 1, at_midpoint)",
        tests=(
            "tests/optim/eightbit/test_codebook.py::"
            "test_codes_are_the_nearest_at_and_around_every_value_and_midpoint",
        ),
    ),
    Break(
        name="the_scale_of_another_block",
        says="Codes of 8 bits are read with the scale of the first block.",
        file="zeroshard/optim/eightbit/kernels.py",
        find="values[state], absmax[state][at])",
        replace="values[state], absmax[state][0])",
        tests=("tests/optim/eightbit/test_optimizers.py::test_codes_and_scales_are_those_of_the_reference",),
    ),
    Break(
        name="the_scale_of_another_block_in_torch_operations",
        says="Without numba, codes of 8 bits are read with the scale of the first block.",
        file="zeroshard/optim/eightbit/blocks.py",
        find="mul_(self.absmax[: values.numel() // BLOCK, None])",
        replace="mul_(self.absmax[:1, None])",
        tests=("tests/optim/eightbit/test_optimizers.py::test_codes_and_scales_are_those_of_the_reference",),
    ),
    Break(
        name="quotients_on_a_gpu_are_approximate",
        says="The kernel of a GPU divides by Triton's own division, which is off by some bits.",
        file="zeroshard/optim/eightbit/kernels_gpu.py",
        find="return tl.div_rn(a, b)",
        replace="return a / b",
        tests=(
            "tests/optim/eightbit/test_kernels_gpu.py::test_a_compiled_step_rounds_each_operation_to_nearest",
        ),
    ),
    Break(
        name="a_gpu_fuses_multiplications_and_additions",
        says="The kernel of a GPU fuses operations, so its bits are not those of the CPU.",
        file="zeroshard/optim/eightbit/kernels_gpu.py",
        find="enable_fp_fusion=False",
        replace="enable_fp_fusion=True",
        tests=(
            "tests/optim/eightbit/test_kernels_gpu.py::test_a_compiled_step_rounds_each_operation_to_nearest",
        ),
    ),
    Break(
        name="a_gpu_forgets_nan_in_scales",
        says="The scale of a block with nan is that of its other values on a GPU.",
        file="zeroshard/optim/eightbit/kernels_gpu.py",
        find="largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)",
        replace="largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)",
        tests=("tests/optim/eightbit/test_kernels_gpu.py::test_interpreted_steps_have_the_bits_of_the_cpu",),
    ),
    Break(
        name="a_cut_block_is_filled_up_with_code_0",
        says="The last block of a parameter is filled up with the most negative code on a GPU.",
        file="zeroshard/optim/eightbit/kernels_gpu.py",
        find="codes = tl.load(state[0] + at, here, zero)",
        replace="codes = tl.load(state[0] + at, here, 0)",
        tests=("tests/optim/eightbit/test_kernels_gpu.py::test_interpreted_steps_have_the_bits_of_the_cpu",),
    ),
    Break(
        name="a_gpu_counts_random_bits_from_the_slice",
        says="A slice is rounded on a GPU with the random bits of the beginning of the parameter.",
        file="zeroshard/stepping/bfloat16_gpu.py",
        find="place = start + at",
        replace="place = at",
        tests=(
            "tests/optim/eightbit/test_kernels_gpu.py::test_interpreted_rounding_has_the_bits_of_the_cpu",
        ),
    ),
    Break(
        name="each_kind_of_number_compiles_anew",
        says="A step on a GPU is compiled again for keys and places of another size.",
        file="zeroshard/optim/eightbit/kernels_gpu.py",
        find="    count: tl.int64,\n    key: tl.uint64,\n",
        replace="    count: tl.tensor,\n    key: tl.tensor,\n",
        tests=(
            "tests/optim/eightbit/test_kernels_gpu.py::test_other_counts_keys_starts_and_hyperparameters_compile_nothing",
        ),
    ),
    Break(
        name="initialize_does_not_try_kernels",
        says="The kernels of a GPU are first compiled in the first step.",
        file="zeroshard/optim/adopted.py",
        find="        optimizer.compile_kernels(device)\n",
        replace="",
        tests=(
            "tests/optim/eightbit/test_kernels_gpu.py::test_initialize_tries_the_kernel_of_each_rule_and_of_rounding",
        ),
    ),
    Break(
        name="micro_batches_are_added_in_bfloat16",
        says="Gradients that wait for a later reduction are added up in the reduce dtype.",
        file="zeroshard/sharding/gradients.py",
        find="self._take(self.buffer.plan.wide_dtype if self._defer else self._reduce_dtype)",
        replace="self._take(self._reduce_dtype)",
        tests=(
            "tests/distributed/test_precision.py::"
            "test_micro_batches_are_added_in_fp32_and_rounded_once_on_the_wire",
        ),
    ),
    Break(
        name="sums_of_a_step_are_rounded_each_time",
        says="Reduced sums of several micro-batches go into a p.grad of bfloat16 after each of them.",
        file="zeroshard/sharding/gradients.py",
        find="self.is_kept = more and not defer and plan.wide_dtype != plan.main_dtype",
        replace="self.is_kept = False",
        tests=(
            "tests/distributed/test_bfloat16_main.py::"
            "test_micro_batches_add_up_in_float32_and_are_rounded_once",
        ),
    ),
    Break(
        name="the_loss_scale_does_not_fall",
        says="An overflow leaves the dynamic loss scale as it is.",
        file="zeroshard/stepping/guard.py",
        find="BACKOFF = 0.5",
        replace="BACKOFF = 1.0",
        tests=("tests/optim/test_scaling.py",),
    ),
    Break(
        name="the_loss_scale_does_not_grow",
        says="Steps without an overflow leave the dynamic loss scale as it is.",
        file="zeroshard/stepping/guard.py",
        find="GROWTH = 2.0",
        replace="GROWTH = 1.0",
        tests=("tests/optim/test_scaling.py",),
    ),
    Break(
        name="small_gradients_are_scaled_up",
        says="Clipping scales gradients up to the largest norm where theirs is smaller.",
        file="zeroshard/stepping/clipping.py",
        find="torch.clamp(max_norm / (norm + _EPSILON), max=1.0)",
        replace="max_norm / (norm + _EPSILON)",
        tests=(
            "tests/distributed/test_clipping.py::"
            "test_gradients_are_scaled_by_the_factor_of_torch_and_only_when_the_norm_is_too_large",
        ),
    ),
    Break(
        name="losses_are_not_divided_by_micro_batches",
        says="backward() does not divide a loss by the number of micro-batches of a step.",
        file="zeroshard/engine.py",
        find="factored = factored / divisor",
        replace="pass",
        tests=("tests/distributed/test_accumulation.py::test_accumulated_gradients_are_those_of_ddp",),
    ),
    Break(
        name="averages_do_not_follow_steps",
        says="A step of the engine does not update the moving averages of parameters.",
        file="zeroshard/engine.py",
        find="averages.update()",
        replace="pass",
        tests=(
            "tests/distributed/test_averages.py::test_the_steps_that_the_engine_counts_update_an_average",
        ),
    ),
    Break(
        name="a_recomputation_drops_other_elements",
        says=(
            "A pipeline's recomputation draws new random numbers, so it drops other elements than the "
            "forward."
        ),
        file="zeroshard/parallel/pipeline/runner.py",
        find="set_random_states(call.random)",
        replace="pass",
        tests=("tests/parallel/pipeline/test_random.py::test_a_recomputation_drops_the_same_elements_again",),
    ),
)
