// Tests of lanes on an emulated GPU.
#include "tests/emulated_gpu/calls.h"
#include "tests/emulated_gpu/memory.h"
#include "tests/zero/gpu_cases.h"
#include "zero/engine/gpu_lanes.h"
#include "zero/plan/awaited.h"

using namespace ballast;
using namespace ballast::testing;

TEST_CASE("on a GPU, stages and tiers give the bits of the CPU") { check_gpu_trains_as_cpu(); }

TEST_CASE("all formats train to the same bits on a GPU as on the CPU") { check_gpu_trains_in_all_formats(); }

TEST_CASE("on a GPU, tiles as large as a shard are read and changed in stretches") {
  check_large_tiles_are_read_in_stretches();
}

TEST_CASE("norms of tensors whose gradients go to the host are those of the CPU") { check_norms_of_tensors(); }

TEST_CASE("reading the state waits for the work in the trainer's stream") { check_trainer_is_waited_for(); }

TEST_CASE("without a timeline, only ends that something waits for are marked, and no time is read") {
  const Model model = odd_model();
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  for (const bool keeps_timeline : {false, true}) {
    Training training(model, *world, {optim::AdamW{}, optim::AdamW{}},
                      {.state = {0.5, 0.5, 0.0},
                       .tile_elements = 256,
                       .keeps_timeline = keeps_timeline,
                       .gpu = 0,
                       .stream = stream.handle()});
    training.initialise(initial_parameters());
    SyntheticTrainer trainer(model, 0, &stream);
    constexpr std::size_t warm_up = 3, steps = 4;  // events are made in the first steps
    std::size_t created = 0, recorded = 0, read = 0;
    for (std::size_t step = 0; step < warm_up + steps; ++step) {
      trainer.run(training, step);
      CHECK(training.step().metrics.timed == keeps_timeline);
      if (step + 1 == warm_up) {
        training.finish();
        created = device_calls.created_events;
        recorded = device_calls.recorded_events;
        read = device_calls.read_times;
      }
    }
    training.finish();
    const std::vector<Op>& ops = training.plan().compiled().program().ops;
    const std::vector<bool> awaited = awaited_in(ops);
    std::size_t marked = 0;
    for (std::size_t op = 0; op < ops.size(); ++op) {
      if (awaited[op] && (works_on_device(ops[op].lane) || ops[op].lane == Lane::compute)) ++marked;
    }
    if (keeps_timeline) {
      CHECK(device_calls.recorded_events - recorded > 2 * marked * steps);
      CHECK(device_calls.read_times > read);
    } else {
      CHECK(device_calls.recorded_events - recorded == marked * steps);
      CHECK(device_calls.created_events == created);
      CHECK(device_calls.read_times == read);
    }
  }
}

TEST_CASE("a GPU's work is counted and traced, in memory of the caller's allocator") {
  check_gpu_work_is_accounted_for();
}
