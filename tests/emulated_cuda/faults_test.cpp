// Every call of CUDA, NCCL and cuBLAS may fail: a training then ends with a clear error, or goes on with the same bits.
#include <catch2/catch.hpp>
#include <set>

#include "kernels/runtime/buffer.h"
#include "tests/emulated_cuda/two_gpus.h"
#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// Features whose calls and kernels a plain training does not make.
enum class Feature { none, muon, codes, bf16_sums };

Setup setup_of(std::size_t ranks, Feature feature = Feature::none) {
  Setup setup{.placement = placement_of_stage(3, ranks), .steps = 2, .offloads = true};
  setup.muon = feature == Feature::muon;
  if (feature == Feature::codes) setup.wire = {.gather = WireFormat::int8, .reduce = WireFormat::int4};
  if (feature == Feature::bf16_sums) setup.gradient_format = GradientFormat::bf16;
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
  for (const char* const library : {"cuda", "cuBLAS", "NCCL", "GPU"})
    if (failure.find(library) != std::string::npos) return true;
  return false;
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
    const std::size_t first = error == cudaErrorLaunchFailure ? 1 : 2;  // each call fails in one of the two ways
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

// The first and the last call of each function of cuBLAS: the calls of CUDA are those of any training.
TEST_CASE("a training with Muon in which a call of cuBLAS fails ends with a clear error, or goes on") {
  Setup setup = setup_of(1, Feature::muon);
  setup.steps = 1;
  setup.gpu = 0;
  const Outcome expected = train(setup).front();
  emulated::reset_counts();
  REQUIRE(train_alone(setup, expected).empty());
  std::set<std::string> failed;
  for (const auto& [name, calls] : emulated::counts()) {
    if (!name.starts_with("cublas")) continue;
    for (const bool first : {true, false}) {
      if (sanitized && !first) continue;  // this takes minutes
      CAPTURE(name, first);
      emulated::fail_call_of(name, first ? 1 : calls, first ? cudaErrorMemoryAllocation : cudaErrorLaunchFailure);
      const std::string failure = train_alone(setup, expected);
      emulated::fail_no_call();
      if (!failure.empty()) CHECK_THAT(failure, Catch::Predicate<std::string>(is_clear, "names cuBLAS"));
      CHECK(emulated::live() == emulated::Live{});
      if (!failure.empty()) failed.insert(name);
    }
  }
  CHECK(failed == std::set<std::string>{"cublasCreate", "cublasGemmStridedBatchedEx", "cublasSetMathMode",
                                        "cublasSetStream", "cublasSetWorkspace"});
}

TEST_CASE("ranks end when a call of CUDA or NCCL fails on one of them") {
  const std::array setups{setup_of(2), setup_of(2, Feature::codes), setup_of(2, Feature::bf16_sums),
                          setup_of(2, Feature::muon)};
  std::array<std::vector<Outcome>, setups.size()> expected_of;
  std::ranges::transform(setups, expected_of.begin(), train);
  std::size_t failed = 0, followed = 0, turn = 0;
  for (std::size_t call = 1; call < 3000; call += 1 + call / 6 * every(3)) {
    CAPTURE(call);
    const Setup& setup = setups[turn % setups.size()];
    const std::vector<Outcome>& expected = expected_of[turn++ % setups.size()];
    const ProcessGroupRig rig(2, HostTransport::shared_memory, patient);
    Processes processes(2, [&](std::size_t rank) {
      if (rank == 1) emulated::fail_call(call, call % 2 == 0 ? cudaErrorMemoryAllocation : cudaErrorLaunchFailure);
      rig.as_rank(rank, [&](Communicator& world) {
        Setup on_gpu = setup;
        on_gpu.gpu = static_cast<int>(rank);
        const Outcome found = train_rank(on_gpu, world);
        // cuBLAS adds up the products of Muon's matrices in another order than the CPU.
        expect(setup.muon || found.parameters == expected[rank].parameters, "other parameters than on the CPU");
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
    if (failures[0].empty()) continue;  // it may have ended before the fault: its parameters are right
    ++followed;
    CHECK_THAT(failures[0], Contains("rank 1"));
  }
  CHECK(failed > 8);
  CHECK(followed + 3 > failed);
}

// A link may break while a rank waits. No call of NCCL returns that error.
TEST_CASE("an error that NCCL finds between its calls ends the ranks") {
  const Failures failures = failures_on_two_gpus([](RankOnGpu& rank) {
    const auto group = rank.split();
    MemoryAccounts accounts;
    const Buffer memory =
        allocate(accounts, {.kind = MemoryKind::device, .bytes = 256, .owner = "test", .gpu = rank.gpu});
    if (rank.gpu == 0) {
      // An error that leaves the GPU usable: else waiting for the stream might report it first.
      emulated::fail_call_of("ncclCommGetAsyncError", 1, cudaErrorMemoryAllocation);
      group->all_gather(memory.view(DType::u8).part(0, 128), memory.view(DType::u8));
    }
    rank.stream.synchronize();
    rank.world.barrier();  // rank 1 makes no other call
  });
  for (const std::string& failure : failures) {
    CHECK_THAT(failure, Contains("NCCL failed: remote process exited or there was a network error"));
  }
}
