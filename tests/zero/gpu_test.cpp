// Tests of lanes on a GPU.
#include "tests/zero/gpu_cases.h"

using namespace ballast::testing;

TEST_CASE("on a GPU, stages and tiers give the bits of the CPU", "[gpu]") { check_gpu_trains_as_cpu(); }

TEST_CASE("all formats train to the same bits on a GPU as on the CPU", "[gpu]") { check_gpu_trains_in_all_formats(); }

TEST_CASE("a GPU and the host share tiles whose state is on the host, with the bits of either alone", "[gpu]") {
  check_gpu_and_host_share_updates();
}

TEST_CASE("gradients in bf16 train to the same bits on a GPU as on the CPU", "[gpu]") {
  check_gpu_keeps_gradients_in_bf16();
}
TEST_CASE("a training on a GPU encodes what ranks send as one on the CPU", "[gpu]") { check_gpu_encodes_as_cpu(); }

TEST_CASE("on a GPU, tiles as large as a shard are read and changed in stretches", "[gpu]") {
  check_large_tiles_are_read_in_stretches();
}

TEST_CASE("a checkpoint moves to a GPU and back", "[gpu]") { check_checkpoints_move_to_gpu_and_back(); }

TEST_CASE("norms of tensors whose gradients go to the host are those of the CPU", "[gpu]") { check_norms_of_tensors(); }

TEST_CASE("reading the state waits for the work in the trainer's stream", "[gpu]") { check_trainer_is_waited_for(); }

TEST_CASE("a GPU's work is counted and traced, in memory of the caller's allocator", "[gpu]") {
  check_gpu_work_is_accounted_for();
}

TEST_CASE("norms of tensors have the bits of the CPU, and leave the sum of all as it was", "[gpu]") {
  check_gpu_norms_of_tensors();
}
