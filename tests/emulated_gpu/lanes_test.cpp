// Tests of lanes on an emulated GPU.
#include "tests/emulated_gpu/memory.h"
#include "tests/zero/gpu_cases.h"

using namespace ballast;
using namespace ballast::testing;

TEST_CASE("on a GPU, stages and tiers give the bits of the CPU") { check_gpu_trains_as_cpu(); }

TEST_CASE("all formats train to the same bits on a GPU as on the CPU") { check_gpu_trains_in_all_formats(); }

TEST_CASE("reading the state waits for the work in the trainer's stream") { check_trainer_is_waited_for(); }

TEST_CASE("a GPU's work is counted and traced, in memory of the caller's allocator") {
  check_gpu_work_is_accounted_for();
}

TEST_CASE("norms of tensors have the bits of the CPU, and leave the sum of all as it was") {
  check_gpu_norms_of_tensors();
}
