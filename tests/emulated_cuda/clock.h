// What has ended before a point in a stream or of the host: a vector clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulated {

// A vector clock: the number of the last ended work of each stream, by the stream's index.
class Clock {
 public:
  std::uint64_t of(std::size_t stream) const { return stream < ended_.size() ? ended_[stream] : 0; }

  void advance(std::size_t stream, std::uint64_t work) {
    if (ended_.size() <= stream) ended_.resize(stream + 1);
    if (ended_[stream] < work) ended_[stream] = work;
  }

  void advance(const Clock& other) {
    for (std::size_t stream = 0; stream < other.ended_.size(); ++stream) {
      advance(stream, other.ended_[stream]);
    }
  }

 private:
  std::vector<std::uint64_t> ended_;
};

// Work of a stream, as it was added.
struct Issued {
  const char* call = "";
  std::size_t stream = 0;
  std::uint64_t number = 0;      // in its stream, from 1
  Clock ended{};                 // what has ended when this work has
  std::vector<void*> callers{};  // who made the call, if the process was told to remember it
};
using IssuedPtr = std::shared_ptr<const Issued>;

inline bool is_ordered(const Issued& earlier, const Issued& later) {
  return later.ended.of(earlier.stream) >= earlier.number;
}

}  // namespace emulated
