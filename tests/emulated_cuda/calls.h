// What every call of the emulated libraries begins with: it is counted, may be told to fail, and may make a context.
#pragma once

#include <utility>

#include "tests/emulated_cuda/emulated.h"

namespace emulated {

// How a call treats the thread's current GPU.
enum class Context {
  none,       // asks the driver only
  on_current  // makes a context on the current GPU, if there is none
};

// Returns the error that the call has to return at once; cudaSuccess if it shall do its work.
cudaError_t begin_call(const char* name, Context context);
cudaError_t end_call(cudaError_t result);  // remembers an error for cudaGetLastError()

template <class Body>
cudaError_t call(const char* name, Context context, Body&& body) {
  const cudaError_t refused = begin_call(name, context);
  return end_call(refused != cudaSuccess ? refused : std::forward<Body>(body)());
}

// A call that gives something up, or waits, does so even if it fails: destructors expect it, and CUDA's waits fail only
// when nothing is left to wait for.
template <class Body>
cudaError_t releasing_call(const char* name, Body&& body) {
  const cudaError_t refused = begin_call(name, Context::on_current);
  const cudaError_t result = std::forward<Body>(body)();
  return end_call(refused != cudaSuccess ? refused : result);
}

bool context_has_failed();  // an error that ends the context: no more work is done
int current_gpu();

}  // namespace emulated
