// What tests ask of the emulation, and change in it.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/emulated_cuda/include/cuda_runtime_api.h"
#include "tests/emulated_cuda/memory_order.h"

namespace emulated {

constexpr int max_gpus = 8;
constexpr std::size_t context_bytes = std::size_t{500} << 20;  // bytes of its GPU's memory that a context takes

// An object that lives until the process has ended, like CUDA itself. A program that calls exit() in the middle of a training
// leaves threads that still use streams, and waits for none of them.
template <class T>
T& never_destroyed() {
  return *new T();
}

// The GPUs of this process. Call it before the first call of CUDA.
struct Machine {
  int gpus = 4;
  std::size_t memory_bytes = std::size_t{8} << 30;  // the memory of each GPU
};
void set_machine(const Machine& machine);

// The time at which streams work. Lazy streams do nothing until the host waits for them, or asks whether they have ended; others
// are late by chance. Without a call, EMULATED_CUDA_LAZY_STREAMS=1 in the environment makes streams lazy.
struct Schedule {
  bool lazy = false;
  unsigned seed = 0;
  std::size_t forgotten_wait = 0;  // the wait of a stream for another one that is left out, by its number from 1
};
void set_schedule(const Schedule& schedule);  // before the first call of CUDA

bool are_kernels_recorded();  // whether the accesses of kernels are checked; not in builds with sanitizers

// What exists now. After a test it is what it was before.
struct Live {
  std::size_t device_bytes = 0;
  std::size_t streams = 0;
  std::size_t events = 0;
  std::size_t pinned_ranges = 0;
  std::size_t communicators = 0;
  std::size_t cublas_handles = 0;
  std::size_t profiler_ranges = 0;
  friend bool operator==(const Live&, const Live&) = default;
};
Live live();

std::vector<int> gpus_with_context();  // the GPUs that have a context of this process
void allow_context_only_on(int gpu);   // a context on another one then ends the process

// The calls since the last reset, by name. Kernels count as "kernel", and work of NCCL as "NCCL kernel".
using Counts = std::map<std::string, std::size_t>;
Counts counts();
Counts counts_of_this_thread();  // the calls that only this thread made
void reset_counts();

void count(const char* name);  // something that a library does, which is no call of CUDA

// Lets the call with this number fail, counted from now on, and all later ones if the error is of the kind that ends a
// context. Errors of NCCL's calls are ncclSystemError.
void fail_call(std::size_t number, cudaError_t error);
void fail_call_of(const std::string& name, std::size_t number, cudaError_t error);  // counts calls of this name only
void fail_no_call();
std::size_t calls_since_fault_was_set();

// Changes each pointer to a GPU's memory, among these words, to the address at which work of the GPU can access it.
void give_access(void* words, std::size_t bytes);

// Returns where work of the GPU finds what a program knows as `address`. Memory of the host is where it is.
template <class T>
T* in_work(T* address) {
  give_access(&address, sizeof address);
  return address;
}

// Adds a kernel of another library, such as torch, to a stream of the current GPU. Its pointers have been given access.
cudaError_t launch_foreign(cudaStream_t stream, std::vector<Access> accesses, std::function<void()> kernel);

// Somebody waits for all work of a stream of the current GPU, without a call of CUDA: no wait is counted, and the host learns nothing.
void want_all_of(cudaStream_t stream);

// Notes that a kernel, or a library of kernels, is used. Its first use ends the process if there is a communicator.
void use_kernel(const void* kernel);

// Pages of host memory that were not populated when they were pinned: the driver would have done it, on one thread.
std::size_t pages_populated_by_pinning();

}  // namespace emulated
