"""Breaks of exchanges: a collective that is left out, or brings other values than it should."""

from __future__ import annotations

from tests.net.runner import Break

EXCHANGES = (
    Break(
        name="sums_in_place_of_means",
        says="A reduce-scatter adds the gradients of all ranks up and does not divide them by their number.",
        file="zeroshard/sharding/gradients.py",
        find="is not None else 1.0 / self._context.axes.dp.size",
        replace="is not None else 1.0",
        tests=("test_gradients_are_averaged_and_what_no_rank_used_stays_without",),
    ),
    Break(
        name="a_hook_gets_means",
        says="Gradients are divided by the number of ranks before a gradient hook, which divides them again.",
        file="zeroshard/sharding/gradients.py",
        find="self._scale = 1.0 if hook is not None else 1.0 /",
        replace="self._scale = 1.0 /",
        tests=("test_hooks_of_torch_give_the_bits_of_ddp",),
    ),
    Break(
        name="signs_leave_no_errors",
        says="What the signs of 1-bit Adam leave out is lost.",
        file="zeroshard/optim/onebit.py",
        find="error.copy_(value - torch.where(sign, scale, -scale)).view(-1)[size:] = 0",
        replace="error.view(-1)[size:] = 0",
        tests=("test_steps_are_those_of_a_simulation_of_all_workers",),
    ),
    Break(
        name="each_bucket_is_the_last_one",
        says="A bucket counts as the last one of its backward before the others have come.",
        file="zeroshard/gradient_hooks.py",
        find="is_last = index not in self._called and len(self._called) + 1 == len(self._buckets)",
        replace="is_last = True",
        tests=("test_power_sgd_over_several_units_gives_the_bits_of_ddp_over_as_many_buckets",),
    ),
    Break(
        name="deferred_sums_are_scaled_twice",
        says=(
            "Gradients under no_sync are divided by the number of ranks as they arrive, and in the "
            "reduction again."
        ),
        file="zeroshard/sharding/gradients.py",
        find="scale = 1.0 if self._is_deferred else self._scale",
        replace="scale = self._scale",
        tests=("test_sums_that_no_sync_left_are_reduced_by_the_next_backward_or_step",),
    ),
    Break(
        name="shard_groups_do_not_reduce",
        says=(
            "With hybrid sharding gradients are averaged inside of each shard group, not between the groups."
        ),
        file="zeroshard/plan/exchange.py",
        find="_AXES = (DP_INNER, DP_SHARD, DP_REPLICATE, TP)",
        replace="_AXES = (DP_INNER, DP_SHARD, TP)",
        tests=("seed 8", "seed 9"),
    ),
    Break(
        name="missing_gradients_are_not_zeroed",
        says=(
            "A parameter without a gradient on this rank counts what its place in the packed buffer held "
            "before."
        ),
        file="zeroshard/sharding/gradients.py",
        find="torch._foreach_zero_(missing)",
        replace="torch._foreach_add_(missing, 1.0)",
        tests=("seed 1", "seed 3"),
    ),
    Break(
        name="padding_is_not_zeroed",
        says="The padding of a packed buffer is not cleared.",
        file="zeroshard/sharding/gradients.py",
        find="torch._foreach_zero_([flat[gap] for gap in self._gaps])",
        replace="pass",
        tests=("test_the_padding_of_packed_gradients_is_zero",),
    ),
    Break(
        name="a_gather_mixes_up_the_senders",
        says="An all-gather puts a rank's shard into the place of another rank's shard.",
        file="zeroshard/comm/collectives.py",
        find="group.recv([received[back]], back",
        replace="group.recv([received[peer]], back",
        tests=("test_an_all_gather_brings_what_torchs_own_brings",),
    ),
    Break(
        name="ranks_hold_the_same_shard",
        says="Each rank of a shard group holds the first shard of the main parameters.",
        file="zeroshard/sharding/buffer.py",
        find="self.main_span = plan.main_span(context.axes.dp_shard.rank)",
        replace="self.main_span = plan.main_span(0)",
        tests=("test_a_gather_is_started_once_and_brings_rank_0s_values_to_every_rank",),
    ),
    Break(
        name="sums_in_another_order_of_ranks",
        says="A reduce-scatter adds from the last rank to the first, so a sum of three has other bits.",
        file="zeroshard/comm/collectives.py",
        find="parts = [received.get(rank, own) for rank in range(self.size)]",
        replace="parts = [received.get(rank, own) for rank in reversed(range(self.size))]",
        tests=("test_a_reduce_scatter_adds_in_rank_order_to_the_bit",),
    ),
    Break(
        name="gradients_go_in_the_compute_dtype",
        says="Where no reduce dtype is asked for, gradients of bfloat16 are sent and added in bfloat16.",
        file="zeroshard/plan/buffers.py",
        find="reduce_dtype=dtypes.reduce_dtype or torch.promote_types(compute, torch.float32),",
        replace="reduce_dtype=dtypes.reduce_dtype or compute,",
        tests=("test_dtypes_left_open_are_the_models_for_compute_and_at_least_float32_for_the_rest",),
    ),
    Break(
        name="the_loss_scale_stays_in_gradients",
        says="Gradients of a scaled loss are not divided by the loss scale.",
        file="zeroshard/sharding/gradients.py",
        find="result.mul_(self._unscale)",
        replace="pass",
        tests=("test_a_static_scale_equals_the_hand_written_loop_to_the_bit",),
    ),
    Break(
        name="the_norm_counts_replicas",
        says=(
            "Each rank counts the whole of a gradient that all ranks hold, so the norm counts it several "
            "times."
        ),
        file="zeroshard/sharding/buffer.py",
        find="return slice(None) if self.is_partial else self.layout.owned(index, rank).slice",
        replace="return slice(None)",
        tests=("test_the_norm_is_that_of_the_accumulated_gradients",),
    ),
    Break(
        name="the_norm_counts_what_tensor_ranks_share",
        says="Each tensor rank counts the gradient of a parameter that all of them hold whole.",
        file="zeroshard/plan/originals.py",
        find="return is_first and (tp_rank == 0 or original.cut is not None)",
        replace="return is_first",
        tests=("test_losses_norms_and_parameters_are_those_of_one_process",),
    ),
    Break(
        name="the_norm_leaves_tensor_ranks_out",
        says="The gradient norm of a rank lacks the parts of the other tensor ranks.",
        file="zeroshard/stepping/clipping.py",
        find="for axis in (axes.dp_shard, axes.tp, axes.pp):\n        total",
        replace="for axis in (axes.dp_shard, axes.pp):\n        total",
        tests=("test_losses_norms_and_parameters_are_those_of_one_process",),
    ),
    Break(
        name="the_norm_leaves_pipeline_ranks_out",
        says="The gradient norm of a rank lacks the parameters of the other pipeline ranks.",
        file="zeroshard/stepping/clipping.py",
        find="for axis in (axes.dp_shard, axes.tp, axes.pp):\n        total",
        replace="for axis in (axes.dp_shard, axes.tp):\n        total",
        tests=("test_a_list_that_recomputes_the_last_chunk_too_counts_each_loss_once",),
    ),
    Break(
        name="trust_ratios_of_parts",
        says="A trust ratio of LARS or LAMB is computed from this tensor rank's part of a matrix.",
        file="zeroshard/stepping/norms.py",
        find="self._axes, self._device = (axes.dp_shard, axes.tp), axes.dp_shard.device",
        replace="self._axes, self._device = (axes.dp_shard,), axes.dp_shard.device",
        tests=("test_trust_ratios_are_those_of_whole_matrices",),
    ),
    Break(
        name="ranks_judge_gradients_alone",
        says="A rank that finds inf or nan in its own gradients does not tell the others.",
        file="zeroshard/stepping/clipping.py",
        find="""    for axis in (axes.dp_shard, axes.tp, axes.pp):
        total = axis.sum(""",
        replace="""    for axis in ():
        total = axis.sum(""",
        tests=("test_judging_takes_one_small_exchange_and_only_where_it_is_asked_for",),
    ),
    Break(
        name="ranks_do_not_agree_on_used_parameters",
        says=(
            "A parameter that this rank has not used gets no gradient here, though another rank has used it."
        ),
        file="zeroshard/sharding/reducer.py",
        find="used = [list(islice(flag, len(gradients.used))) for gradients in self._all]",
        replace="used = [list(islice(flag, len(g.used))) and list(g.used) for g in self._all]",
        tests=("seed 1", "seed 3"),
    ),
    Break(
        name="first_values_are_not_broadcast",
        says="Each rank starts with its own values of the parameters, not with rank 0's values.",
        file="zeroshard/sharding/buffer.py",
        find='axis.broadcast(values, f"first broadcast of {self.described}")',
        replace="pass",
        tests=("test_every_rank_gets_the_parameters_and_buffers_of_rank_0",),
    ),
    Break(
        name="replicas_are_summed",
        says="An outer step takes the sum of the replicas' values for their mean.",
        file="zeroshard/outer.py",
        find="values.div_(self._axis.size)",
        replace="values.div_(1)",
        tests=("test_replicas_equal_one_process_that_trains_them",),
    ),
    Break(
        name="buffers_are_not_broadcast",
        says="Each rank starts with its own values of the model's buffers, not with rank 0's values.",
        file="zeroshard/assemble.py",
        find="axis.broadcast(values.detach(), label)",
        replace="pass",
        tests=("test_every_rank_gets_the_parameters_and_buffers_of_rank_0",),
    ),
    Break(
        name="tied_weights_are_not_summed_over_pipeline_ranks",
        says="A parameter that two pipeline ranks share gets the gradient of its last holder alone.",
        file="zeroshard/parallel/pipeline/shared.py",
        find="total = summand if total is None else total + summand",
        replace="total = summand",
        tests=("test_a_list_that_recomputes_the_last_chunk_too_counts_each_loss_once",),
    ),
    Break(
        name="summands_of_tensor_ranks_are_not_summed",
        says=(
            "A parameter that each tensor rank uses for its part of the values keeps the gradient of that "
            "part."
        ),
        file="zeroshard/parallel/tensor/division.py",
        find="summands = SUMMANDS_OF_PARTS if o.parameter in summed else SUMMANDS",
        replace="summands = SUMMANDS",
        tests=("tests/parallel/test_sequence.py::test_a_model_trains_as_in_one_process",),
    ),
    Break(
        name="inputs_of_divided_layers_get_a_part_of_their_gradient",
        says=(
            "The backward of a layer divided by columns does not add its tensor ranks' gradients of the "
            "input up."
        ),
        file="zeroshard/parallel/tensor/sequence.py",
        find='COPY = ("keep", "sum")',
        replace='COPY = ("keep", "keep")',
        tests=("test_divided_layers_compute_and_learn_what_whole_ones_do",),
    ),
    Break(
        name="the_divided_loss_takes_exponentials_of_two_bases",
        says=(
            "The sums of exponentials of tensor ranks are added up without bringing them to one largest "
            "logit."
        ),
        file="zeroshard/forwards/tiled.py",
        find="log_sum = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(0).log()",
        replace="log_sum = everyone[:, 1].sum(0).log()",
        tests=("test_a_loop_of_the_user_computes_its_loss_over_parts",),
    ),
    Break(
        name="muons_updates_are_not_sent_back",
        says=(
            "The rank that orthogonalizes a matrix keeps the update; other ranks step with what memory held."
        ),
        file="zeroshard/stepping/wholes.py",
        find='exchange("updates", outward(items, owners))',
        replace='exchange("updates", [])',
        tests=("test_all_stages_give_the_bits_of_one_process_with_one_exchange_each_way",),
    ),
    Break(
        name="the_loss_is_that_of_one_rank",
        says="train_batch returns the mean loss over this rank's micro-batches alone, not over all ranks.",
        file="zeroshard/batches.py",
        find='return engine._axes.dp.sum(loss, "mean of the loss") / engine._axes.dp.size',
        replace="return loss",
        tests=("test_data_is_spread_and_losses_are_averaged_over_all_ranks",),
    ),
    Break(
        name="the_copy_of_a_few_ranks_is_stale",
        says="A backward gathers among a few ranks from a copy that was made before the last step.",
        file="zeroshard/sharding/buffer.py",
        find="                self.keep_second(False)\n            self.store.follow()",
        replace="                pass\n            self.store.follow()",
        tests=("test_a_second_copy_is_never_stale",),
    ),
)
