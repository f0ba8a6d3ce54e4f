// The limits of this machine's memory, with which kernels are compared. They use the same threads and the same kind of
// buffers, each with a slice of the work.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/harness/measure.h"
#include "kernels/threads.h"

namespace ballast::benchmarks {

using kernels::Threads;

// Calls `body(first, last)` for slices that cover 0 to `count`, one for each thread, cut at multiples of `grain`.
template <class Body>
void for_slices(const Threads& threads, std::size_t count, std::size_t grain, const Body& body) {
  const auto slices = static_cast<std::size_t>(threads.count());
  const std::size_t grains = (count + grain - 1) / grain;
  const auto edge = [&](std::size_t slice) { return std::min(count, grains * slice / slices * grain); };
  threads.each(slices, [&](std::size_t slice) { body(edge(slice), edge(slice + 1)); });
}

// A method of copying. Which is the fastest depends on the processor and on the version of libc.
struct Copy {
  std::string_view name;
  void (*run)(float* to, const float* from, std::size_t count);
};
extern const std::array<Copy, 3> all_copies;

// Copies without fetching the lines that it overwrites, if the processor can. `to` and `from` are aligned to 16 bytes.
void stream_copy(float* to, const float* from, std::size_t count);

// One run of a subject moves `bytes`, the sum of those read and those written; its work is in gigabytes. The subjects
// share the buffers of their Limits, must not outlive it, and cannot move more bytes than it was made for.
class Limits {
 public:
  Limits(std::size_t most_bytes, const Threads& threads);

  Subject copy(const Copy& method, std::size_t bytes) const;
  // a = s * a: the limit of an update in place. Every written line is also needed, whereas a copy may fetch lines only
  // to overwrite them.
  Subject scale(std::size_t bytes) const;
  Subject read(std::size_t bytes) const;  // the limit of a sum or a search

 private:
  float* data(std::size_t buffer) const { return buffers_[buffer].as<float>().data(); }
  template <class Walk>
  Subject walking(std::size_t bytes, std::size_t accesses, Walk walk) const;

  const Threads* threads_;
  std::vector<Buffer> buffers_;
};

}  // namespace ballast::benchmarks
