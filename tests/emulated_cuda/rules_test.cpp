// The emulation finds what CUDA and NCCL forbid: each test breaks a rule.
#include <catch2/catch.hpp>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/include/nccl.h"
#include "tests/emulated_cuda/last_words.h"

using Catch::Contains;
using emulated::last_words;

namespace {

constexpr std::size_t count = 1000;

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

cudaEvent_t make_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  cudaEventCreateWithFlags(&event, flags);
  return event;
}

std::byte* make_memory(std::size_t bytes = count) {
  void* memory = nullptr;
  cudaMalloc(&memory, bytes);
  return static_cast<std::byte*>(memory);
}

ncclResult_t connect(ncclComm_t& made, const ncclUniqueId& id, int rank, int ranks) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  return ncclCommInitRankConfig(&made, ranks, id, rank, &config);
}

ncclComm_t alone() {
  ncclUniqueId id{};
  ncclGetUniqueId(&id);
  ncclComm_t made = nullptr;
  connect(made, id, 0, 1);
  return made;
}

void send_to_self(ncclComm_t communicator, cudaStream_t stream, std::byte* memory) {
  ncclGroupStart();
  ncclSend(memory, count / 2, ncclUint8, 0, communicator, stream);
  ncclRecv(memory + count / 2, count / 2, ncclUint8, 0, communicator, stream);
  ncclGroupEnd();
}

