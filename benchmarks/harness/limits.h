// The limits of this machine's memory, with which kernels are compared. They use the same threads and the same kind of
// buffers.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/harness/measure.h"
#include "benchmarks/harness/threads.h"

namespace ballast::benchmarks {

// Methods of copying. Which is the fastest depends on the processor and on the version of libc.
enum class Copy { memcpy, loop, streaming };
inline constexpr Copy all_copies[] = {Copy::memcpy, Copy::loop, Copy::streaming};
std::string_view name(Copy kind);

// One run of a subject moves `bytes`, the sum of those read and those written; its work is in gigabytes. The subjects
// share the buffers of their Limits, must not outlive it, and cannot move more bytes than it was made for.
class Limits {
 public:
  Limits(std::size_t most_bytes, const Threads& threads);

  Subject copy(Copy kind, std::size_t bytes);
  Subject triad(std::size_t bytes);  // a = b + s * c
  // a = s * a: the limit of an update in place. Every written line is also needed, whereas a copy may fetch lines only
  // to overwrite them.
  Subject scale(std::size_t bytes);
  Subject read(std::size_t bytes);  // the limit of a sum or a search

 private:
  float* data(std::size_t buffer) const { return buffers_[buffer].as<float>().data(); }
  template <class Walk>
  Subject walking(std::size_t bytes, std::size_t accesses, Walk walk);

  const Threads* threads_;
  std::vector<Buffer> buffers_;
};

}  // namespace ballast::benchmarks
