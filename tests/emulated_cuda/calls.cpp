#include "tests/emulated_cuda/calls.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

std::mutex mutex;  // guards the next five variables
auto& counted = never_destroyed<Counts>();
auto& counted_by = never_destroyed<std::map<std::thread::id, Counts>>();
std::size_t calls_until_fault = 0;                   // 0: none
auto& faulty_call = never_destroyed<std::string>();  // the function whose calls are counted; empty: all
cudaError_t fault = cudaSuccess;

std::atomic<std::size_t> calls_made = 0;
std::atomic<cudaError_t> fatal = cudaSuccess;
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

bool ends_context(cudaError_t error) { return error == cudaErrorLaunchFailure || error == cudaErrorIllegalAddress; }

// Counts the call, and returns the error that it has been told to return.
cudaError_t counted_call(const char* name) {
  ++calls_made;
  const std::lock_guard lock(mutex);
  ++counted[name];
  ++counted_by[std::this_thread::get_id()][name];
  if (calls_until_fault == 0 || (!faulty_call.empty() && faulty_call != name)) return cudaSuccess;
  if (--calls_until_fault > 0) return cudaSuccess;
  if (ends_context(fault)) fatal = fault;
  return fault;
}

}  // namespace

cudaError_t begin_call(const char* name, Context context) {
  const cudaError_t told = counted_call(name);
  if (told != cudaSuccess) return told;
  if (fatal != cudaSuccess) return fatal;
  return context == Context::on_current ? use_context(current, name) : cudaSuccess;
}

cudaError_t end_call(cudaError_t result) {
  if (result != cudaSuccess) last_error = result;
  return result;
}

void count(const char* name) {
  const std::lock_guard lock(mutex);
  ++counted[name];
  ++counted_by[std::this_thread::get_id()][name];
}

bool context_has_failed() { return fatal != cudaSuccess; }
int current_gpu() { return current; }

Counts counts() {
  const std::lock_guard lock(mutex);
  return counted;
}

Counts counts_of_this_thread() {
  const std::lock_guard lock(mutex);
  return counted_by[std::this_thread::get_id()];
}

void reset_counts() {
  const std::lock_guard lock(mutex);
  counted.clear();
  counted_by.clear();
}

void fail_call(std::size_t number, cudaError_t error) { fail_call_of("", number, error); }

void fail_call_of(const std::string& name, std::size_t number, cudaError_t error) {
  const std::lock_guard lock(mutex);
  calls_until_fault = number;
  faulty_call = name;
  fault = error;
  calls_made = 0;
}

void fail_no_call() {
  const std::lock_guard lock(mutex);
  calls_until_fault = 0;
  fatal = cudaSuccess;
}

std::size_t calls_since_fault_was_set() { return calls_made; }

}  // namespace emulated

using emulated::call;
using emulated::Context;

cudaError_t cudaGetLastError() { return std::exchange(emulated::last_error, cudaSuccess); }

cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", Context::none, [&] {
    *device = emulated::current;
    return cudaSuccess;
  });
}

// Makes the context at once, as CUDA does since version 12.
cudaError_t cudaSetDevice(int device) {
  return call("cudaSetDevice", Context::none, [&] {
    if (device < 0 || device >= emulated::gpus()) return cudaErrorInvalidDevice;
    emulated::current = device;
    return emulated::use_context(device, "cudaSetDevice");
  });
}
