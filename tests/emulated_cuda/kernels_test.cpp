// The threads of an emulated block: they share memory, wait for each other, and run in an order that finds races.
#include <catch2/catch.hpp>
#include <vector>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/include/kernel_language.h"
#include "tests/emulated_cuda/include/nccl.h"
#include "tests/emulated_cuda/last_words.h"

using Catch::Contains;
using emulated::last_words;

namespace {

constexpr unsigned threads = 256;

template <auto kernel, class... Arguments>
void launch(unsigned blocks, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim.x = blocks;
  config.blockDim.x = threads;
  REQUIRE(cudaLaunchKernelEx(&config, kernel, arguments...) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

// Memory of a GPU that starts as zeros.
class Words {
 public:
  explicit Words(std::size_t count) : count_(count) {
    void* memory = nullptr;
    cudaMalloc(&memory, count * sizeof(unsigned));
    cudaMemsetAsync(memory, 0, count * sizeof(unsigned));
    memory_ = static_cast<unsigned*>(memory);
  }
  ~Words() { cudaFree(memory_); }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  unsigned* get() const { return memory_; }
  std::vector<unsigned> read() const {
    std::vector<unsigned> words(count_);
    cudaMemcpyAsync(words.data(), memory_, count_ * sizeof(unsigned), cudaMemcpyDefault);
    return words;
  }

 private:
  std::size_t count_;
  unsigned* memory_ = nullptr;
};

template <bool waits>
__global__ void reverse(unsigned* to) {
  __shared__ unsigned all[threads];
  all[threadIdx.x] = blockIdx.x * threads + threadIdx.x;
  if constexpr (waits) __syncthreads();
  to[blockIdx.x * threads + threadIdx.x] = all[threads - 1 - threadIdx.x];
}

__global__ void sum_of_warp(unsigned* to) {
  unsigned sum = threadIdx.x;
  for (unsigned distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  to[threadIdx.x] = sum;
}

__global__ void leave_some() {
  if (threadIdx.x % 2 == 0) __syncthreads();
}

__global__ void shuffle_outside_of_mask(unsigned* to) { to[0] = __shfl_xor_sync(0xffffu, threadIdx.x, 16); }

__global__ void count_threads(unsigned long long* to) { atomicAdd(to, 1); }

__global__ void write_after(unsigned* to) { to[0] = 1; }

std::vector<unsigned> reversed(unsigned blocks) {
  std::vector<unsigned> expected;
  for (unsigned i = 0; i < blocks * threads; ++i) {
    expected.push_back(i / threads * threads + threads - 1 - i % threads);
  }
  return expected;
}

}  // namespace

TEST_CASE("threads of a block share memory, and wait for each other") {
  const Words to(3 * threads);
  launch<reverse<true>>(3, to.get());
  CHECK(to.read() == reversed(3));
}

TEST_CASE("a kernel that forgets to wait has another result") {
  const Words to(3 * threads);
  launch<reverse<false>>(3, to.get());
  CHECK(to.read() != reversed(3));
}

TEST_CASE("threads of a warp exchange values") {
  const Words to(threads);
  launch<sum_of_warp>(1, to.get());
  const std::vector<unsigned> sums = to.read();
  for (unsigned i = 0; i < threads; ++i) {
    const unsigned first = i / 32 * 32;
    CHECK(sums[i] == 32 * first + 31 * 16);
  }
}

TEST_CASE("atomic additions of all threads are counted") {
  const Words to(2);
  launch<count_threads>(5, reinterpret_cast<unsigned long long*>(to.get()));
  CHECK(to.read()[0] == 5 * threads);
}

TEST_CASE("a barrier that some threads of a block do not reach is found") {
  CHECK_THAT(last_words([] { launch<leave_some>(1); }), Contains("threads of a block meet"));
}

TEST_CASE("a shuffle that reads a thread outside of its mask is found") {
  CHECK_THAT(last_words([] {
               const Words to(1);
               launch<shuffle_outside_of_mask>(1, to.get());
             }),
             Contains("mask"));
}

TEST_CASE("a kernel that writes to freed memory is found") {
  CHECK_THAT(last_words([] {
               void* memory = nullptr;
               cudaMalloc(&memory, 64);
               cudaFree(memory);
               launch<write_after>(1, static_cast<unsigned*>(memory));
             }),
             Contains("signal 11"));
}

TEST_CASE("a kernel that is first launched after a communicator was made is found, unless it is loaded") {
  const auto words = [](bool loads) {
    return last_words([&] {
      ncclUniqueId id{};
      ncclGetUniqueId(&id);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      ncclComm_t communicator = nullptr;
      ncclCommInitRankConfig(&communicator, 1, id, 0, &config);
      cudaFuncAttributes attributes{};
      if (loads) cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&sum_of_warp));
      const Words to(threads);
      launch<sum_of_warp>(1, to.get());
    });
  };
  CHECK_THAT(words(false), Contains("loaded before NCCL"));
  CHECK(words(true).empty());
}

TEST_CASE("a launch into a stream of another GPU is refused") {
  CHECK(last_words([] {
          cudaSetDevice(1);
          cudaLaunchConfig_t config{};
          config.blockDim.x = threads;
          cudaStreamCreateWithFlags(&config.stream, cudaStreamNonBlocking);
          cudaSetDevice(0);
          if (cudaLaunchKernelEx(&config, leave_some) != cudaErrorInvalidResourceHandle) std::abort();
        }).empty());
}
