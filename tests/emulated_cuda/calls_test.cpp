// What a step asks of CUDA and NCCL, counted call by call.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "kernels/runtime/buffer.h"
#include "tests/emulated_cuda/two_gpus.h"
#include "tests/zero/training_rig.h"
#include "zero/comm/call.h"
#include "zero/engine/lanes.h"
#include "zero/plan/compile.h"
#include "zero/plan/program.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t warm_up = 3, steps = 4;  // events are made in the first steps

// Trains, and returns the calls of the steps after the first ones.
emulated::Counts calls_of_steps(Training& training, const Model& model, std::size_t rank, const Stream& stream) {
  training.initialize(initial_parameters());
  SyntheticTrainer trainer(model, rank, &stream);
  for (std::size_t step = 0; step < warm_up + steps; ++step) {
    if (step == warm_up) {
      training.finish();
      emulated::reset_counts();
    }
    trainer.run(training, step);
    training.step();
  }
  training.finish();
  return emulated::counts();
}

std::size_t marked_ends(const Training& training) {
  const std::vector<Op>& ops = compiled(training.plan()).program().ops;
  const std::vector<bool> awaited = awaited_in(ops);
  std::size_t marked = 0;
  for (std::size_t op = 0; op < ops.size(); ++op) {
    if (awaited[op] && (works_on_device(ops[op].lane) || ops[op].lane == Lane::compute)) ++marked;
  }
  return marked;
}

}  // namespace

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
    emulated::Counts calls = calls_of_steps(training, model, 0, stream);
    if (keeps_timeline) {
      CHECK(calls["cudaEventRecord"] > 2 * marked_ends(training) * steps);
      CHECK(calls["cudaEventElapsedTime"] > 0);
    } else {
      CHECK(calls["cudaEventRecord"] == marked_ends(training) * steps);
      CHECK(calls["cudaEventCreateWithFlags"] == 0);
      CHECK(calls["cudaEventElapsedTime"] == 0);
    }
  }
}

namespace {

constexpr std::size_t units = 16;

// Trains one of two ranks on its GPU, and returns its calls in one step, for each unit.
std::map<std::string, double> calls_per_unit(Communicator& world, const Spread& state) {
  const Model model = plain_model(units);
  const Stream stream(static_cast<int>(world.rank()));
  Training training(model, world, {optim::AdamW{}},
                    {.stage = 3, .gradients = state, .state = state, .gpu = stream.gpu(), .stream = stream.handle()});
  std::map<std::string, double> each;
  for (const auto& [call, times] : calls_of_steps(training, model, world.rank(), stream)) {
    each[call] = static_cast<double>(times) / static_cast<double>(steps * units);
  }
  return each;
}

struct Limits {
  double kernels, nccl_kernels, records;
};

void expect_at_most(const char* what, double found, double limit) {
  expect(found <= limit, fmt::format("{} {} a unit and step, but at most {} are expected", found, what, limit));
}

// Returns the events of the threads that watch the three communicators of a rank, for each unit: one each 100 ms at most.
double watching_records(std::chrono::steady_clock::duration time) {
  return 3 * (std::chrono::duration<double>(time).count() / 0.1 + 1) / static_cast<double>(steps * units);
}

void check_calls_of_two_ranks(const Spread& state, const Limits& limits) {
  const ProcessGroupRig rig(2, HostTransport::shared_memory, patient);
  Processes processes(2, [&](std::size_t rank) {
    rig.as_rank(rank, [&](Communicator& world) {
      const auto began = std::chrono::steady_clock::now();
      std::map<std::string, double> calls = calls_per_unit(world, state);
      const double watching = watching_records(std::chrono::steady_clock::now() - began);
      expect_at_most("kernels", calls["kernel"], limits.kernels);
      expect_at_most("kernels of NCCL", calls["NCCL kernel"], limits.nccl_kernels);
      expect_at_most("events", calls["cudaEventRecord"], limits.records + watching);
      expect_at_most("new events", calls["cudaEventCreateWithFlags"], 0);
    });
    expect(emulated::live() == emulated::Live{}, "something of the GPU was left behind");
  });
  CHECK(processes.failures() == Failures(2));
}

}  // namespace

// A sum, a norm in two kernels, and an update; gathers in forward and backward, and a reduction.
TEST_CASE("a unit takes four kernels, three exchanges and seven events where everything is on the device") {
  check_calls_of_two_ranks(Tier::device, {.kernels = 4, .nccl_kernels = 3, .records = 7});
}

TEST_CASE("a unit takes three kernels, three exchanges and eight events where its state is on the host") {
  check_calls_of_two_ranks(Tier::host, {.kernels = 3, .nccl_kernels = 3, .records = 8});
}

TEST_CASE("a group of GPUs that only gathers connects no pairs of ranks") {
  CHECK(failures_on_two_gpus([](RankOnGpu& rank) {
          for (const bool only_gathers : {true, false}) {
            emulated::reset_counts();
            const auto group = rank.split(0, only_gathers);
            expect(emulated::counts()["ncclSend"] == (only_gathers ? 0 : 2), "the number of ranks that are connected");
          }
        }) == Failures(2));
}

// Else NCCL moves single bytes. A block of codes is no multiple of 16 bytes.
TEST_CASE("NCCL gets codes at multiples of 16 bytes") {
  const ProcessGroupRig rig({4, 2}, HostTransport::shared_memory, patient);
  Processes processes(4, [&](std::size_t number) {
    rig.as_rank(number, [&](Communicator& world) {
      RankOnGpu rank(world);
      MemoryAccounts accounts;
      const Buffer values =
          allocate(accounts, {.kind = MemoryKind::device, .bytes = 8192, .owner = "test", .gpu = rank.gpu});
      const Buffer codes =
          allocate(accounts, {.kind = MemoryKind::device, .bytes = 8192, .owner = "test", .gpu = rank.gpu});
      fill(values.data(), 0, values.bytes(), rank.stream);
      const Encoding encoding{.memory = codes.view(DType::u8)};
      const View all = values.view(DType::fp32).part(0, 4 * 128),
                 other = values.view(DType::fp32).part(4 * 128, 4 * 128);
      const auto on_host = rank.split(number / 2), on_all = rank.split();
      emulated::reset_counts();
      for (Communicator* const group : {on_host.get(), on_all.get()}) {
        const std::size_t part = 128;
        group->all_gather(other.part(0, part), all.part(0, group->size() * part), encoding);
        group->reduce_scatter(all.part(0, group->size() * part), other.part(0, part), encoding);
        group->all_reduce(all, other, encoding);
      }
      rank.stream.synchronize();
      expect(emulated::counts()["NCCL kernel"] > 0, "no exchange");
      expect(emulated::counts()["NCCL with memory that is not aligned"] == 0, "memory that is not aligned");
    });
  });
  CHECK(processes.failures() == Failures(4));
}
