// Tests of a training that is offloaded from its device.
#include <catch2/catch.hpp>
#include <new>

#include "tests/zero/trainee.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// An allocator that refuses on demand.
class ScarceAllocator final : public Allocator {
 public:
  std::byte* allocate(std::size_t bytes) override {
    if (is_empty) throw std::bad_alloc();
    return static_cast<std::byte*>(::operator new (bytes, std::align_val_t{256}));
  }
  void release(std::byte* memory, std::size_t) noexcept override { ::operator delete (memory, std::align_val_t{256}); }
  bool is_empty = false;
};

}  // namespace

TEST_CASE("a training is offloaded between steps only, and refuses every use until it is reloaded") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  Trainee trainee(*world, {.stage = 3});
  Training& training = trainee.training;
  CHECK_THROWS_WITH(TrainingState(training).reload(), Contains("B1007"));
  trainee.trainer.run(trainee.training, 0);
  CHECK_THROWS_WITH(TrainingState(training).offload(), Contains("B1007") && Contains("in the middle of a step"));
  trainee.training.step();
  const auto reserved = [&] {
    std::size_t bytes = 0;
    for (const MemoryAccounts::Entry& entry : trainee.training.memory().entries())
      bytes += entry.usage.now;
    return bytes;
  };
  const std::size_t before = reserved();
  TrainingState(training).offload();
  CHECK(reserved() < before);
  CHECK_THROWS_WITH(trainee.training.forward(0), Contains("B1007") && Contains("reload"));
  CHECK_THROWS_WITH(trainee.training.step(), Contains("B1007"));
  CHECK_THROWS_WITH(TrainingState(training).offload(), Contains("B1007"));
  TrainingState(training).reload();
  CHECK(reserved() == before);
  CHECK(trainee.step(1).step == 2);
}

TEST_CASE("gathered parameters get more memory between steps only, and stay in it from forward to backward") {
  const auto failures = failures_of_ranks(2, [](Communicator& world) {
    Trainee trainee(world, {.stage = 3});
    Training& training = trainee.training;
    const auto gathered = [&](std::size_t step) {  // bytes in a step
      const std::size_t before = training.metrics().bytes[static_cast<std::size_t>(Lane::gather)];
      trainee.step(step);
      training.finish();
      return training.metrics().bytes[static_cast<std::size_t>(Lane::gather)] - before;
    };
    const std::size_t least = TrainingState(training).gathered_bytes();
    const std::size_t twice = gathered(0);
    trainee.trainer.run(training, 1);
    try {
      TrainingState(training).keep_gathered(SIZE_MAX);
      throw std::runtime_error("it was changed in the middle of a step");
    } catch (const UsageError&) {
    }
    training.step();
    TrainingState(training).keep_gathered(SIZE_MAX);
    const std::size_t all = TrainingState(training).gathered_bytes();
    gathered(2);
    const std::size_t once = gathered(3);
    if (all <= least || once * 3 > twice * 2) throw std::runtime_error(fmt::format("{} of {} bytes", once, twice));
    TrainingState(training).keep_gathered(0);
    gathered(4);
    if (TrainingState(training).gathered_bytes() != least || gathered(5) != twice)
      throw std::runtime_error("it did not go back");
  });
  CHECK(failures == std::vector<std::string>(2));
}

TEST_CASE("if one rank has no memory for more gathered parameters, no rank keeps more") {
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    const auto agree = [&](const std::exception_ptr& failure) {
      std::int64_t failed = failure ? 1 : 0;
      world.all_reduce({&failed, 1});
      if (failure) std::rethrow_exception(failure);
      if (failed > 0) throw std::runtime_error("another rank had no room");
    };
    ScarceAllocator allocator;
    Trainee plain(world, {.stage = 3});
    Trainee trainee(world, {.stage = 3, .allocator = &allocator});
    plain.step(0), trainee.step(0);
    const std::size_t before = TrainingState(trainee.training).gathered_bytes();
    allocator.is_empty = world.rank() == 1;
    bool refused = false;
    try {
      TrainingState(trainee.training).keep_gathered(SIZE_MAX, agree);
    } catch (const std::exception&) {
      refused = true;
    }
    if (!refused || TrainingState(trainee.training).gathered_bytes() != before)
      throw std::runtime_error("it was changed");
    allocator.is_empty = false;
    if (plain.step(1).norm != trainee.step(1).norm) throw std::runtime_error("another norm");
    TrainingState(trainee.training).keep_gathered(SIZE_MAX, agree);
    if (plain.step(2).norm != trainee.step(2).norm) throw std::runtime_error("another norm");
    if (plain.parameters() != trainee.parameters()) throw std::runtime_error("other parameters");
  });
  CHECK(failures == std::vector<std::string>(2));
}

TEST_CASE("if one rank has no memory to reload, no rank reloads, and all can try again") {
  for (const int stage : {2, 3}) {
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      const auto agree = [&](const std::exception_ptr& failure) {
        std::int64_t failed = failure ? 1 : 0;
        world.all_reduce({&failed, 1});
        if (failure) std::rethrow_exception(failure);
        if (failed > 0) throw std::runtime_error("another rank had no room");
      };
      ScarceAllocator allocator;
      Trainee plain(world, {.stage = stage});
      Trainee offloaded(world, {.stage = stage, .allocator = &allocator});
      plain.step(0), offloaded.step(0);
      TrainingState(offloaded.training).offload(true, agree);
      allocator.is_empty = world.rank() == 1;
      bool refused = false;
      try {
        TrainingState(offloaded.training).reload(agree);
      } catch (const std::exception&) {
        refused = true;
      }
      if (!refused) throw std::runtime_error("it returned");
      allocator.is_empty = false;
      TrainingState(offloaded.training).reload(agree);
      if (plain.step(1).norm != offloaded.step(1).norm) throw std::runtime_error("another norm");
      if (plain.parameters() != offloaded.parameters()) throw std::runtime_error("other parameters");
    });
    CHECK(failures == std::vector<std::string>(2));
  }
}
