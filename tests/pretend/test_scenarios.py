from __future__ import annotations

import pytest

from tests.pretend.run import run_scenario
from tests.pretend.scenarios import SCENARIOS
from tests.ranks import Ranks

PLAIN = {"stage1", "stage2"}
LONG = {
    *("stage0_accumulate", "stage1_accumulate", "stage3_bf16_main_accumulate", "hybrid_accumulate"),
    *("stage0_bf16_clip", "stage1_bf16_clip", "stage3_bf16_wire", "stage3_prefetch0", "stage3_prefetch3"),
    *("stage3_tied", "stage3_llama", "adapters", "frozen_branches", "experts_stage3", "sizes_differ_stage3"),
    *("parameters_on_host", "parameters_on_host_bf16", "parameters_on_host_accumulate", "files_stage3"),
    *("host_stage2_one_rank_bf16", "parameters_on_host_one_rank", "host_saved", "host_edited_stage1"),
    *(f"{tier}_{act}" for tier in ("parameters_on_host", "files") for act in ("edited", "shown")),
    *(f"{tier}_{act}" for tier in ("parameters_on_host", "files") for act in ("named", "saved")),
    *("stage0", "stage3_accumulate", "stage3_recompute", "stage3_bf16_main", "full_parameters_stage3"),
    *("evaluation_between_stage3", "saved_in_background", "called_twice", "prefetched_in_vain", "frozen"),
    *(
        "generation_with_held_parameters",
        "stream_of_the_user",
        "gradients_of_gradients",
    ),
    *("two_backwards_no_sync", "host_edited", "host_shown", "host_dropped"),
    *("stepped_in_backward_evaluated", "files_stepped_in_backward", "fraction_stage3_clip"),
    *("second_copy_recompute", "closed_stage3", "order_changes", "stage3_nonfinite", "offloaded_dropped"),
    *("offloaded_stage3_recompute", "offloaded_exceptions", "offloaded_in_vain", "offloaded_sizes_differ"),
    *("host_stage3_one_rank", "host_gradients_forgotten", "host_named", "host_saved_stage1"),
    *("fraction_lamb", "fraction_skips", "fraction_stepped_in_backward", "stepped_in_backward_accumulate"),
    *(
        "tensor_stage0",
        "tensor_stage1",
        "tensor_stage2",
        "tensor_recompute",
        "tensor_sequence_recompute",
        "tensor_host",
    ),
    *("parameters_on_host_kept", "host_stage3_bf16_main"),
    *("pipeline_gpipe", "pipeline_zb_h1", "pipeline_host"),
    *("averages_after_step_stage3", "two_optimizers_stage3", "one_parameter_by_name", "engines_dropped"),
    *("second_copy", "two_forwards_stage3", "hooks_and_whole_gradients_stage3_bf16"),
    *("muon_stage0", "muon_stage1", "muon_stage2", "muon_clipped", "muon_bf16_main"),
    *("step_after_a_failed_forward", "host_stage3", "stage3_bf16_clip", "parameters_on_host_bf16_main"),
    *("pipeline_varuna", "pipeline_interleaved", "pipeline_of_4", "muon_hybrid", "ema_stage3"),
    *("pipeline_stage0", "pipeline_late", "host_plain_loop_2"),
    *("asynchronous_2bw", "asynchronous_lwp", "asynchronous_pb", "asynchronous_of_4"),
    *("asynchronous_spectrain", "asynchronous_newest_host", "asynchronous_pipemare"),
    *("asynchronous_alone", "asynchronous_alone_versions", "asynchronous_alone_moved", "stage1_norms_fp32"),
    *("pipeline_recompute", "pipeline_chunks_host", "pipeline_kept", "muon_tensor", "muon_on_host"),
    *("files_read_in_backward", "files_stepped_in_backward_accumulate", "host_in_pieces_late_state"),
    *("host_looked_at_1", "some_parameters_on_host", "host_stage2_clip_accumulate", "host_saved_fused"),
    *("tensor_sequence", "host_stage3_clip_accumulate", "ema_stage3_on_host", "log_stage3"),
    *("host_8bit", "host_waits_for_nothing", "host_frozen_for_a_step", "host_in_pieces_swapped_states"),
    *("parameters_on_host_frozen_for_a_step_1", "parameters_on_host_frozen_for_a_step_2", "files_in_pieces"),
    *("host_read_in_backward", "files_in_pieces_stepped_in_backward", "host_backward_fails"),
    *(
        "host_read_in_order_of_use",
        "host_saved_stepped_in_backward",
        "host_in_pieces_interrupted_in_backward",
    ),
    *("host_looked_at_2", "ema_stage3_in_files", "parameters_on_host_stepped_in_backward", "files_batches"),
    *("some_parameters_on_host_stepped_in_backward", "host_stepped_in_backward_one_rank"),
    *("host_lamb_alone_in_backward", "muon_parameters_on_host", "parameters_on_host_batches_accumulate"),
    *("parameters_on_host_clipped", "host_in_pieces_stepped_in_backward", "muon_in_files"),
    *("parameters_on_host_in_pieces_stepped_in_backward", "parameters_on_host_in_pieces_edited"),
    *("ema_edited_1_on_host", "ema_edited_2_on_host", "host_in_pieces_interrupted"),
}
"""Scenarios of features that have another one, alone or together with something else, and of rare uses."""


def is_repeated(name: str) -> bool:
    """True for a scenario of a feature that is also there by itself, without bf16, or at stage 3."""
    others = {name.removesuffix("_bf16"), name.replace("stage2", "stage3"), name.replace("stage1", "stage3")}
    if name in LONG or name.startswith("branches_stage3_"):
        return True
    return name not in PLAIN and not SCENARIOS.keys().isdisjoint(others - {name})


@pytest.mark.long_where(name=[name for name in SCENARIOS if is_repeated(name)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_accelerator_would_run_it_without_mistakes(ranks: Ranks, name: str) -> None:
    outcome = run_scenario(ranks, SCENARIOS[name])
    assert not outcome.findings, outcome.describe()
