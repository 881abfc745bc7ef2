"""Breaks of plans: schedules, layouts, boxes, units, estimates, files of weights, and places in the data."""

from __future__ import annotations

from tests.net.runner import Break

PLANS = (
    Break(
        name="shards_are_not_whole_blocks",
        says="A shard ends in the middle of a block of 256 elements.",
        file="zeroshard/plan/layout.py",
        find="row = BLOCK * self.num_ranks * self.num_replicas",
        replace="row = self.num_ranks * self.num_replicas",
        tests=(
            "tests/sharding/test_layout.py::"
            "test_shards_are_equal_whole_blocks_and_tile_the_range_in_rank_order",
        ),
    ),
    Break(
        name="shards_lose_an_element",
        says="The last element of each shard belongs to no rank.",
        file="zeroshard/plan/layout.py",
        find="return Span(rank * self.shard_size, (rank + 1) * self.shard_size)",
        replace="return Span(rank * self.shard_size, (rank + 1) * self.shard_size - 1)",
        tests=(
            "tests/sharding/test_layout.py::"
            "test_every_element_of_every_parameter_is_owned_by_exactly_one_rank",
        ),
    ),
    Break(
        name="stage_2_keeps_whole_gradients",
        says="At stage 2 each rank adds up whole gradients.",
        file="zeroshard/plan/placement.py",
        find="Placements(parameter=_WHOLE, kept=_WHOLE, gradient=_SHARDED, optimizer=_SHARDED),",
        replace="Placements(parameter=_WHOLE, kept=_WHOLE, gradient=SUMMANDS, optimizer=_SHARDED),",
        tests=("tests/sharding/test_placement.py::test_each_stage_shards_one_more_kind_of_model_state",),
    ),
    Break(
        name="boxes_lose_a_row",
        says="A flat range that begins at the start of a row loses that row as boxes.",
        file="zeroshard/checkpoint/places.py",
        find="start = first + bool(begin)",
        replace="start = first + 1",
        tests=(
            "tests/checkpoint/test_boxes.py::"
            "test_the_boxes_of_a_flat_range_hold_its_elements_in_order_and_are_few",
        ),
    ),
    Break(
        name="runs_go_from_the_target_to_the_source",
        says="The elements that two boxes share are read from the place at which they are to be written.",
        file="zeroshard/checkpoint/places.py",
        find="yield ElementRun(_position(source, corner), _position(target, corner), numel)",
        replace="yield ElementRun(_position(target, corner), _position(source, corner), numel)",
        tests=("tests/checkpoint/test_boxes.py::test_runs_move_exactly_the_shared_elements_to_their_places",),
    ),
    Break(
        name="scales_of_8_bit_states_at_the_wrong_block",
        says="The scales of a slice's 8-bit states are saved and loaded one block after their place.",
        file="zeroshard/checkpoint/tensors.py",
        find="return Span(span.start // BLOCK, num_blocks(span.stop))",
        replace="return Span(span.start // BLOCK + 1, num_blocks(span.stop) + 1)",
        tests=(
            "tests/checkpoint/test_eightbit.py::"
            "test_codes_and_scales_are_the_same_bits_at_any_layout_and_come_back",
        ),
    ),
    Break(
        name="owners_lack_a_range",
        says="The rank that computes with a whole tensor does not get the range that another rank holds.",
        file="zeroshard/plan/owners.py",
        find="if span.size and span != item.held[owner]:",
        replace="if span.size and rank > owner and span != item.held[owner]:",
        tests=(
            "tests/sharding/test_owners.py::test_every_owner_gets_each_element_once_and_none_that_it_holds",
        ),
    ),
    Break(
        name="1f1b_runs_one_forward_more",
        says="A rank of 1F1B runs one forward more before its first backward, and holds its activations.",
        file="zeroshard/parallel/pipeline/schedules.py",
        find='return _in_rounds("1f1b", num_ranks, num_microbatches, 1, hops=1)',
        replace='return _in_rounds("1f1b", num_ranks, num_microbatches, 1, hops=2)',
        tests=(
            "tests/parallel/pipeline/test_builders.py::test_gpipe_and_1f1b_have_the_order_that_torch_runs",
        ),
    ),
    Break(
        name="a_list_without_a_forward",
        says="A list in which the forward of a micro-batch is missing is not refused.",
        file="zeroshard/parallel/pipeline/actions.py",
        find='if "".join(action.kind.value for action in own).removesuffix("R") not in expected:',
        replace="if False:",
        tests=(
            "tests/parallel/pipeline/test_simulate.py::"
            "test_a_list_with_missing_double_or_misplaced_actions_is_refused",
        ),
    ),
    Break(
        name="bubbles_are_counted_as_work",
        says="The bubble share of a schedule is the part of the time in which ranks compute.",
        file="zeroshard/parallel/pipeline/simulate.py",
        find="return 1 - sum(self.busy) / whole if whole else 0.0",
        replace="return sum(self.busy) / whole if whole else 0.0",
        tests=("tests/parallel/pipeline/test_builders.py::test_makespans_are_those_of_the_papers",),
    ),
    Break(
        name="a_backward_uses_the_newest_weights",
        says=("A backward computes with the newest weights, not with the stashed version of its forward."),
        file="zeroshard/parallel/pipeline/asynchronous/uses.py",
        find=(
            "return {action: Use(taken - ages.crossed.get(action, 0)) for action, taken in "
            "ages.before.items()}"
        ),
        replace="return {action: Use(taken) for action, taken in ages.before.items()}",
        tests=("tests/parallel/pipeline/asynchronous/test_ages.py",),
    ),
    Break(
        name="delays_are_off_by_one",
        says="The delay of a gradient counts one step more than come between its forward and its step.",
        file="zeroshard/parallel/pipeline/asynchronous/ages.py",
        find="return self.applied[action.place] - self.before[action]",
        replace="return self.applied[action.place] - self.before[action] + 1",
        tests=(
            "tests/parallel/pipeline/asynchronous/test_ages.py::"
            "test_a_stage_has_p_minus_1_minus_s_steps_between_forward_and_backward",
        ),
    ),
    Break(
        name="versions_are_dropped_too_early",
        says="An old version of weights is dropped at a step though a later backward uses it.",
        file="zeroshard/parallel/pipeline/asynchronous/uses.py",
        find="later |= {newest if version is None else version}",
        replace="later = frozenset({newest if version is None else version})",
        tests=(
            "tests/parallel/pipeline/asynchronous/test_ages.py::"
            "test_kept_versions_are_those_that_later_actions_use",
        ),
    ),
    Break(
        name="an_estimate_counts_an_alias_twice",
        says="Main parameters that are a view of the unsharded ones are counted once more.",
        file="zeroshard/memory/traffic.py",
        find="if tier is buffer.main_tier and not buffer.is_alias:",
        replace="if tier is buffer.main_tier:",
        tests=("tests/test_estimate.py::test_a_number_of_parameters_gives_the_formulas_of_the_stages",),
    ),
    Break(
        name="bytes_on_the_wire_count_the_own_shard",
        says="The bytes of an exchange count the rank's own part, which is not sent.",
        file="zeroshard/memory/traffic.py",
        find="total += held * itemsize * (sizes[axis] - 1) // sizes[axis]",
        replace="total += held * itemsize",
        tests=(
            "tests/sharding/test_placement.py::test_bytes_of_a_path_are_those_of_the_documented_formulas",
        ),
    ),
    Break(
        name="tied_parameters_are_exported_twice",
        says="A file for transformers has a tied parameter under all of its names.",
        file="zeroshard/checkpoint/manifest.py",
        find='return [name for name in wanted if name not in model["tied"]] or wanted[:1]',
        replace="return wanted",
        tests=("tests/checkpoint/test_description.py",),
    ),
    Break(
        name="an_export_keeps_the_main_dtype",
        says="save_pretrained(dtype=...) writes parameters in the main dtype.",
        file="zeroshard/hf/export.py",
        find=(
            "return TensorInfo(dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype, "
            "tensor.shape)"
        ),
        replace="return TensorInfo(tensor.dtype, tensor.shape)",
        tests=("tests/checkpoint/test_export.py::test_files_are_cut_and_values_cast_as_asked",),
    ),
    Break(
        name="each_rank_reads_the_beginning_of_a_weight",
        says="A range of a tensor in a file of safetensors is read from the tensor's first element on.",
        file="zeroshard/safetensors.py",
        find="file.seek(self.offset + span.start * size)",
        replace="file.seek(self.offset)",
        tests=("tests/parallel/test_first_values.py::test_each_rank_reads_its_parts_of_files",),
    ),
    Break(
        name="ranks_take_the_samples_of_rank_0",
        says="All ranks take the samples of the first one, so an epoch has a part of them.",
        file="zeroshard/data/loader.py",
        find="return (position + rank + num_ranks * torch.arange",
        replace="return (position + num_ranks * torch.arange",
        tests=("tests/test_data.py::test_order_and_turns_are_those_of_torchs_distributed_sampler",),
    ),
    Break(
        name="a_tied_parameter_belongs_to_its_first_unit",
        says="A parameter of two units lies in the first of them, so the second one computes without it.",
        file="zeroshard/plan/units.py",
        find="lowest = [spec for spec in chains[0] if all(spec in chain for chain in chains)][-1]",
        replace="lowest = chains[0][-1]",
        tests=("tests/sharding/test_units.py::test_a_parameter_tied_across_blocks_goes_to_the_root",),
    ),
    Break(
        name="layers_that_are_dropped_at_random_are_units",
        says="Layers that each rank may leave out are units, which all ranks must call.",
        file="zeroshard/plan/units.py",
        find="or any(rates):",
        replace="or False:",
        tests=("tests/sharding/test_choices.py::test_the_chance_may_be_in_a_config",),
    ),
    Break(
        name="experts_are_units",
        says="Modules called experts are units, though each rank calls others.",
        file="zeroshard/plan/units.py",
        find="return set(_CHOSEN_FROM & module._modules.keys())",
        replace="return set()",
        tests=("tests/sharding/test_choices.py::test_lists_that_are_named_like_experts_are_not_cut",),
    ),
)
