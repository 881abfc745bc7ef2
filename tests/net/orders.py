"""Breaks of orders: an action comes too early, twice, or not at all."""

from __future__ import annotations

from tests.net.runner import Break

ORDERS = (
    Break(
        name="gathers_read_the_values_before_the_step",
        says="A gather starts from the copy of main parameters on the host as it was before the step.",
        file="zeroshard/sharding/buffer.py",
        find="            self.copy.store(values, start)\n",
        replace="            pass\n",
        tests=("test_each_way_of_training_gives_the_same_bits",),
    ),
    Break(
        name="replicated_parameters_do_not_follow_a_step",
        says="Parameters that stay gathered are not gathered again after a step.",
        file="zeroshard/sharding/buffer.py",
        find="return not self.is_alias_of_all and self.filled",
        replace="return not (self.is_alias_of_all or self._plan.is_resident) and self.filled",
        tests=("test_parameters_of_one_element_train_as_in_ddp_to_the_bit",),
    ),
    Break(
        name="units_are_freed_before_their_second_forward",
        says=(
            "A unit that a backward has left is freed though the second forward of its checkpoint is to come."
        ),
        file="zeroshard/sharding/walk.py",
        find="freed = min([began, *(region.began for region in regions)])",
        replace="freed = began",
        tests=("test_a_unit_that_was_left_stays_for_the_second_forward_of_its_checkpoint",),
    ),
    Break(
        name="units_are_not_gathered_ahead",
        says="A forward gathers a unit when it begins, and not during the unit before it.",
        file="zeroshard/sharding/reducer.py",
        find="islice(self.units, unit.position + 1, None)",
        replace="islice(self.units, unit.position + 2, None)",
        tests=("test_at_most_the_unit_at_work_and_those_prefetched_are_gathered_besides_the_kept",),
    ),
    Break(
        name="a_backward_takes_turns_from_the_beginning",
        says="A backward enters units in the order of the forward.",
        file="zeroshard/sharding/walk.py",
        find="turns.sort(key=lambda item: item[0], reverse=True)",
        replace="turns.sort(key=lambda item: item[0])",
        tests=("test_the_turns_of_the_example_in_the_docstring",),
    ),
    Break(
        name="a_turn_waits_for_its_own_gradient",
        says="A turn that nothing led to on this rank is left out, so ranks issue other collectives.",
        file="zeroshard/sharding/walk.py",
        find="while self._next < len(self._turns) and self._turns[self._next].tick >= tick:",
        replace="while self._next < len(self._turns) and self._turns[self._next].tick >= tick > 0:",
        tests=("test_all_ranks_issue_the_same_collectives_in_one_order_whatever_gradients_come",),
    ),
    Break(
        name="reductions_start_before_the_gradients_are_there",
        says="The reduction of a unit starts when one of its gradients has arrived.",
        file="zeroshard/sharding/reducer.py",
        find="if unit in self._kept or not unit.is_complete:",
        replace="if unit in self._kept:",
        tests=("test_the_first_and_later_steps_send_what_the_table_says",),
    ),
    Break(
        name="a_failed_backward_of_another_rank_is_not_noticed",
        says="Gradients are delivered though the backward of another rank has ended in an exception.",
        file="zeroshard/sharding/reducer.py",
        find="        if any_failed:\n            return None, []\n",
        replace="",
        tests=("test_a_backward_that_fails_on_one_rank_is_an_error_on_the_others",),
    ),
    Break(
        name="a_step_takes_no_deferred_gradients",
        says="A step of a plain optimizer does not reduce the sums that no_sync has left.",
        file="zeroshard/sharding/reducer.py",
        find="self._list_units(self._units)\n            self._deliver()\n        self.call_hooks()",
        replace="pass\n        self.call_hooks()",
        tests=("test_sums_that_no_sync_left_are_reduced_by_the_next_backward_or_step",),
    ),
    Break(
        name="units_step_with_gradients_to_come",
        says="With step_in_backward a unit is stepped though this rank lacks a gradient of it.",
        file="zeroshard/sharding/reducer.py",
        find="if unit.gradients and all(all(one.used) for one in unit.gradients):",
        replace="if True:",
        tests=("tests/stores/test_early.py",),
    ),
    Break(
        name="the_optimizer_steps_before_the_clipping",
        says="The engine steps the optimizer, and then clips and judges the gradients.",
        file="zeroshard/engine.py",
        find=(
            "        is_taken = self._is_ready = self._guard.make_ready()\n"
            "        if is_taken:\n"
            "            try:\n"
            "                with around:\n"
            "                    step()\n"
        ),
        replace=(
            "        is_taken = self._is_ready = True\n"
            "        if is_taken:\n"
            "            try:\n"
            "                with around:\n"
            "                    step()\n"
            "                    self._guard.make_ready()\n"
        ),
        tests=("test_clipping_is_that_of_torch_on_ddp_and_the_same_to_the_bit_at_all_stages",),
    ),
    Break(
        name="the_learning_rate_moves_twice_a_step",
        says="A step of the engine advances the LR scheduler twice.",
        file="zeroshard/engine.py",
        find="                self.lr_scheduler.step()\n",
        replace="                self.lr_scheduler.step()\n                self.lr_scheduler.step()\n",
        tests=("test_a_scheduler_is_an_object_or_a_callable_that_makes_one_from_the_optimizer",),
    ),
    Break(
        name="the_learning_rate_moves_without_a_step",
        says="A step that is left out advances the LR scheduler all the same.",
        file="zeroshard/engine.py",
        find="            self.skipped_steps += 1\n",
        replace=(
            "            self.skipped_steps += 1\n"
            "            self.lr_scheduler and self.lr_scheduler.step()\n"
        ),
        tests=("test_an_overflow_on_one_rank_leaves_the_step_out_on_all",),
    ),
    Break(
        name="steps_in_files_are_not_written_back",
        says="A unit that was read from files and stepped in memory is not written back.",
        file="zeroshard/stores/pieces.py",
        find="self.memory.swap.write(rest, piece.on_host[span], is_there)",
        replace="FileTransfer(())",
        tests=("seed 16",),
    ),
    Break(
        name="buffers_are_reused_before_they_are_written",
        says=(
            "The next unit is read into a host buffer while the last one in it is still written to its file."
        ),
        file="zeroshard/stores/pieces.py",
        find="        piece.wait()\n        if piece.on_host.numel() < num_bytes:\n",
        replace="        if piece.on_host.numel() < num_bytes:\n",
        tests=("test_an_accelerator_would_run_it_without_mistakes[files_stage3_clip]",),
    ),
    Break(
        name="each_piece_of_a_parameter_is_its_first",
        says="A large parameter on the host is stepped in pieces, and each gets the values of the first.",
        file="zeroshard/stepping/stored.py",
        find="block, states = blocks[number], stepped.state",
        replace="block, states = blocks[0], stepped.state",
        tests=("test_an_accelerator_would_run_it_without_mistakes[host_in_pieces]",),
    ),
    Break(
        name="a_rank_does_not_sync_its_file",
        says="A checkpoint appears before the file of a rank is safe from a power failure.",
        file="zeroshard/checkpoint/save.py",
        find="        os.fsync(file.fileno())\n",
        replace="",
        tests=("test_the_file_of_a_rank_is_synced_when_all_of_it_is_written",),
    ),
    Break(
        name="a_checkpoint_appears_before_its_folder_is_synced",
        says="The directory of a checkpoint is renamed before the names in it are safe from a power failure.",
        file="zeroshard/checkpoint/files.py",
        find="    sync(place.temporary)\n",
        replace="",
        tests=("test_everything_is_synced_before_it_is_named",),
    ),
    Break(
        name="latest_names_a_checkpoint_to_come",
        says="`latest` names a checkpoint before its directory is there.",
        file="zeroshard/checkpoint/files.py",
        find="    os.rename(place.temporary, place.final)\n",
        replace=(
            "    _replace(place.folder / LATEST, place.tag)\n    os.rename(place.temporary, place.final)\n"
        ),
        tests=("test_a_crash_at_any_point_leaves_the_last_checkpoint_or_the_one_before",),
    ),
    Break(
        name="a_save_in_the_background_sees_later_values",
        says="A save in the background writes the values of the moment at which its thread comes to them.",
        file="zeroshard/checkpoint/save.py",
        find="return replace(snapshot, slices=copies, wait=self._buffer.last.synchronize)",
        replace="return replace(snapshot, wait=self._buffer.last.synchronize)",
        tests=("test_a_save_in_the_background_holds_the_values_of_the_call",),
    ),
    Break(
        name="random_numbers_begin_anew_after_a_load",
        says="A load of a checkpoint does not give the ranks their random numbers back.",
        file="zeroshard/checkpoint/load.py",
        find="        loading.restore_rng()\n",
        replace="        pass\n",
        tests=("test_each_rank_goes_on_with_its_random_numbers_and_new_ranks_derive_theirs",),
    ),
    Break(
        name="a_unit_is_stepped_while_its_backward_reads_it",
        says="A unit that computes with main parameters is stepped as soon as its gradients are there.",
        file="zeroshard/sharding/reducer.py",
        find="self._ended = [ended.pop()]",
        replace="pass",
        tests=("test_a_unit_is_stepped_when_its_backward_reads_its_weights_no_more[1]",),
    ),
    Break(
        name="a_look_finds_parameters_before_their_step",
        says="Whoever reads a parameter before the next forward finds the values before a step that waits.",
        file="zeroshard/parameters/sharded.py",
        find="        first.state.look()\n",
        replace="",
        tests=("test_steps_that_wait_have_the_bits_of_steps_at_once[2]",),
    ),
    Break(
        name="a_step_that_waits_reads_memory_of_the_user",
        says="On one rank a late step reads a gradient in the memory of the user, who has changed it since.",
        file="zeroshard/sharding/gradients.py",
        find=", copy=True)",
        replace=")",
        tests=("test_steps_of_plain_loops_wait_whatever_becomes_of_the_memory_of_their_gradients[1]",),
    ),
    Break(
        name="a_step_in_the_list_of_an_asynchronous_pipeline_waits",
        says="A step waits while backwards of forwards before it are to come.",
        file="zeroshard/stepping/late.py",
        find="return is_unseen and Moment.BATCH not in state.moments",
        replace="return is_unseen",
        tests=("test_steps_of_a_pipeline_wait_for_its_next_batch[asynchronous]",),
    ),
    Break(
        name="a_step_in_a_backward_is_not_seen",
        says="A step in a backward does not count as an edit of what an older forward has saved.",
        file="zeroshard/stepping/early.py",
        find="for buffer, parameters in uncounted:",
        replace="for buffer, parameters in ():",
        tests=("test_torch_refuses_a_backward_through_a_graph_of_before_an_early_step[2]",),
    ),
    Break(
        name="a_step_between_forward_and_backward_is_not_seen",
        says="A step does not count as an edit of the parameters that a forward before it has saved.",
        file="zeroshard/sharding/runtime.py",
        find="                buffer.count_step(stepped)\n",
        replace="                pass\n",
        tests=("test_a_backward_of_values_before_a_step_is_refused_as_in_plain_pytorch[1]",),
    ),
)
