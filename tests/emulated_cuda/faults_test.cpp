// Every call of CUDA, NCCL and cuBLAS may fail: a training then ends with a clear error, or goes on with the same bits.
#include <catch2/catch.hpp>

#include "tests/comm/process_groups.h"
#include "tests/emulated_cuda/emulated.h"
#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

Setup setup_of(std::size_t ranks) {
  Setup setup{.placement = placement_of_stage(3, ranks), .steps = 2, .offloads = true};
  setup.placement.state = {0.4, 0.6, 0.0};
  setup.placement.gradients = {0.5, 0.5, 0.0};
  return setup;
}

std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& failure) {
    return failure.what();
  }
  return "";
}

// Names the library, or says what the failed call could not do.
bool is_clear(const std::string& failure) {
  return Contains("cuda").match(failure) || Contains("NCCL").match(failure) || Contains("GPU").match(failure);
}

// Trains alone on GPU 0, and returns the error, if it is one.
std::string train_alone(const Setup& setup, const Outcome& expected) {
  return failure_of([&] {
    const auto backend = kernels::cpu_backend({.threads = 1});
    const Outcome found = train_rank(setup, *lone_communicator(*backend));
    CHECK((found.parameters == expected.parameters && found.seen == expected.seen));
  });
}

}  // namespace

TEST_CASE("a training in which a call of CUDA fails ends with a clear error, or goes on") {
  Setup setup = setup_of(1);
  const Outcome expected = train(setup).front();
  setup.gpu = 0;
  emulated::fail_call(0, cudaSuccess);
  REQUIRE(train_alone(setup, expected).empty());
  const std::size_t calls = emulated::calls_since_fault_was_set();
  REQUIRE(calls > 1000);
  std::size_t failed = 0;
  for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorLaunchFailure}) {
    const std::size_t first = error == cudaErrorLaunchFailure ? 1 : 2;  // so that every call fails in one way
    for (std::size_t call = first; call <= calls; call += 2 * every(47)) {
      CAPTURE(call, cudaGetErrorName(error));
      emulated::fail_call(call, error);
      const std::string failure = train_alone(setup, expected);
      emulated::fail_no_call();
      if (!failure.empty()) CHECK_THAT(failure, Catch::Predicate<std::string>(is_clear, "names CUDA"));
      CHECK(emulated::live() == emulated::Live{});
      failed += failure.empty() ? 0u : 1u;
    }
  }
  CHECK(failed > calls / every(47) / 4);
}

TEST_CASE("ranks end when a call of CUDA or NCCL fails on one of them") {
  Setup setup = setup_of(2);
  const std::vector<Outcome> expected = train(setup);
  std::size_t failed = 0;
  for (std::size_t call = 1; call < 3000; call += 1 + call / 6 * every(3)) {
    CAPTURE(call);
    const ProcessGroupRig rig(2, HostTransport::shared_memory, patient);
    Processes processes(2, [&](std::size_t rank) {
      if (rank == 1) emulated::fail_call(call, call % 2 == 0 ? cudaErrorMemoryAllocation : cudaErrorLaunchFailure);
      rig.as_rank(rank, [&](Communicator& world) {
        Setup on_gpu = setup;
        on_gpu.gpu = static_cast<int>(rank);
        const Outcome found = train_rank(on_gpu, world);
        expect(found.parameters == expected[rank].parameters, "other parameters than on the CPU");
      });
      expect(emulated::live() == emulated::Live{}, "something of the GPU was left behind");
    });
    const Failures failures = processes.failures();
    if (failures[1].empty()) {
      CHECK(failures[0].empty());
      continue;
    }
    ++failed;
    CHECK_THAT(failures[1], Catch::Predicate<std::string>(is_clear, "names CUDA or NCCL"));
    CHECK_THAT(failures[0], Contains("rank 1"));
  }
  CHECK(failed > 8);
}