// Connects two ranks on two threads, and runs `body` on each.
void on_two_ranks(const std::vector<int>& gpus, const std::function<void(int rank, ncclComm_t)>& body) {
  ncclUniqueId id{};
  ncclGetUniqueId(&id);
  std::vector<std::thread> threads;
  for (const int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      cudaSetDevice(gpus[static_cast<std::size_t>(rank)]);
      ncclComm_t made = nullptr;
      if (connect(made, id, rank, 2) != ncclSuccess) made = nullptr;
      body(rank, made);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace

TEST_CASE("a context on another GPU than the allowed one is found, whichever call makes it") {
  const auto words_of = [](const std::function<void()>& call) {
    return last_words([&] {
      emulated::allow_context_only_on(1);
      cudaSetDevice(1);
      std::thread(call).join();
    });
  };
  CHECK_THAT(words_of([] { cudaSetDevice(0); }), Contains("own GPU") && Contains("cudaSetDevice made one on GPU 0"));
  CHECK_THAT(words_of([] { make_memory(); }), Contains("cudaMalloc made one on GPU 0"));
  CHECK_THAT(words_of([] { make_event(); }), Contains("cudaEventCreateWithFlags made one on GPU 0"));
  CHECK(words_of([] {
          int gpus = 0;
          cudaGetDevice(&gpus);
          cudaGetDeviceCount(&gpus);
        }).empty());
}

TEST_CASE("NCCL restores a thread's GPU, which makes a context there") {
  CHECK_THAT(last_words([] {
               emulated::allow_context_only_on(1);
               cudaSetDevice(1);
               const ncclComm_t communicator = alone();
               std::thread([&] { ncclCommAbort(communicator); }).join();
             }),
             Contains("ncclCommAbort made one on GPU 0"));
}

TEST_CASE("work of two communicators without an order on the GPU is found") {
  const auto words_with = [](const std::function<void(cudaStream_t first, cudaStream_t second)>& between) {
    return last_words([&] {
      const ncclComm_t one = alone(), other = alone();
      const cudaStream_t first = make_stream(), second = make_stream();
      send_to_self(one, first, make_memory());
      between(first, second);
      send_to_self(other, second, make_memory());
    });
  };
  CHECK_THAT(words_with([](cudaStream_t, cudaStream_t) {}), Contains("different communicators is ordered"));
  CHECK(words_with([](cudaStream_t first, cudaStream_t second) {
          const cudaEvent_t event = make_event();
          cudaEventRecord(event, first);
          cudaStreamWaitEvent(second, event);
        }).empty());
  CHECK(words_with([](cudaStream_t first, cudaStream_t) { cudaStreamSynchronize(first); }).empty());
}

TEST_CASE("NCCL refuses two ranks on one GPU") {
  std::vector<ncclComm_t> made(2);
  CHECK(last_words([&] {
          on_two_ranks({2, 2}, [&](int, ncclComm_t communicator) {
            if (communicator != nullptr) std::abort();
          });
        }).empty());
}

TEST_CASE("a send and a receive of different sizes are found") {
  CHECK_THAT(last_words([] {
               on_two_ranks({0, 1}, [](int rank, ncclComm_t communicator) {
                 const cudaStream_t stream = make_stream();
                 std::byte* const memory = make_memory();
                 if (rank == 0) ncclSend(memory, 10, ncclUint8, 1, communicator, stream);
                 if (rank == 1) ncclRecv(memory, 11, ncclUint8, 0, communicator, stream);
                 cudaStreamSynchronize(stream);
               });
             }),
             Contains("10 bytes were sent, 11 expected"));
}

TEST_CASE("NCCL with memory of the host, or beyond an allocation, is found") {
  std::vector<std::byte> host(count);
  CHECK_THAT(last_words([&] { send_to_self(alone(), make_stream(), host.data()); }), Contains("allocated memory"));
  CHECK_THAT(last_words([&] { send_to_self(alone(), make_stream(), make_memory(count - 1)); }),
             Contains("allocated memory"));
}

TEST_CASE("the host cannot access a GPU's memory") {
  CHECK_THAT(last_words([] { std::memset(make_memory(), 0, count); }), Contains("signal 11"));
  CHECK_THAT(last_words([] {  // nor while the GPU works on it
               constexpr std::size_t much = std::size_t{64} << 20;
               std::byte* const memory = make_memory(much);
               for (int i = 0; i < 10; ++i) {
                 cudaMemsetAsync(memory, i, much);
               }
               std::memset(memory, 0, count);
             }),
             Contains("signal 11"));
}

TEST_CASE("handles belong to their GPU") {
  CHECK(last_words([] {
          cudaSetDevice(1);
          const cudaEvent_t event = make_event(), timed = make_event(cudaEventDefault);
          cudaSetDevice(0);
          const cudaStream_t stream = make_stream();
          if (cudaEventRecord(event, stream) != cudaErrorInvalidResourceHandle) std::abort();
          if (cudaStreamWaitEvent(stream, event) != cudaSuccess) std::abort();
          float milliseconds = 0;
          if (cudaEventElapsedTime(&milliseconds, event, timed) != cudaErrorInvalidResourceHandle) std::abort();
        }).empty());
}

TEST_CASE("streams and events that were destroyed are found") {
  CHECK_THAT(last_words([] {
               const cudaStream_t stream = make_stream();
               cudaStreamDestroy(stream);
               cudaStreamSynchronize(stream);
             }),
             Contains("streams live"));
  CHECK_THAT(last_words([] {
               const cudaEvent_t event = make_event();
               cudaEventDestroy(event);
               cudaEventSynchronize(event);
             }),
             Contains("events live"));
}

TEST_CASE("memory that is unpinned while it is copied is found") {
  CHECK_THAT(last_words([] {
               std::vector<std::byte> host(count);
               cudaHostRegister(host.data(), count, cudaHostRegisterPortable);
               constexpr std::size_t much = std::size_t{64} << 20;
               std::byte* const memory = make_memory(much);
               const cudaStream_t stream = make_stream();
               for (int i = 0; i < 10; ++i) {
                 cudaMemsetAsync(memory, i, much, stream);
               }
               cudaMemcpyAsync(memory, host.data(), count, cudaMemcpyDefault, stream);
               cudaHostUnregister(host.data());
             }),
             Contains("stays pinned"));
}

TEST_CASE("a copy of pageable memory waits, and one of pinned memory does not") {
  CHECK(last_words([] {
          std::vector<std::byte> host(count);
          const cudaStream_t stream = make_stream();
          std::byte* const memory = make_memory();
          cudaMemcpyAsync(memory, host.data(), count, cudaMemcpyDefault, stream);
          if (emulated::counts()["copy that waits"] != 1) std::abort();
          cudaHostRegister(host.data(), count, cudaHostRegisterPortable);
          cudaMemcpyAsync(memory, host.data(), count, cudaMemcpyDefault, stream);
          if (emulated::counts()["copy that waits"] != 1) std::abort();
          cudaStreamSynchronize(stream);
          if (cudaHostRegister(host.data(), 1, 0) != cudaErrorHostMemoryAlreadyRegistered) std::abort();
        }).empty());
}

TEST_CASE("CUDA does not work in a process that was forked after its first use") {
  CHECK(last_words([] {
          make_memory();
          const std::string words = last_words([] {
            void* memory = nullptr;
            if (cudaMalloc(&memory, 1) != cudaErrorInitializationError) std::abort();
          });
          if (!words.empty()) std::abort();
        }).empty());
}

TEST_CASE("an error that ends the context is returned by every later call, others are not") {
  CHECK(last_words([] {
          void* memory = nullptr;
          emulated::fail_call(1, cudaErrorMemoryAllocation);
          if (cudaMalloc(&memory, 1) != cudaErrorMemoryAllocation) std::abort();
          if (cudaGetLastError() != cudaErrorMemoryAllocation || cudaGetLastError() != cudaSuccess) std::abort();
          if (cudaMalloc(&memory, 1) != cudaSuccess) std::abort();
          emulated::fail_call(2, cudaErrorLaunchFailure);
          if (cudaDeviceSynchronize() != cudaSuccess) std::abort();
          if (cudaDeviceSynchronize() != cudaErrorLaunchFailure) std::abort();
          if (cudaDeviceSynchronize() != cudaErrorLaunchFailure) std::abort();
        }).empty());
}
